"""Higher-order operators that are no more than their operations, taken out of an exported program: what calls a graph once (under
another gradient mode, under autocast, as a checkpoint), loops with a fixed number of turns, and flex_attention.  Those that decide
while they run (cond, while_loop) stay.  So do scans along an axis whose size is declared.

torch cannot store flex_attention in a file (2.11, 2.13: SerializeError), and no compiler for a processor takes it.  It becomes the
products, the score function over all positions, and the softmax, as in torch's own `math_attention`
(torch/_higher_order_ops/flex_attention.py).

Private interfaces (torch 2.11, 2.13): the order of these operators' arguments, `make_fx`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from ..model.user_code import place
from .torch_program import copied_graph, with_graph

LONGEST = 4096
"""Operations that a loop may become."""

AUTOCAST = "wrap_with_autocast"

VMAP = "torch._functorch.predispatch"
"""The module of the functions that export leaves of torch.vmap."""

Results = Sequence[Any]
"""The nodes, or values, that an operator's results became."""


def expanded(program: ExportedProgram) -> ExportedProgram:
    """`program` without the operators above; the same one where it has none.  Operators of torch that were traced apart have the
    user's line of what takes their results."""
    if any(_higher_order(node) for node in program.graph.nodes):
        program = _without_loops(program)
    nodes = [node for module in _graphs(program.graph_module) for node in module.graph.nodes]
    # only another trace by torch writes down the casts of autocast, which the dispatcher makes, and takes out the batch axes of
    # vmap; it leaves composite operators whole
    traced_again = any(_name(node) == AUTOCAST or getattr(node.target, "__module__", "") == VMAP for node in nodes)
    if not traced_again:
        return program
    return _in_place(_without_dead(program.run_decompositions({})), program)


def _without_dead(program: ExportedProgram) -> ExportedProgram:
    """`program`, changed in place, without what nothing needs but torch's own assertions about it: how a block mask came to be."""
    check = torch.ops.aten._assert_tensor_metadata.default
    for node in reversed(list(program.graph.nodes)):
        if node.op == "call_function" and all(user.target is check for user in node.users) and not node.is_impure():
            for user in list(node.users):
                program.graph.erase_node(user)
            program.graph.erase_node(node)
    program.graph_module.recompile()
    return program


def _in_place(functional: ExportedProgram, program: ExportedProgram) -> ExportedProgram:
    """The functional form of `program` with its writes as operations again, as torch.export leaves them and what follows wants."""
    root, signature = functional.graph_module, functional.graph_signature
    output = root.graph.output_node()
    inputs = {spec.target: spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.BUFFER}
    places = {node.name: node for node in root.graph.find_nodes(op="placeholder")}
    kept, specs = [], []
    for value, spec in zip(output.args[0], signature.output_specs, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            kept.append(value)
            specs.append(spec)
            continue
        assert spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION), spec
        written = places[inputs.get(spec.target, spec.target)]
        with root.graph.inserting_before(output):
            copied = root.graph.call_function(torch.ops.aten.copy_.default, (written, value))
        copied.meta = {name: value.meta[name] for name in ("stack_trace", "nn_module_stack") if name in value.meta}
        copied.meta["val"] = written.meta["val"]
    output.args = (tuple(kept),)
    root.graph.lint()
    root.recompile()
    return with_graph(functional, root, {}, dialect=program, output_specs=specs)


def _without_loops(program: ExportedProgram) -> ExportedProgram:
    root = copied_graph(program)
    before = _returned(root)
    _expand(root)
    renamed = {old: new for old, new in zip(before, _returned(root), strict=True) if old != new}
    return with_graph(program, root, renamed)


def _returned(root: GraphModule) -> list[str]:
    return [str(leaf) for leaf in tree_leaves(root.graph.output_node().args[0])]


def _graphs(root: GraphModule) -> list[GraphModule]:
    return [module for module in root.modules() if isinstance(module, GraphModule)]


def _higher_order(node: Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _name(node: Node) -> str:
    return node.target.name() if isinstance(node.target, torch._ops.HigherOrderOperator) else ""


def _expand(module: GraphModule) -> None:
    for child in module.children():
        if isinstance(child, GraphModule):
            _expand(child)
    for node in [node for node in module.graph.nodes if _higher_order(node)]:
        node.meta["stack_trace"] = _trace(node)
        how = EXPANSIONS.get(_name(node))
        several = isinstance(node.meta.get("val"), tuple | list)
        if how is None or (several and any(user.target is not operator.getitem for user in node.users)):
            continue
        with module.graph.inserting_before(node):
            results = how(module, node)
        if results is None:
            continue
        if several:
            for user in list(node.users):
                user.replace_all_uses_with(results[user.args[1]])
                module.graph.erase_node(user)
        else:
            node.replace_all_uses_with(results[0])
        module.graph.erase_node(node)
    for node in reversed(list(module.graph.nodes)):
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)
    module.delete_all_unused_submodules()
    module.recompile()


