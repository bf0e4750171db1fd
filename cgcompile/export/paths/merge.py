"""Merges all lines into one program.  Common operations occur once.  Each question becomes a `torch.cond`, whose bodies are the
lines until they join.

Private interfaces (torch 2.11, 2.13): the order of the arguments of `torch.cond` as an operator, `FakeTensor.fake_mode`,
`torch._dispatch.python.enable_python_dispatcher`, `ShapeEnv.ignore_fresh_unbacked_symbols`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from cgbundle.cpu.host_region import ASSERTS

from ...model.devices.markers import TO_HOST
from ..assertions import spell_conditions, spelled
from ..functionalization import functional_form
from ..higher_order.retrace import in_place
from ..higher_order.shared_memory import copy_shared
from ..torch_program import with_graph
from .counted_results import CountedResults
from .explore import PathsRefused, TracedPaths
from .joins import Join, output
from .lines import Line, Raised, Slot, is_pure, placeholders

aten = torch.ops.aten


class Unjoinable(Exception):
    """Raised if operations after a join need a value that only one line computes."""

    def __init__(self, line: Line, number: int, position: int) -> None:
        super().__init__(number)
        self.line, self.number, self.position = line, number, position


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Closed:
    """The operations of `line` from question `number` to the join, which are inside a branch.  `common`: the other line's keys
    before the join."""

    line: Line
    number: int
    join: Join
    common: frozenset[Hashable]

    def hides(self, line: Line, position: int) -> bool:
        """Whether the operation at `position` of `line`, or of another line with the same beginning, is inside the branch."""
        if line is self.line:
            return line.markers[self.number] < position < self.join.main
        question = self.join.question
        return (
            question is not None and len(line.markers) > question and line.markers[self.number] < position < line.markers[question]
        )


class _Body:
    """A graph under construction: the program (`parent` is None), or a branch.  `values`: node by key.  `joined`: keys of values
    that a branch returned.  `taken`: node of `parent` -> placeholder here.  `closed`: finished branches."""

    def __init__(self, parent: _Body | None, mode: Any, root: Line) -> None:
        self.graph = Graph()
        self.module = torch.nn.Module()
        self.parent = parent
        self.mode, self.root = mode, root
        self.values: dict[Hashable, Node] = {}
        self.joined: set[Hashable] = set()
        self.taken: dict[Node, Node] = {}
        self.results: set[Node] = set()
        self.closed: list[_Closed] = list(parent.closed) if parent else []

    def known(self, key: Hashable) -> Node | None:
        """Returns the node of this graph for a value, or None.  A branch takes tensors of the outer graph as operands."""
        if key in self.values or self.parent is None:
            return self.values.get(key)
        outer = self.parent.known(key)
        if outer is None or not isinstance(outer.meta.get("val"), torch.Tensor):
            return None  # numbers are computed again, since operands of a branch must be tensors
        self.values[key] = self.taking(outer)
        return self.values[key]

    def taking(self, outer: Node) -> Node:
        """Returns the placeholder of this branch for node `outer` of the outer graph."""
        if outer not in self.taken:
            first = next(iter(self.graph.nodes), None)
            with self.graph.inserting_before(first) if first is not None else self.graph.inserting_after():
                place = self.graph.placeholder(f"taken_{outer.name}")
            place.meta = {"val": outer.meta["val"]}
            self.taken[outer] = place
        return self.taken[outer]

    def value(self, line: Line, node: Node) -> Node:
        """Returns the node of this graph for a line's node, which is copied if it is missing.  Raises Unjoinable."""
        key = line.keys[node]
        if (existing := self.known(key)) is not None:
            return existing
        assert node.op != "placeholder", node
        if not isinstance(node.meta.get("val"), torch.SymInt):
            for closed in self.closed:
                if closed.hides(line, line.at[node]) and key not in closed.common:
                    raise Unjoinable(closed.line, closed.number, closed.join.main)
            if not is_pure(node):
                raise AssertionError(f"{node} is not computed before it is needed")
        return self.copied(line, node)

    def copied(self, line: Line, node: Node) -> Node:
        """Copies an operation and its operands."""
        if node.op == "get_attr":
            copy = self.attribute(operator.attrgetter(str(node.target))(line.program.graph_module))
        else:
            copy = self.graph.node_copy(node, lambda argument: self.value(line, argument))
            copy.meta = dict(node.meta)
            if "val" in node.meta and line is not self.root:  # sizes use the symbols of the root line's export
                copy.meta["val"] = self._computed(copy, node.meta["val"])
        self.values[line.keys[node]] = copy
        return copy

    def attribute(self, module: Any) -> Node:
        """Adds a graph as a submodule, and returns the get_attr node for it."""
        name = f"branch_{len(self.module._modules)}"
        self.module.add_module(name, module)
        node = self.graph.get_attr(name)
        node.meta = {}
        return node

    def add(self, target: Any, args: tuple[Any, ...], like: Node, value: Any = None, **more: Any) -> Node:
        """Adds an operation with the source line of `like`.  `more`: keyword arguments.  `value`: its fake result, if known."""
        node = self.graph.call_function(target, args, more)
        node.meta = {name: like.meta[name] for name in ("stack_trace", "nn_module_stack") if name in like.meta}
        node.meta["val"] = self._computed(node, None) if value is None else value
        return node

    def _computed(self, node: Node, otherwise: Any) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), self._value_of)
        if any(isinstance(leaf, torch.nn.Module) for leaf in tree_leaves((args, kwargs))):
            return otherwise
        with self.mode, enable_python_dispatcher(), self.mode.shape_env.ignore_fresh_unbacked_symbols(), torch.no_grad():
            return node.target(*args, **kwargs)

    def _value_of(self, node: Node) -> Any:
        return getattr(self.module, str(node.target)) if node.op == "get_attr" else node.meta["val"]


