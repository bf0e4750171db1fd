"""A line is the straight-line functional program of one path through a model's Python code.  It has a marker (ASKED) at every
question, which is where Python reads the truth value of a tensor that depends on data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from cgbundle.format.schema import Tree

from ...errors import ModelError
from ...model.flat_module import FlatModule
from ...model.source import CPU
from ...model.tracing.way import ASKED, Question, Spot, TooManyTurns, TracedWay
from ...model.user_code import first_line, place, user_place
from ...util.raw_bytes import raw
from ..bounded.fixed_sizes import with_fixed_sizes
from ..functionalization import functional_form
from .numbers import with_tensors

TORCH_STOPS = (
    GuardOnDataDependentSymNode,
    DynamicOutputShapeException,
    DataDependentOutputException,
    UnsupportedOperatorException,
)
"""torch's errors in the model's code for operations that it cannot trace."""

Slot = tuple[str, Any]
"""An output of a line: (kind of mutation, name) for a buffer or input that it writes, or ("result", number).  ("count", (result,
axis)) is the number of valid elements along an axis of a result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Raised:
    """A path on which the model raises: the error's text, and the user's line."""

    message: str
    where: str
    line: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Line:
    """The program of one path.  `answers`, `questions`: those of this path, in order.  `asks`, `reads`, `sizes`: as in TracedWay.
    `exported`: the program before it became functional.  `writes`: the model's code writes to tensors in place.  `changed`: changed
    attributes.  `assumes`, `unsupported`: as in FixedSizes.  `markers`: positions of the questions in `nodes`.  `live`: for each
    question, the tensors in Python variables, by name, and the condition as "asked".  `keys`: equal for nodes, also of two lines,
    with the same value.  `at`: position of each node."""

    answers: tuple[bool, ...]
    asks: tuple[bool, ...]
    reads: tuple[bool, ...]
    sizes: tuple[tuple[Any, ...], ...]
    questions: tuple[Question, ...]
    exported: ExportedProgram
    program: ExportedProgram
    result: Tree | None
    writes: bool
    assumes: bool
    unsupported: str
    changed: tuple[str, ...]
    nodes: tuple[Node, ...]
    markers: tuple[int, ...]
    live: tuple[Mapping[str, Any], ...]
    keys: Mapping[Node, Hashable]
    at: Mapping[Node, int]
    outputs: Mapping[Slot, Any]

    @property
    def end(self) -> int:
        """The position after the last operation."""
        return len(self.nodes)


def trace_line(
    flat: FlatModule,
    attempt: Callable[[], ExportedProgram],
    forced: tuple[bool, ...],
    preferred: Mapping[Spot, bool],
    limit: int,
) -> tuple[Line | Raised, tuple[Question, ...]]:
    """Traces the path that begins with the answers `forced`.  Returns its line, or the error that the model raises, and the
    questions.  `preferred`: later answers by position (default True).  `limit`: maximum number of questions at one position."""
    way = TracedWay(forced, preferred, limit)
    before, flat.way = flat.way, way
    try:
        program = attempt()
    except ModelError as error:
        if isinstance(way.raised, TooManyTurns):
            raise way.raised from error
        if way.raised is None or isinstance(way.raised, TORCH_STOPS) or _of_torch(way.raised):
            raise
        raised = way.raised.__cause__ or way.raised
        where, line = user_place(way.raised)
        message = f"{type(raised).__name__}: {first_line(raised)}"
        return Raised(message=message, where=where or error.where, line=line), tuple(way.questions)
    finally:
        flat.way = before
    return _line(program, way, told_gpu=flat.target_device != CPU), tuple(way.questions)


def _of_torch(error: BaseException) -> bool:
    return type(error).__module__.startswith(("torch.", "cgcompile."))


