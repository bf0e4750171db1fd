"""program + key -> a graph of small operations on fake cuda tensors, every size a constant.  Private interfaces (torch 2.11, 2.13):
`FakeTensorMode`, `make_fx`, `torch.fx.traceback.preserve_node_meta` and the `from_node` that it leaves in the metadata,
`torch.func.functionalize`."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate

from ...errors import CATALOGUE, BuildError, ModelError
from ...export.exported import memory_order
from ...model.user_code import is_user_file
from ...targets.compiler_errors import explain, source_operator
from ...targets.cuda.lowering import repair
from ...targets.memory_layout import dense_strides
from ..lowered import INPUT, WEIGHT
from .decompositions import REPLACED, decompositions

COPY = torch.ops.aten.copy_.default

DEVICE = torch.device("cuda", 0)

ASSERTIONS = (
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_async.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
    torch.ops.aten.sym_constrain_range.default,
)
"""They hold by the signature, which the runtime checks before a call."""

KINDS = {
    InputKind.PARAMETER: WEIGHT,
    InputKind.BUFFER: WEIGHT,
    InputKind.CONSTANT_TENSOR: WEIGHT,
    InputKind.USER_INPUT: INPUT,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Retraced:
    """`graph` takes `tensors` (fake, on cuda, made by `mode`), whose kinds and names are `names`, and returns the outputs.  It is
    functional but for a copy, at its end, of the new value to every tensor that the program writes to: `written`, by position.
    `program` is the graph that it was traced from."""

    graph: torch.fx.GraphModule
    tensors: tuple[torch.Tensor, ...]
    names: tuple[tuple[str, str], ...]
    written: tuple[int, ...]
    mode: FakeTensorMode
    program: torch.fx.GraphModule


ALIGNED = 16
"""Kernels are compiled for tensors that begin at a multiple of so many bytes."""


def retrace(
    program: ExportedProgram,
    tensors: Sequence[torch.Tensor],
    layouts: Sequence[tuple[int, ...] | None] = (),
    *,
    writes: bool = False,
) -> Retraced:
    """The program at the sizes of `tensors`, inside `fake_device`.  `layouts`: of each output the strides that it must have, None
    for any; () for any of all.  `writes`: it writes to buffers or inputs.  Raises sizes-unlike, state-shared, constant-unknown,
    randomness-refused, operation-needs-gpu."""
    source = program.graph_module
    if writes or any(getattr(node.target, "__module__", "").startswith("torch._functorch") for node in program.graph.nodes):
        # new values of what it writes to become outputs, and vmap's batch axes go; most other operations stay as they are
        program = program.run_decompositions({})
    rows = given_rows(program, tensors)
    changed = changed_outputs(program)
    module = on_device(program.graph_module)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = tuple([fake_tensor(tensor) for _, _, tensor in rows if tensor is not None])
    wanted = [spec.kind == OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs]

    def run(*given: torch.Tensor) -> tuple[Any, ...]:
        remaining = iter(given)
        arguments = [None if tensor is None else next(remaining) for _, _, tensor in rows]
        results = _Replacing(module, source).run(*arguments, enable_io_processing=False)
        kept = [result for result, keep in zip(results, wanted, strict=True) if keep]
        made = [_with_strides(result, strides) for result, strides in zip(kept, layouts or [None] * len(kept), strict=True)]
        return (*made, *[results[position] for position, _ in changed])

    with mode, torch.no_grad(), torch.fx.traceback.preserve_node_meta():
        traced = make_fx(torch.func.functionalize(run, remove="mutations"), decomposition_table=decompositions())(*fakes)
    _check(traced)
    places = [place for place, (_, _, tensor) in enumerate(rows) if tensor is not None]
    written = tuple([places.index(argument) for _, argument in changed])
    given = [rows[place] for place in places]
    check_apart([given[index] for index in written], given)
    _copy_back(traced, written)
    names = tuple([(kind, name) for kind, name, _ in given])
    return Retraced(graph=traced, tensors=fakes, names=names, written=written, mode=mode, program=source)


DENSE = "dense"
"""A layout: dense strides, in the order that the axes have."""

Layout = tuple[int, ...] | str | None
"""Of an output the strides that it must have, DENSE, or None for any."""


def retrace_straight(
    module: torch.fx.GraphModule,
    source: torch.fx.GraphModule,
    arguments: Sequence[Any],
    names: Sequence[tuple[str, str]],
    mode: FakeTensorMode,
    layouts: Sequence[Layout],
    written: Sequence[int],
) -> tuple[Retraced, dict[int, Any]]:
    """A part of a program between branches and loops, at fake tensors and numbers; and those of its results that are numbers.

    `names`: kinds and names of the tensors among `arguments`.  `module` gives an output for each of `layouts`, and behind these the
    new values of the tensors at the positions `written`.  `source` is the program that it was cut from.  Raises as `retrace` does.
    """
    fakes = tuple([each for each in arguments if isinstance(each, torch.Tensor)])
    numbers: dict[int, Any] = {}

    def run(*given: torch.Tensor) -> tuple[Any, ...]:
        remaining = iter(given)
        values = [next(remaining) if isinstance(each, torch.Tensor) else each for each in arguments]
        results = _Replacing(module, source).run(*values, enable_io_processing=False)
        made = []
        for number, (result, layout) in enumerate(zip(results, layouts, strict=False)):
            if isinstance(result, torch.Tensor):
                dense = dense_strides(tuple(result.shape), result.stride())
                made.append(_with_strides(result, dense if isinstance(layout, str) else layout))
            else:
                numbers[number] = result
        return (*made, *results[len(layouts) :])

    with mode, torch.no_grad(), torch.fx.traceback.preserve_node_meta():
        traced = make_fx(torch.func.functionalize(run, remove="mutations"), decomposition_table=decompositions())(*fakes)
    _check(traced)
    _copy_back(traced, written)
    return Retraced(graph=traced, tensors=fakes, names=tuple(names), written=tuple(written), mode=mode, program=source), numbers


def source_line(node: torch.fx.Node) -> str:
    """ "model.py:12", the user's line that a node comes from, or ""."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    mine = [f"{file}:{line}" for file, line in found if is_user_file(file)]
    return mine[-1] if mine else ""


