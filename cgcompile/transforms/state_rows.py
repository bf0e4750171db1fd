"""Rewrites programs so that their code is the same for any number of rows of their state.

A row is only accessed by an index that counts from 0, because an index from the end depends on the number of rows.  Inductor's code
for an index compares it with the size of the tensor at the build.  So the program gets one more buffer for each dimension of the
state: int64 [1], the number of rows, named ROWS + the dimension.  Indices are compared with this number.  An invalid index is an
error on a CPU, and is replaced by the nearest row on a GPU.  The remaining operations compare nothing with a size of a tensor.

Other uses of such state are refused: they would read or write all rows, or depend on the number of rows.  On a GPU an operator of
Triton kernels (`torch.library.triton_op`) may take the state: the recorders refuse it if its launches depend on the number of rows.

Private interface (torch 2.11, 2.13): `torch._library.triton.triton_ops_to_kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.triton import triton_ops_to_kernels
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from cgbundle.cpu.host_region import ASSERTS

from ..errors import ModelError
from ..export.assertions import spelled
from ..export.higher_order.conditionals import WHILE, bodies, higher_order, is_conditional
from ..export.torch_program import copied_graph, with_graph
from ..export.weights import weight_placeholders
from ..model.flat_module import PREFIX
from ..model.source import ROWS, StateRows
from ..model.user_code import place
from .graph_edits import add_buffer, insert

aten = torch.ops.aten

PUTS = (aten.index_put_.default, aten.index_put.default)

SAME = (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
"""Operations whose result is the state itself, not a copy."""

FACTORIES = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)
"""Operations that only take a dtype and a device from their tensor."""

WITHIN = {
    aten.select.int: 1, aten.slice.Tensor: 1, aten.unsqueeze.default: 1, aten.squeeze.dim: 1, aten.transpose.int: 1,
}  # fmt: skip
"""Views of state that keep all rows unless they change the first axis -> the position of their axis argument."""

EVERYTHING = (1 << 63) - 1
"""The end of a slice that Python writes as `:`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedRows:
    """An operator that reads rows of its second and third argument.  `places`: the position of the argument with the indices.
    The argument at position `arguments` is a flag: whether the indices were checked."""

    places: int
    arguments: int


INDEXED = {"language_model::paged_attention": IndexedRows(places=3, arguments=11)}


def rows_buffer(dimension: str) -> str:
    """Returns the name of the buffer of a dimension, in the programs and in the bundle."""
    return f"{ROWS}{dimension}"


def with_more_rows(program: ExportedProgram, rows: Sequence[StateRows], more: int) -> ExportedProgram:
    """Returns the program for state with more rows, all zeros, and with increased numbers of rows."""
    root, names, changed = (
        copied_graph(program),
        weight_placeholders(program),
        {PREFIX + name for group in rows for name in group.buffers},
    )
    for node in root.graph.nodes:
        if names.get(node.name) in changed:
            value = node.meta["val"]
            with value.fake_mode:
                node.meta["val"] = value.new_zeros((value.shape[0] + more, *value.shape[1:]))

    def grown(named: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value.new_zeros((value.shape[0] + more, *value.shape[1:])) if name in changed else value + more
            if name.startswith(ROWS) else value
            for name, value in named.items()
        }  # fmt: skip

    return with_graph(program, root, {}, state_dict=grown(program.state_dict), constants=grown(program.constants))