def _line(exported: ExportedProgram, way: TracedWay, *, told_gpu: bool) -> Line:
    """Returns the line of an exported path.  `told_gpu`: the bundle is for a GPU."""
    try:
        program = functional_form(exported)
    except Exception as error:
        raise ModelError("export-failed", f"model: torch.export cannot make a path functional: {first_line(error)}") from error
    with_tensors(program.graph)
    fixed = with_fixed_sizes(program, [question.answer for question in way.questions], told_gpu=told_gpu)
    program = fixed.program
    nodes = tuple([node for node in program.graph.nodes if node.op not in ("placeholder", "output")])
    markers = tuple([index for index, node in enumerate(nodes) if node.target is ASKED])
    assert len(markers) == len(way.questions), (len(markers), len(way.questions))
    marked = [tuple(nodes[index].args[0]) for index in markers]
    live = tuple(
        [dict(zip(("asked", *question.names), values, strict=True)) for question, values in zip(way.questions, marked, strict=True)]
    )
    return Line(
        answers=tuple([question.answer for question in way.questions]), asks=tuple(way.asks), reads=tuple(way.reads),
        sizes=tuple(way.sizes),
        questions=tuple(way.questions), exported=exported, program=program, result=way.result, nodes=nodes, markers=markers,
        changed=way.changed,
        writes=any(map(_writes, exported.graph.nodes)),
        assumes=fixed.assumes, unsupported=fixed.unsupported,
        live=live, keys=_keys(program, way), outputs=_outputs(program, fixed.counts),
        at={node: index for index, node in enumerate(nodes)},
    )  # fmt: skip


def _writes(node: Node) -> bool:
    """Whether a line of the model writes to a tensor in place."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and bool(place(node)[0])


def _outputs(program: ExportedProgram, counts: Sequence[tuple[int, int]]) -> dict[Slot, Any]:
    """Returns the outputs of a program by slot.  `counts`: (result, axis) of the program's last results, which are counts."""
    slots: dict[Slot, Any] = {}
    values = program.graph.output_node().args[0]
    results = [spec for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    names: Iterator[Slot] = iter(
        [*[("result", number) for number in range(len(results) - len(counts))], *[("count", row) for row in counts]]
    )
    for value, spec in zip(values, program.graph_signature.output_specs, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            slots[next(names)] = value
        else:
            slots[spec.kind.name, spec.target] = value
    return slots


def placeholders(program: ExportedProgram) -> dict[Node, Hashable]:
    """Returns {input of a program: key}.  The same input has the same key in the programs of all paths."""
    inputs: dict[Node, Hashable] = {}
    nodes = program.graph.find_nodes(op="placeholder")
    for number, (node, spec) in enumerate(zip(nodes, program.graph_signature.input_specs, strict=True)):
        if spec.kind is InputKind.USER_INPUT:
            inputs[node] = "input", spec.arg.name
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            value = program.constants[spec.target]
            digest = hashlib.sha256(raw(value.detach().cpu().contiguous()).numpy().tobytes()).hexdigest()
            inputs[node] = "constant", str(value.dtype), tuple(value.shape), digest
        else:
            inputs[node] = "weight", spec.target if spec.target is not None else number
    return inputs


def is_pure(node: Node) -> bool:
    """Whether a node has the same result wherever and however often it is computed."""
    if node.op == "get_attr":
        return True
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return False
    if isinstance(target, torch._ops.OpOverload):
        if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable or target is ASKED:
            return False
        return target.namespace in ("aten", "prims") and bool(target._schema.returns) and not node.is_impure()
    return True


def _keys(program: ExportedProgram, way: TracedWay) -> dict[Node, Hashable]:
    """Returns a hash of each node's computation.  The hash of an impure operation includes the answers before it, and its number
    since the last question."""
    keys: dict[Node, Hashable] = dict(placeholders(program))
    answers: tuple[bool, ...] = ()
    count = 0
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is ASKED:
            answers, count = tuple([question.answer for question in way.questions[: len(answers) + 1]]), 0
            continue
        if node.op == "get_attr":
            keys[node] = _digest(("graph", _text(getattr(program.graph_module, str(node.target)))))
            continue
        args = map_arg((node.args, node.kwargs), lambda argument: _Key(keys[argument]))
        history: tuple[Any, ...] = ()
        if not is_pure(node):
            history = answers, count
            count += 1
        keys[node] = _digest((str(node.target), repr(args), history))
    return keys


class _Key:
    def __init__(self, key: Hashable) -> None:
        self.key = key

    def __repr__(self) -> str:
        return f"%{self.key}"


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _text(module: Any) -> str:
    """Returns the text of a graph, including inner graphs."""
    if not isinstance(module, GraphModule):
        return str(id(module))
    inner = [_text(getattr(module, str(node.target))) for node in module.graph.find_nodes(op="get_attr")]
    return f"{module.graph} {inner}"


def nodes_of(value: Any) -> list[Node]:
    """Returns the nodes in an argument structure."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Node)]