def host_hint(operators: Iterable[str]) -> str:
    """What to do about operators without a Triton kernel: eager PyTorch ran them on the host."""
    hint = CATALOGUE["operation-needs-gpu"].hint
    options = " ".join([f"--host-op {name}" for name in dict.fromkeys(operators) if name])
    return f"{hint}; or keep it on the host: cgcompile build ... {options}" if options else hint


# --- inputs ---------------------------------------------------------------------------------------------------

Row = tuple[str, str, torch.Tensor | None]
"""Kind, name, and a tensor like it; None for an argument that is None or a number."""


def given_rows(program: ExportedProgram, tensors: Sequence[torch.Tensor]) -> list[Row]:
    rows: list[Row] = []
    state: dict[str, Any] = {**program.state_dict, **program.constants}
    given = 0
    for spec, node in zip(
        program.graph_signature.input_specs, [n for n in program.graph.nodes if n.op == "placeholder"], strict=True
    ):
        if isinstance(spec.arg, ConstantArgument):
            rows.append((INPUT, "", None))
            continue
        if spec.kind not in KINDS:
            raise ModelError("constant-unknown", f"input {spec.arg.name} of the program is of the kind {spec.kind.name}")
        if spec.kind == InputKind.USER_INPUT:
            if given >= len(tensors):
                raise BuildError("sizes-unlike", f"the program takes more than the {len(tensors)} tensors of the call")
            tensor, seen = tensors[given], node.meta["val"]
            if (tensor.dtype, tensor.dim()) != (seen.dtype, seen.dim()):
                raise BuildError("sizes-unlike", f"input {given} is {_text(tensor)}, the program takes {_text(seen)}")
            rows.append((INPUT, str(given), tensor))
            given += 1
        else:
            rows.append((WEIGHT, spec.target, state[spec.target]))
    if given != len(tensors):
        raise BuildError("sizes-unlike", f"the program takes {given} tensors, the call has {len(tensors)}")
    return rows


