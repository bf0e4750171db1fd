"""Rewrites the random operators of a program, so that the program computes the random numbers itself.

Operators inside branches and loops are rewritten there (bodies.py).

The program gets one more buffer, RNG: int64 [seed, calls so far].  Every random operator becomes ordinary operations that compute
its numbers from that buffer, and the last operation adds 1 to the calls.  All other nodes keep their names and metadata.  New nodes
get the metadata of the operator that they replace.  The new node with the operator's result also gets its name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ...export.higher_order.conditionals import bodies, is_conditional
from ...export.torch_program import arguments, copied_graph, device_of, spell_counts, with_graph
from ..graph_edits import add_buffer, insert
from .bodies import hand_to_bodies, of_turn
from .distributions import BLOCK, Stream, axes_in_memory
from .operators import COMPOSITES, LEAVES
from .philox import block, schedule
from .recurrent_dropout import RECURRENT, split_layers

aten = torch.ops.aten

RNG = "cgcompile_rng"
"""The buffer that the program gets: int64 [seed, calls so far], initially zeros."""

ORIGIN = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "custom", "from_node")
"""Keys of a node's metadata that describe the user's code."""


def supported() -> frozenset[torch._ops.OpOverload]:
    """Returns the random operators that `with_generator` rewrites."""
    return frozenset(LEAVES) | COMPOSITES | RECURRENT


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers: it is attention or tagged `nondeterministic_seeded`, and its arguments do not switch it
    off."""
    tagged = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op == "call_function" and (tagged or node.target is aten.scaled_dot_product_attention.default) and not _off(node)


def can_rewrite(node: Node) -> bool:
    """Whether `with_generator` can rewrite a random node: an operator of `supported`, without a generator of the user."""
    return node.target in supported() and arguments(node).get("generator") is None


def drawn(module: GraphModule) -> Iterator[Node]:
    """Yields the random nodes of a program's graph and of the bodies of its branches and loops."""
    for node in module.graph.nodes:
        if is_random(node):
            yield node
        elif is_conditional(node):
            for body in bodies(node, module):
                yield from drawn(body)


def draws(program: ExportedProgram) -> bool:
    """Whether the program draws random numbers."""
    return any(True for _ in drawn(program.graph_module))


def generator_buffer(program: ExportedProgram) -> str:
    """Returns the program's name of the generator's buffer, or ""."""
    return next(iter(generator_buffers(program)), "")


def generator_buffers(program: ExportedProgram) -> tuple[str, ...]:
    """Returns the names of all buffers RNG.  They have a prefix if a rewritten program was saved, and loaded as a part of a
    model."""
    buffers = program.graph_signature.inputs_to_buffers.values()
    return tuple([name for name in buffers if name.rpartition(".")[2] == RNG])


def with_generator(program: ExportedProgram, first: Tensor | None = None) -> ExportedProgram:
    """Returns the program with random operators computed from a new buffer RNG, or the program itself if it draws nothing.

    `first`: the value of the buffer, int64 [2], for programs that share one; zeros by default.  Weights are shared, not copied.
    `can_rewrite` must be true for every random operation of the graph.
    """
    if not draws(program):
        return program
    root = copied_graph(program)
    graph = root.graph
    device = device_of(program)
    state, specs = add_buffer(graph, program.graph_signature.input_specs, RNG, torch.zeros(2, dtype=torch.int64, device=device))
    renamed: dict[str, str] = {}
    for node in [node for node in graph.nodes if node.target in RECURRENT and is_random(node)]:
        renamed |= _substitute(node, split_layers(node, _origin(node)))
    first_draw = next(node for node in graph.nodes if is_random(node) or _draws_inside(node, root))
    renamed |= _rewrite(root, insert(first_draw, [state], schedule), itertools.count())
    (output,) = graph.find_nodes(op="output")
    insert(output, [state], lambda value: value.select(0, 1).add_(1))
    spell_counts(graph)
    graph.lint()
    root.recompile()
    buffer = torch.zeros(2, dtype=torch.int64, device=device) if first is None else first
    return with_graph(program, root, renamed, input_specs=specs, state_dict={**program.state_dict, RNG: buffer})


def _draws_inside(node: Node, module: GraphModule) -> bool:
    """Whether a node is a branch or a loop that draws random numbers."""
    return is_conditional(node) and any(True for body in bodies(node, module) for _ in drawn(body))