def with_counted_rows(program: ExportedProgram, rows: Sequence[StateRows], run_device: torch.device) -> ExportedProgram:
    """Returns the program for any number of rows of its state, or the program itself if it uses none.  `run_device`: where it will
    run.  Weights are shared, not copied.  Raises state-refused."""
    names = weight_placeholders(program)
    group_by_name = {PREFIX + name: group for group in rows for name in group.buffers}
    if group_by_name.keys().isdisjoint(names.values()):
        return program
    root = copied_graph(program)
    state = {node: group_by_name[names[node.name]] for node in root.graph.nodes if names.get(node.name) in group_by_name}
    device = next(iter(state)).meta["val"].device
    specs, tensors, counts = list(program.graph_signature.input_specs), dict(program.state_dict), {}
    for group in dict.fromkeys(state.values()):
        value = torch.full((1,), group.number, dtype=torch.int64, device=device)
        counts[group.name], specs = add_buffer(root.graph, specs, rows_buffer(group.name), value)
        tensors[rows_buffer(group.name)] = value
    asserting = run_device.type == "cpu"
    _Rewriting(root, {node: (group, counts[group.name]) for node, group in state.items()}, asserting).run()
    _close(root)
    return with_graph(program, root, {}, input_specs=specs, state_dict=tensors)


def _close(module: GraphModule) -> None:
    """Checks the order of the nodes and compiles the module.  Keeps unused inputs of bodies, which are harmless."""
    module.graph.lint()
    module.recompile()


class Axis(NamedTuple):
    """An axis of a buffer: its number in a view, or the position that the view selects along it."""

    view: int | None
    position: int | None