def _trace(node: Node) -> str:
    """The stack trace of a node; where that is all torch's, of the nearest node that uses it."""
    reached = [node]
    for each in reached:
        if place(each)[0] or len(reached) > 64:
            return str(each.meta.get("stack_trace") or "")
        reached += [user for user in each.users if user not in reached]
    return str(node.meta.get("stack_trace") or "")


# --- graphs that are called once ------------------------------------------------------------------------------


def _body_of(module: GraphModule, node: Any) -> GraphModule | None:
    made = getattr(module, str(node.target), None) if isinstance(node, Node) and node.op == "get_attr" else None
    return made if isinstance(made, GraphModule) else None


def _called(first: int, operands: int) -> Callable[[GraphModule, Node], Results | None]:
    """How to expand an operator whose argument number `first` is a graph, and whose arguments from `operands` on are what it
    takes."""

    def expand(module: GraphModule, node: Node) -> Results | None:
        body = _body_of(module, node.args[first])
        return None if body is None else _inline(module, body, tree_leaves(node.args[operands:]), node)

    return expand


def _inline(module: GraphModule, body: GraphModule, operands: Sequence[Any], caller: Node) -> Results | None:
    """Copies of the body's nodes, for these operands, at the graph's insertion point; its results.  None where they do not fit."""
    placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(operands):
        return None
    made: dict[Node, Any] = dict(zip(placeholders, operands, strict=True))
    for node in body.graph.nodes:
        if node.op == "output":
            return [made[leaf] if isinstance(leaf, Node) else leaf for leaf in tree_leaves(node.args[0])]
        if node.op == "get_attr":
            name = _attribute(module, str(node.target).replace(".", "_"), operator.attrgetter(node.target)(body))
            made[node] = module.graph.get_attr(name)
            made[node].meta = dict(node.meta)
        elif node not in made:
            made[node] = module.graph.node_copy(node, lambda each: made[each])
            made[node].meta["stack_trace"] = node.meta.get("stack_trace") if place(node)[0] else caller.meta.get("stack_trace")
            made[node].meta.setdefault("nn_module_stack", caller.meta.get("nn_module_stack", {}))
    raise AssertionError("a graph without an output")


def _attribute(module: GraphModule, name: str, value: Any) -> str:
    """The name that `value` gets as an attribute of the module."""
    number, free = 0, name
    while hasattr(module, free):
        number, free = number + 1, f"{name}_{number}"
    setattr(module, free, value)
    return free


# --- loops ----------------------------------------------------------------------------------------------------


def _call(module: GraphModule, caller: Node, target: Any, *args: Any) -> Node:
    """A node that calls an operator, with its value."""
    node = module.graph.call_function(target, args)
    values = map_aggregate(args, lambda each: each.meta["val"] if isinstance(each, Node) else each)
    with caller.meta["cgcompile_mode"]:
        node.meta["val"] = target(*values)
    node.meta["stack_trace"] = caller.meta.get("stack_trace")
    node.meta["nn_module_stack"] = caller.meta.get("nn_module_stack", {})
    return node


def _scan(module: GraphModule, node: Node) -> Results | None:
    """scan(body, init, xs, additional): the carries, then what every turn gave, stacked."""
    body, init, xs, more = _body_of(module, node.args[0]), list(node.args[1]), list(node.args[2]), list(node.args[3])
    turns = _turns(body, xs)
    if body is None or not turns or not _with_mode(node):
        return None
    carries, rows = init, []
    for turn in range(turns):
        given = [_call(module, node, torch.ops.aten.select.int, each, 0, turn) for each in xs]
        made = _inline(module, body, [*carries, *given, *more], node)
        if made is None:
            return None
        carries, row = list(made[: len(init)]), list(made[len(init) :])
        rows.append(row)
    return [*carries, *_stacked(module, node, rows)]


def _map(module: GraphModule, node: Node) -> Results | None:
    """map_impl(body, xs, more): what every turn gave, stacked."""
    body, xs, more = _body_of(module, node.args[0]), list(node.args[1]), list(node.args[2])
    turns = _turns(body, xs)
    if body is None or not turns or not _with_mode(node):
        return None
    rows = []
    for turn in range(turns):
        made = _inline(module, body, [*[_call(module, node, torch.ops.aten.select.int, each, 0, turn) for each in xs], *more], node)
        if made is None:
            return None
        rows.append(list(made))
    return _stacked(module, node, rows)


def _stacked(module: GraphModule, node: Node, rows: Sequence[Sequence[Any]]) -> list[Node]:
    return [_call(module, node, torch.ops.aten.stack.default, list(column)) for column in zip(*rows, strict=True)]


def _turns(body: GraphModule | None, xs: Sequence[Any]) -> int:
    """How often a loop over the first axis of `xs` turns; 0 where that is not fixed, or too often."""
    if body is None or not xs:
        return 0
    size = xs[0].meta["val"].shape[0]
    return size if isinstance(size, int) and size * len(body.graph.nodes) <= LONGEST else 0