def _text(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def fake_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A cuda tensor of the same sizes: inputs and weights are stored dense, with the axes in their order in memory."""
    return torch.empty_permuted(tuple(tensor.shape), memory_order(tensor), dtype=tensor.dtype, device=DEVICE)


def changed_outputs(program: ExportedProgram) -> list[tuple[int, int]]:
    """Outputs of a functional program that are new values of buffers or inputs: the output's position, and the argument's."""
    specs = program.graph_signature.input_specs
    buffers = {spec.target: place for place, spec in enumerate(specs) if spec.kind == InputKind.BUFFER}
    names = {spec.arg.name: place for place, spec in enumerate(specs)}
    found = []
    for position, spec in enumerate(program.graph_signature.output_specs):
        if spec.kind == OutputKind.USER_INPUT_MUTATION:
            found.append((position, names[str(spec.target)]))
        elif spec.kind == OutputKind.BUFFER_MUTATION:
            found.append((position, buffers[spec.target]))
        elif spec.kind != OutputKind.USER_OUTPUT:
            raise ModelError("operation-needs-gpu", f"output {position} of the program is of the kind {spec.kind.name}")
    return found


# --- the graph ------------------------------------------------------------------------------------------------


def on_device(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy without assertions whose operations make their tensors on cuda."""
    made = copy.deepcopy(module)
    for part in [m for m in made.modules() if isinstance(m, torch.fx.GraphModule)]:
        for node in list(part.graph.nodes):
            if node.target in ASSERTIONS and not node.users:
                part.graph.erase_node(node)
                continue
            node.args = map_aggregate(node.args, _move)
            node.kwargs = map_aggregate(node.kwargs, _move)
        repair(part)
    return made


def _move(value: Any) -> Any:
    return DEVICE if isinstance(value, torch.device) else value


class _Replacing(torch.fx.Interpreter):
    """Runs a program with the operations of REPLACED replaced, and names what fails with the user's line, and by its name in
    `source`, from which the program was made."""

    def __init__(self, module: torch.fx.GraphModule, source: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # torch writes the node, and lines of its own, into the text of whatever is raised
        self._source = source

    def run_node(self, n: torch.fx.Node) -> Any:
        try:
            result = super().run_node(n)
            return _in_order_of(result, n.meta.get("val")) if n.target in REPLACED else result
        except BuildError as error:
            if error.code != "operation-needs-gpu":
                raise
            raise ModelError(
                "operation-needs-gpu", f"{_named(n)}: {error}", host_hint([source_operator(n, [self._source])])
            ) from error
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise ModelError(
                "operation-needs-gpu",
                f"{_named(n)}: its result's shape, or what the program does next, depends on data",
                host_hint([source_operator(n, [self._source])]),
            ) from error
        except Exception as error:
            failure = explain(error, self._source)
            text = f"{_named(n)} cannot be traced for cuda: {failure.cause}"
            raise BuildError("lowering-broken", text, failure.hint("eager")) from error

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(REPLACED.get(target, target), args, kwargs)


def _in_order_of(result: Any, like: Any) -> Any:
    """`result` with its axes in memory in the order of `like`: later operations, views above all, were exported for it."""
    if not isinstance(result, torch.Tensor) or not isinstance(like, torch.Tensor):
        return result
    strides = [stride if isinstance(stride, int) else int(stride.node.hint) for stride in like.stride()]
    order = sorted(range(result.dim()), key=lambda axis: (-strides[axis], axis))
    return result.permute(order).contiguous().permute([order.index(axis) for axis in range(result.dim())])


def _with_strides(result: Any, strides: tuple[int, ...] | None) -> Any:
    """An output of the call with these strides, at an aligned address."""
    if strides is None:
        return result
    if same_layout(result.shape, result.stride(), strides) and not result.storage_offset() * result.element_size() % ALIGNED:
        return result
    order = sorted(range(result.dim()), key=lambda axis: (-strides[axis], axis))
    dense = result.permute(order).clone(memory_format=torch.contiguous_format)
    return dense.permute([order.index(axis) for axis in range(result.dim())])


def same_layout(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether strides mean the same: those of axes with one element, or of empty tensors, do not matter."""
    pairs = zip(shape, one, other, strict=True)
    return 0 in shape or all(size == 1 or mine == its for size, mine, its in pairs)


def _copy_back(traced: torch.fx.GraphModule, written: Sequence[int]) -> None:
    """Makes the last outputs, the new values of the inputs in `written`, copies to these."""
    (output,) = traced.graph.find_nodes(op="output")
    placeholders = traced.graph.find_nodes(op="placeholder")
    count = len(output.args[0]) - len(written)
    changed = {placeholders[index] for index in written}
    values = [
        value if value is placeholders[index] or _base(value) not in changed else _cloned(traced.graph, output, value)
        for index, value in zip(written, output.args[0][count:], strict=True)
    ]
    for index, value in zip(written, values, strict=True):
        if value is placeholders[index]:
            continue  # it writes what is there
        with traced.graph.inserting_before(output):
            made = traced.graph.call_function(COPY, (placeholders[index], value))
        made.meta["val"] = placeholders[index].meta["val"]
    output.args = (output.args[0][:count],)
    traced.recompile()


def _base(node: torch.fx.Node) -> torch.fx.Node:
    """What a node is a view of."""
    while getattr(node.target, "is_view", False) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _cloned(graph: torch.fx.Graph, before: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
    """A copy of what a tensor holds before any is written to: the new value of one may be the old one of another."""
    with graph.inserting_before(before):
        made = graph.call_function(torch.ops.aten.clone.default, (value,))
    made.meta["val"] = value.meta["val"]
    return made


def _check(traced: torch.fx.GraphModule) -> None:
    """Refuses what the graph must not hold: random numbers of torch's generator, control flow, its own tensors."""
    random: list[str] = []
    own: list[str] = []
    branches: list[str] = []
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            (branches if isinstance(getattr(traced, node.target), torch.nn.Module) else own).append(node.target)
        tags = getattr(node.target, "tags", ())
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in tags:
            random.append(_named(node))
    if random:
        raise ModelError("randomness-refused", f"random numbers: {', '.join(dict.fromkeys(random))}")
    if stray := [n for n in traced.graph.find_nodes(op="placeholder") if any(u.target is COPY and u.args[0] is n for u in n.users)]:
        raise BuildError("lowering-broken", f"the program writes to {stray[0].name}, which its functional form does not")
    if branches:
        raise ModelError("operation-needs-gpu", f"control flow that depends on data: {', '.join(branches)}")
    if own:
        raise ModelError("constant-unknown", f"the program holds tensors of its own: {', '.join(own)}")


def check_apart(written: Sequence[Row], given: Sequence[Row]) -> None:
    """Refuses a weight that is written to and shares memory with another: in a bundle each lies by itself."""
    for kind, name, tensor in written:
        for other_kind, other, value in given:
            both = kind == other_kind == WEIGHT and other != name and tensor is not None and value is not None
            if both and _share(value, tensor):
                raise ModelError("state-shared", f"{name}, which the program changes, lies in the same memory as {other}")


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _named(node: torch.fx.Node) -> str:
    where = source_line(node)
    return f"{node.target}{f' at {where}' if where else ''}"