class _Rewriting:
    """Rewrites one graph.  `state`: node with all rows -> the dimension, and the node of its number of rows."""

    def __init__(self, module: GraphModule, state: Mapping[Node, tuple[StateRows, Node]], asserting: bool) -> None:
        self._module, self._state, self._asserting = module, dict(state), asserting
        # node that can be written to -> its buffer, and the buffer's axes in the view
        self._axes: dict[Node, tuple[Node, tuple[Axis, ...]]] = {
            node: (node, tuple([Axis(number, None) for number in range(node.meta["val"].dim())])) for node in state
        }
        self._places: dict[Any, Node] = {}
        self._part = 0  # the number of branches and loops so far
        self._written = {node for writer in module.graph.nodes for node in _write_targets(writer)}
        self._keys: dict[Node, Any] = {}

    def run(self) -> None:
        for node in list(self._module.graph.nodes):
            touched = [source for source in node.all_input_nodes if source in self._state]
            if touched:
                self._rewrite(node, touched[0])
            self._part += is_conditional(node)

    def _rewrite(self, node: Node, state: Node) -> None:
        rows, count = self._state[state]
        target, args = node.target, node.args
        if node.op == "output":
            raise _refused(state, rows, "is returned")
        if is_conditional(node):
            return self._into_bodies(node)
        if args and args[0] is state and node.all_input_nodes.count(state) == 1:
            if target is aten.index.Tensor and _is_row(args[1]):
                return self._become(node, aten._unsafe_index.Tensor, (state, self._indices(node, args[1], count)))
            if target in PUTS and _is_row(args[1]) and state in self._axes:
                return self._put(node, state, rows, count)
            if target is aten.index_select.default and args[1] == 0:
                return self._become(node, aten._unsafe_index.Tensor, (state, self._indices(node, [args[2]], count)))
            if target is aten.embedding.default:
                return self._become(node, aten._unsafe_index.Tensor, (state, self._indices(node, [args[1]], count)))
            if target is aten.select.int and args[1] == 0 and isinstance(args[2], int) and 0 <= args[2] < rows.number:
                return None  # a row that is always there
            if target is aten._assert_tensor_metadata.default:
                return None
            if target in SAME or self._keeps_rows(node):
                self._state[node] = rows, count
                is_full = target is aten.slice.Tensor and node.meta["val"].shape == _shape(state)
                if state in self._axes and (target in (*SAME, aten.select.int) or is_full):
                    self._axes[node] = self._selected(node, *self._axes[state])
                return None
            if target in FACTORIES:
                return None
        operator = target if isinstance(target, torch._ops.OpOverload) else None
        if operator is not None and (indexed := INDEXED.get(operator.name())) and {state, *args[1:3]} <= self._state.keys():
            places = self._place(node, args[indexed.places], count)
            checked = (*args[: indexed.places], places, *args[indexed.places + 1 : indexed.arguments], 1)
            return self._become(node, target, checked)
        if operator is not None and operator.name() in triton_ops_to_kernels and not self._asserting:
            return None  # its kernels compute the addresses of rows
        user = str(operator or higher_order(node) or target)
        raise _refused(node, rows, f"is used as a whole by {user}")

    def _keeps_rows(self, node: Node) -> bool:
        axis = WITHIN.get(node.target)
        if axis is None:
            return False
        value = node.args[0].meta["val"]
        chosen = [number % (value.dim() + (node.target is aten.unsqueeze.default)) for number in node.args[axis : axis + 1]] or [0]
        if node.target is aten.transpose.int:
            chosen.append(node.args[2] % value.dim())
        if node.target is aten.slice.Tensor and chosen[0] == 0:
            return (*node.args[2:], *(None, EVERYTHING, 1)[len(node.args) - 2 :])[:3] in ((0, EVERYTHING, 1), (None, EVERYTHING, 1))
        return 0 not in chosen

    def _become(self, node: Node, target: Any, args: tuple[Any, ...]) -> None:
        node.target, node.args, node.kwargs = target, args, {}

    def _selected(self, node: Node, base: Node, axes: tuple[Axis, ...]) -> tuple[Node, tuple[Axis, ...]]:
        """Returns the axes of the buffer after one more selection from a view of it."""
        if node.target is not aten.select.int:
            return base, axes
        chosen, position = node.args[1] % node.args[0].meta["val"].dim(), node.args[2]
        axes_of_view = []
        for axis in axes:
            if axis.view is None or axis.view < chosen:
                axes_of_view.append(axis)
            else:
                axes_of_view.append(Axis(None, position) if axis.view == chosen else Axis(axis.view - 1, None))
        return base, tuple(axes_of_view)

    def _put(self, node: Node, state: Node, rows: StateRows, count: Node) -> None:
        """Turns a write in place into a new value of the buffer, and a copy to the buffer.  Lowering writes in place again."""
        base, axes = self._axes[state]
        places = self._indices(node, node.args[1], count)
        graph, indices = node.graph, []
        for axis in axes:
            if axis.view is None:
                with graph.inserting_before(node):
                    fixed = graph.call_function(
                        aten.full.default, ((), axis.position), {"dtype": torch.int64, "device": _device(base)}
                    )
                with base.meta["val"].fake_mode:
                    fixed.meta = {**node.meta, "val": torch.full((), axis.position, dtype=torch.int64, device=_device(base))}
                indices.append(fixed)
            else:
                indices.append(places[axis.view] if axis.view < len(places) else None)
        while indices[-1] is None:
            indices.pop()
        args = (base, indices, *node.args[2:])
        if node.target is aten.index_put.default:
            if base is not state:
                raise _refused(node, rows, "is used as a whole by aten.index_put.default")
            self._become(node, aten._unsafe_index_put.default, args)
            self._state[node], self._axes[node] = (rows, count), (node, axes)
            return
        with graph.inserting_before(node):
            put = graph.call_function(aten._unsafe_index_put.default, args, dict(node.kwargs))
        put.meta = {**node.meta, "val": base.meta["val"]}
        if base is state:
            self._become(node, aten.copy_.default, (base, put))
            self._state[node], self._axes[node] = (rows, count), (base, axes)
            return
        with graph.inserting_before(node):
            copied = graph.call_function(aten.copy_.default, (base, put))
        copied.meta = {**node.meta, "val": base.meta["val"]}
        node.replace_all_uses_with(state)
        graph.erase_node(node)

    def _indices(self, node: Node, indices: Sequence[Any], count: Node) -> list[Any]:
        return [self._place(node, indices[0], count), *indices[1:]]

    def _place(self, node: Node, index: Node, count: Node) -> Node:
        """Returns the valid rows of an index.  Equal indices share the result, unless a branch or a loop is between them.  On a
        GPU, the parts between branches and loops are compiled separately, and Inductor does not know that rows from another part
        are not negative."""
        key = self._key(index), count, self._part
        if key not in self._places:
            origin = {name: node.meta[name] for name in ("stack_trace", "nn_module_stack") if name in node.meta}
            where = " ".join(filter(None, [place(node)[0] or "model"]))
            message = spelled(f"{where}: {ASSERTS}: 0 <= index < number of rows of the state") if self._asserting else ""
            after_index = index.next if index.op == "call_function" else _first(node.graph)
            following = node if self._part else after_index  # so that all uses come later
            self._places[key] = insert(following, [index, count], partial(_places, message=message), origin=origin)
        return self._places[key]

    def _key(self, node: Node) -> Any:
        """Returns a key that is equal for nodes that compute the same from values that no operation writes to."""
        if node not in self._keys:
            self._keys[node] = self._new_key(node)
        return self._keys[node]

    def _new_key(self, node: Node) -> Any:
        pure = isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable
        if node.op != "call_function" or not pure or torch.Tag.nondeterministic_seeded in node.target.tags or node in self._written:
            return node
        if any(source in self._written or source in self._state for source in node.all_input_nodes):
            return node

        def spelled_out(value: Any) -> Any:
            if isinstance(value, Node):
                return self._key(value)
            if isinstance(value, list | tuple):
                return tuple([spelled_out(part) for part in value])
            return (type(value).__name__, str(value))

        return node.target, spelled_out(node.args), spelled_out(sorted(node.kwargs.items()))

    def _into_bodies(self, node: Node) -> None:
        """Passes the numbers of rows to the bodies of a branch or a loop."""
        carried = node.args[2] if higher_order(node) == WHILE else ()
        for leaf in tree_leaves(carried):
            if leaf in self._state:
                raise _refused(node, self._state[leaf][0], "is carried from one iteration of a loop to the next")
        position = 3
        operands = [leaf for leaf in (*tree_leaves(carried), *node.args[position]) if isinstance(leaf, Node)]
        counts = list(dict.fromkeys([self._state[operand][1] for operand in operands if operand in self._state]))
        node.args = (*node.args[:position], (*node.args[position], *counts), *node.args[position + 1 :])
        values = [*tree_leaves(carried), *node.args[position]]
        for body in bodies(node, self._module):
            for count in counts:
                _add_input(body.graph, count)
            inputs = dict(zip(values, body.graph.find_nodes(op="placeholder"), strict=True))
            state = {
                inputs[operand]: (self._state[operand][0], inputs[self._state[operand][1]])
                for operand in operands
                if operand in self._state
            }
            _Rewriting(body, state, self._asserting).run()
            _close(body)