def merged(traced: TracedPaths, root: Line, told_gpu: bool) -> tuple[ExportedProgram, GraphModule]:
    """Returns the program of all lines, and its graph before functionalization.  There, `meta["question"]` of a branch has the
    answers before the question.  Raises Unjoinable, PathsRefused."""
    program = root.program
    inputs = placeholders(program)
    mode = next(value.fake_mode for node in inputs for value in [node.meta.get("val")] if hasattr(value, "fake_mode"))
    body = _Body(None, mode, root)
    specs = list(program.graph_signature.input_specs)
    constants = dict(program.constants)
    first: dict[Hashable, tuple[Line, Node]] = {}
    for line in [root, *traced.lines]:
        for node, key in placeholders(line.program).items():
            first.setdefault(key, (line, node))
    for key, (line, node) in first.items():
        place = body.graph.placeholder(node.name if line is root else f"{node.name}_way")
        place.meta = dict(node.meta)
        if line is not root:
            with mode:
                value = line.program.constants[_spec(line, node).target]
                place.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            target = f"way_constant_{len(constants)}"
            constants[target] = value
            specs.insert(
                _constants_end(specs), InputSpec(kind=InputKind.CONSTANT_TENSOR, arg=TensorArgument(name=place.name), target=target)
            )
        body.values[key] = place
    placed = {node.name for node in body.graph.nodes}
    specs = [spec for spec in specs if spec.arg.name in placed]  # equal constants share one placeholder
    _order_inputs(body.graph, specs)
    counted = CountedResults(traced.lines)
    slots = _emit(traced, counted, body, root, 0, root.end, told_gpu)
    output_specs, values = _outputs(body, root, counted, slots)
    body.graph.output(tuple(values))
    module = GraphModule(body.module, body.graph)
    _without_dead(module)
    copy_shared(module)
    module.graph.lint()
    full_program = with_graph(
        program, module, {}, input_specs=specs, constants=constants, output_specs=output_specs, other_results=bool(counted.slots)
    )
    result = in_place(functional_form(full_program), root.exported)
    spell_conditions(result.graph_module)
    return result, module


def _without_dead(module: GraphModule) -> None:
    """Removes unused operations, also in branches."""
    for part in [inner for inner in module.modules() if isinstance(inner, GraphModule)]:
        part.graph.eliminate_dead_code()
        part.recompile()


def _spec(line: Line, node: Node) -> InputSpec:
    return next(spec for spec in line.program.graph_signature.input_specs if spec.arg.name == node.name)


def _constants_end(specs: Sequence[InputSpec]) -> int:
    """Returns the position of the first user input; constants come before it."""
    return next((number for number, spec in enumerate(specs) if spec.kind is InputKind.USER_INPUT), len(specs))


def _order_inputs(graph: Graph, specs: Sequence[InputSpec]) -> None:
    """Orders the inputs of a graph without other nodes as in `specs`."""
    nodes = {node.name: node for node in graph.nodes}
    for spec in reversed(specs):
        first = next(iter(graph.nodes))
        if first is not nodes[spec.arg.name]:
            first.prepend(nodes[spec.arg.name])