def _rewrite(module: GraphModule, shared: Node, numbers: Iterator[int]) -> dict[str, str]:
    """Rewrites the random operators of a graph and of the bodies in it.  Returns the renames of `_substitute` in the graph
    itself."""
    renamed: dict[str, str] = {}
    stream = Stream(shared=shared.meta["val"], numbers=numbers)
    for node in list(module.graph.nodes):
        if is_random(node):
            renamed |= _replace(node, shared, stream)
        elif _draws_inside(node, module):
            first = insert(node, [shared], lambda s: torch.zeros((), dtype=torch.int64, device=s.device))
            for body in hand_to_bodies(node, module, shared, first):
                begin = next(node for node in body.module.graph.nodes if node.op != "placeholder")
                body_shared = body.shared if body.turn is None else insert(begin, [body.shared, body.turn], of_turn)
                _rewrite(body.module, body_shared, numbers)
                spell_counts(body.module.graph)
                body.module.graph.eliminate_dead_code()
                body.module.recompile()
            if not first.users:
                module.graph.erase_node(first)
    _expand(module.graph)
    return renamed


def _replace(node: Node, shared: Node, stream: Stream) -> dict[str, str]:
    """Replaces a random operation by ordinary ones.  Returns the renames of `_substitute`."""
    assert can_rewrite(node), node.format_node()
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    operands = list(dict.fromkeys([leaf for leaf in flat if isinstance(leaf, Node)]))
    table = {op: partial(function, stream) for op, function in LEAVES.items()}
    target = table.get(node.target, node.target)

    def draw(_: Tensor, *values: Any) -> Any:
        by_operand = dict(zip(operands, values, strict=True))
        args, kwargs = pytree.tree_unflatten([by_operand[leaf] if isinstance(leaf, Node) else leaf for leaf in flat], spec)
        return pytree.tree_map(_in_order, target(*args, **kwargs), node.meta["val"])

    results = insert(node, [shared, *operands], draw, table, _origin(node))
    return _substitute(node, {node: results} if isinstance(results, Node) else {user: results[user.args[1]] for user in node.users})


def _substitute(node: Node, substitutes: Mapping[Node, Node]) -> dict[str, str]:
    """Replaces a node, or the getitem nodes of its results, by other nodes, which get the old names.  Returns old name -> new name.
    These differ if one node replaces two."""
    renamed: dict[str, str] = {}
    for old, new in substitutes.items():
        old.replace_all_uses_with(new)
        node.graph.erase_node(old)
        if new.name not in renamed.values():
            new.name = old.name
        renamed[old.name] = new.name
    if node not in substitutes:
        node.graph.erase_node(node)
    return renamed


def _origin(node: Node) -> dict[str, Any]:
    return {name: node.meta[name] for name in ORIGIN if name in node.meta}


def _in_order(tensor: Tensor, expected: Tensor) -> Tensor:
    """Returns `tensor` with its axes in the memory order of `expected`, which the rest of the program assumes."""
    order = axes_in_memory(expected)
    if order == axes_in_memory(tensor):
        return tensor
    inverse = sorted(range(len(order)), key=lambda axis: order[axis])
    return tensor.permute(order).contiguous().permute(inverse)


def _expand(graph: Graph) -> None:
    """Replaces each BLOCK by the operations of philox.block.  Operations that only read the shared words are inserted once."""
    blocks = graph.find_nodes(op="call_function", target=BLOCK)
    if not blocks:  # dropout with probability 1 draws nothing
        return
    shared = blocks[0].args[1]
    with shared.meta["val"].fake_mode:
        example = torch.empty(2, dtype=torch.int64, device=shared.meta["val"].device)
        traced = make_fx(partial(block, number=0))(example, shared.meta["val"])
    first, second = traced.graph.find_nodes(op="placeholder")
    (output,) = traced.graph.find_nodes(op="output")
    operations = [node for node in traced.graph.nodes if node.op == "call_function"]
    shared_nodes = {}
    with graph.inserting_before(blocks[0]):
        for operation in operations:
            if operation.args[0] is second:
                shared_nodes[operation] = graph.node_copy(operation, {second: shared}.__getitem__)
                shared_nodes[operation].meta = {"val": operation.meta["val"]}
    for node in blocks:
        node_map = {first: node.args[0], **shared_nodes}
        with graph.inserting_before(node):
            for operation in operations:
                if operation not in shared_nodes:
                    node_map[operation] = graph.node_copy(operation, node_map.__getitem__)
                    node_map[operation].meta = {
                        **node.meta,
                        "val": (operation if operation.meta["val"].dim() == 0 else node.args[0]).meta["val"],
                    }
                    if operation.target is aten.full.default:
                        node_map[operation].update_arg(1, node.args[2])
        for user in list(node.users):
            user.replace_all_uses_with(node_map[output.args[0][user.args[1]]])
            graph.erase_node(user)
        graph.erase_node(node)
        for operation in reversed(operations):
            if not node_map[operation].users and operation not in shared_nodes:
                graph.erase_node(node_map[operation])


def _off(node: Node) -> bool:
    """Whether the arguments of a random operator switch it off."""
    values = arguments(node)
    if values.get("train") is False or values.get("training") is False or values.get("dropout_p") == 0:
        return True
    if "num_layers" in values:  # recurrent networks have dropout only between layers
        return values["dropout"] == 0 or values["num_layers"] == 1
    return "dropout" in str(node.target) and values.get("p") == 0