def _places(index: Tensor, count: Tensor, message: str) -> Tensor:
    """Returns the valid rows of an index.  `message`: the error for an invalid index, or "" to take the nearest row."""
    number, row = count.select(0, 0), index.to(torch.int64)
    if message:
        aten._assert_async.msg(((row >= 0) & (row < number)).all(), message)
    return torch.minimum(row, number - 1).clamp(min=0)


def _shape(node: Node) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _device(node: Node) -> torch.device:
    device: torch.device = node.meta["val"].device
    return device


def _is_row(indices: Any) -> bool:
    """Whether the first axis is indexed by integers."""
    first = indices[0] if indices else None
    return isinstance(first, Node) and first.meta["val"].dtype in (torch.int64, torch.int32)


def _write_targets(node: Node) -> Iterator[Node]:
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Node):
                yield value


def _first(graph: Graph) -> Node:
    return next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))


def _add_input(graph: Graph, like: Node) -> None:
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        fresh = graph.placeholder("cgcompile_rows")
    fresh.target = fresh.name  # torch.fx has made it unique
    fresh.meta["val"] = like.meta["val"]


def _refused(node: Node, rows: StateRows, text: str) -> ModelError:
    where = place(node)[0] or "model"
    return ModelError("state-refused", f"{where}: state of {rows.name} rows, a number that is chosen at load, {text}")