def _outputs(body: _Body, root: Line, counted: CountedResults, slots: dict[Slot, Any]) -> tuple[list[OutputSpec], list[Any]]:
    """Returns the specs and values of the program's outputs: mutated buffers and inputs, then results."""
    results = [spec for spec in root.exported.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    counts = {slot[1]: value for slot, value in slots.items() if slot[0] == "count"}
    specs, values = [], []
    for slot in [written for written in slots if written[0] not in ("result", "count")]:
        specs.append(OutputSpec(kind=OutputKind[slot[0]], arg=TensorArgument(name=slots[slot].name), target=slot[1]))
        values.append(slots[slot])
    for number, spec in enumerate(results):
        value = counted.selected(body, number, slots["result", number], counts)
        argument = TensorArgument(name=value.name) if isinstance(value, Node) else spec.arg
        specs.append(OutputSpec(kind=spec.kind, arg=argument, target=spec.target))
        values.append(value)
    return specs, values


def _emit(
    traced: TracedPaths, counted: CountedResults, body: _Body, line: Line, start: int, stop: int, told_gpu: bool
) -> dict[Slot, Any]:
    """Adds the operations and branches of a line between two positions.  Returns the outputs by slot, or {} before the end."""
    numbers = {position: number for number, position in enumerate(line.markers)}
    position = start
    while position < stop:
        node = line.nodes[position]
        number = numbers.get(position)
        if number is None:
            _copy(body, line, node)
        else:
            branch = traced.branch(line, number)
            if isinstance(branch.other, Raised):
                _assert(body, line, number, branch.other, told_gpu)
            else:
                assert branch.join is not None
                outputs = _branch(traced, counted, body, line, number, branch.other, branch.join, told_gpu)
                if branch.join.ends:
                    return outputs
                position = branch.join.main
                continue
        position += 1
    if stop < line.end:
        return {}
    return {slot: _ended(counted, body, line, slot) for slot in _slots(traced, counted, line)}


def _ended(counted: CountedResults, body: _Body, line: Line, slot: Slot) -> Any:
    """Returns the node of this graph for an output of a line."""
    if slot[0] == "count":
        return counted.count(body, line, slot[1])
    if slot[0] == "result":
        return counted.filled(body, line, slot[1])
    return body.value(line, output(line, slot))


def _slots(traced: TracedPaths, counted: CountedResults, line: Line) -> list[Slot]:
    """Returns the outputs that every line must have: all buffers and inputs that any line writes, results, and counts."""
    written = [slot for other in traced.lines for slot in other.outputs if slot[0] not in ("result", "count")]
    results = [slot for slot in line.outputs if slot[0] == "result"]
    return list(dict.fromkeys([*sorted(written), *results, *counted.slots]))


def _copy(body: _Body, line: Line, node: Node) -> None:
    if is_pure(node):
        body.value(line, node)
    else:
        body.copied(line, node)


def _assert(body: _Body, line: Line, number: int, raised: Raised, told_gpu: bool) -> None:
    """Adds an assertion that fails if the question has the answer on which the model raises."""
    marker = line.nodes[line.markers[number]]
    predicate = body.value(line, line.live[number]["asked"])
    if told_gpu:  # a failed assertion on the GPU would make the process's CUDA context unusable
        predicate = body.add(TO_HOST, (predicate,), marker)
    if not line.answers[number]:
        predicate = body.add(aten.logical_not.default, (predicate,), marker)
    message = f"{raised.where or line.questions[number].where}: {ASSERTS}: the model raises {raised.message}"
    assertion = body.graph.call_function(aten._assert_async.msg, (predicate, spelled(message)))
    assertion.meta = {name: marker.meta[name] for name in ("stack_trace", "nn_module_stack") if name in marker.meta}
    assertion.meta["val"] = None


def _branch(
    traced: TracedPaths, counted: CountedResults, body: _Body, line: Line, number: int, other: Line, join: Join, told_gpu: bool
) -> dict[Slot, Any]:
    """Adds the branch for a question.  Returns the outputs by slot if the lines join only at the end, else {}."""
    marker = line.nodes[line.markers[number]]
    predicate = body.value(line, line.live[number]["asked"])
    inners, ends = [], []
    for side, stop in ((line, join.main), (other, join.other)):
        inners.append(_Body(body, body.mode, body.root))
        ends.append(list(_emit(traced, counted, inners[-1], side, side.markers[number] + 1, stop, told_gpu).values()))
    pairs = [(left, right) for left, right in join.pairs if _changes(inners, line.keys[left], other.keys[right])]
    if not join.ends:
        ends = [[inners[0].value(line, left) for left, _ in pairs], [inners[1].value(other, right) for _, right in pairs]]
    sides = list(zip(inners, ends, strict=True))
    constants = _constants(sides[0][1], sides[1][1])
    kept_places = [place for place in range(len(sides[0][1])) if place not in constants]
    results = [[_new(inner, values[place], marker) for place in kept_places] for inner, values in sides]
    _check_alike(line, number, results)
    _same_strides(sides, results, marker)
    if not kept_places:  # only assertions are left: a cond must return a tensor
        results = [[inner.add(aten.clone.default, (inner.taking(predicate),), marker)] for inner, _ in sides]
    operands = list(dict.fromkeys([outer for inner, _ in sides for outer in inner.taken]))
    modules = []
    for (inner, _), values in zip(sides, results, strict=True):
        for outer in reversed(operands):
            place = inner.taking(outer)
            first = next(iter(inner.graph.nodes))
            if first is not place:
                first.prepend(place)
        inner.graph.output(tuple(values))
        modules.append(GraphModule(inner.module, inner.graph))
    if not line.answers[number]:
        modules.reverse()
    functions = [body.attribute(module) for module in modules]
    with body.mode:
        fake_results = tuple([_like(result.meta["val"]) for result in results[0]])
    conditional = body.add(torch.ops.higher_order.cond, (predicate, *functions, tuple(operands)), marker, fake_results)
    conditional.meta["question"] = line.answers[:number]
    parts = [body.add(operator.getitem, (conditional, at), marker, value) for at, value in enumerate(fake_results)]
    by_place = dict(zip(kept_places, parts, strict=False)) | constants
    if join.ends:
        return {slot: by_place[place] for place, slot in enumerate(_slots(traced, counted, line))}
    for place, (left, _) in enumerate(pairs):
        body.values[line.keys[left]] = by_place[place]
        body.joined.add(line.keys[left])
    common = frozenset([other.keys[node] for node in other.nodes[: join.other] if node in other.keys])
    body.closed.append(_Closed(line=line, number=number, join=join, common=common))
    return {}


def _changes(inners: Sequence[_Body], left: Hashable, right: Hashable) -> bool:
    """Whether a value differs between the two sides of a branch, or is a result of an inner branch of one side."""
    return left != right or any(left in inner.joined for inner in inners)


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _constants(left: Sequence[Any], right: Sequence[Any]) -> dict[int, Any]:
    """Returns {position: value} of results that are not tensors.  They are part of `Line.result`, so both sides have the same
    values."""
    return {place: one for place, (one, _) in enumerate(zip(left, right, strict=True)) if not isinstance(one, Node)}


def _new(body: _Body, value: Node, marker: Node) -> Node:
    """Returns a branch's result that shares memory with no other: the value itself, if it is a new tensor, else a clone."""
    schema = getattr(value.target, "_schema", None)
    fresh = value.op == "call_function" and schema is not None and all(returned.alias_info is None for returned in schema.returns)
    if fresh and value not in body.results:
        body.results.add(value)
        return value
    return body.add(aten.clone.default, (value,), marker)


def _check_alike(line: Line, number: int, results: Sequence[Sequence[Node]]) -> None:
    """Raises PathsRefused (structure-unsupported) for results of different dtypes or shapes."""
    for left, right in zip(*results, strict=True):
        forms = [f"{node.meta['val'].dtype} {list(node.meta['val'].shape)}".removeprefix("torch.") for node in (left, right)]
        if forms[0] != forms[1]:
            one, other = [re.sub(r"\bu\d+\b", "?", form) for form in forms]  # u0, u1: sizes that depend on data
            raise PathsRefused(
                "structure-unsupported", line.questions[number], f"one path returns {one}, another path {other}",
                "return tensors of the same dtype and shape on every path",
            )  # fmt: skip


def _same_strides(sides: Sequence[tuple[_Body, Any]], results: list[list[Node]], marker: Node) -> None:
    """Makes results of different layouts contiguous on both sides."""
    for place, (left, right) in enumerate(zip(*results, strict=True)):
        if str(left.meta["val"].stride()) != str(right.meta["val"].stride()):
            for (inner, _), values in zip(sides, results, strict=True):
                dense = inner.graph.call_function(aten.clone.default, (values[place],), {"memory_format": torch.contiguous_format})
                dense.meta = dict(values[place].meta)
                dense.meta["val"] = values[place].meta["val"].contiguous()
                values[place] = dense