def _with_mode(node: Node) -> bool:
    """Leaves the mode of the program's fake tensors in the node's metadata; False where it has none."""
    values = [leaf.meta.get("val") for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]
    modes = [value.fake_mode for value in tree_leaves(values) if hasattr(value, "fake_mode")]
    node.meta["cgcompile_mode"] = modes[0] if modes else None
    return bool(modes)


# --- attention ------------------------------------------------------------------------------------------------


def _flex_attention(module: GraphModule, node: Node) -> Results | None:
    """flex_attention(query, key, value, score, block_mask, scale, options, buffers of the score, buffers of the mask)."""
    if not _with_mode(node):
        return None
    query, key, value, score, block_mask, scale = node.args[:6]
    of_score, of_mask = [list(each) for each in (*node.args[7:9], (), ())][:2]
    functions = _body_of(module, score), _body_of(module, block_mask[-1])
    if None in functions:
        return None
    scored, masked = [_scalar_function(each) for each in functions if each is not None]
    wanted = {user.args[1] for user in node.users}

    def attend(q: Any, k: Any, v: Any, *buffers: Any) -> tuple[Any, ...]:
        given = buffers[: len(of_score)], buffers[len(of_score) :]
        return _attention(q, k, v, scored, masked, scale, *given, wanted)

    operands = [query, key, value, *of_score, *of_mask]
    values = [each.meta["val"] if isinstance(each, Node) else each for each in operands]
    with node.meta["cgcompile_mode"], torch.no_grad():
        traced = make_fx(attend)(*values)
    traced.graph.eliminate_dead_code()
    return _inline(module, traced, operands, node)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scored: Callable[..., torch.Tensor],
    masked: Callable[..., torch.Tensor],
    scale: float,
    of_score: Sequence[Any],
    of_mask: Sequence[Any],
    wanted: set[Any],
) -> tuple[Any, ...]:
    """The result, the logarithm of the sum and the largest score, both in units of ln 2, as the operator gives them."""
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    groups = query.size(1) // key.size(1)
    if groups > 1:
        key, value = [t.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for t in (key, value)]
    scores = _product(query.to(exact), key.to(exact).transpose(-2, -1)) * scale
    places = [torch.arange(size, device=query.device) for size in scores.shape]
    kept = _over_positions(masked, (), len(of_mask))(*places, *of_mask)
    scores = _over_positions(scored, (0,), len(of_score))(scores, *places, *of_score).to(exact)
    scores = torch.where(kept, scores, float("-inf"))
    largest = scores.amax(-1, keepdim=True)
    level = torch.where(largest == float("-inf"), 0.0, largest)  # rows without any position give zeros
    weights = torch.exp(scores - level)
    total = weights.sum(-1, keepdim=True)
    mixed = _product((weights / torch.where(total == 0, 1.0, total)).to(query.dtype), value)
    unit = 1 / 0.6931471805599453
    sums = ((level + torch.log(total)).squeeze(-1) * unit) if 1 in wanted else None
    return mixed, sums, largest.squeeze(-1) * unit if 2 in wanted else None


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left @ right` of four axes each, without `matmul`: traced by torch 2.11, that fixes declared dimensions."""
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).unflatten(0, left.shape[:2])


def _over_positions(function: Callable[..., torch.Tensor], prefix: tuple[int, ...], buffers: int) -> Callable[..., torch.Tensor]:
    """A function of one score and its position, over all of them: batch, head, row, column."""
    for axis in reversed(range(4)):
        function = torch.vmap(function, in_dims=(*prefix, *[0 if each == axis else None for each in range(4)], *[None] * buffers))
    return function


def _scalar_function(body: GraphModule) -> Callable[..., torch.Tensor]:
    """The score's or the mask's graph as a function.  Where it reads a tensor at a position (`bias[head]`), torch has put a
    function of its own (`ModIndex`) that only vmap can run: an index does the same."""

    def run(*given: Any) -> torch.Tensor:
        made: torch.Tensor = _Indexing(body).run(*given)
        return made[0] if isinstance(made, tuple | list) else made

    return run


class _Indexing(torch.fx.Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if getattr(target, "name", lambda: "")() == "flat_apply" and any("ModIndex" in str(each) for each in args):
            tensors = [each for each in args if isinstance(each, torch.Tensor)]
            return torch.ops.aten.index.Tensor(tensors[0], tensors[1:])
        return super().call_function(target, args, dict(kwargs))


EXPANSIONS: Mapping[str, Callable[[GraphModule, Node], Results | None]] = {
    "wrap_with_set_grad_enabled": _called(1, 2),
    "tag_activation_checkpoint": _called(0, 1),
    "wrap": _called(0, 1),
    "hints_wrapper": _called(0, 1),
    "invoke_subgraph": _called(0, 2),
    "scan": _scan,
    "map_impl": _map,
    "flex_attention": _flex_attention,
}
"""By the operator's name: what takes it out, at the graph's insertion point."""
