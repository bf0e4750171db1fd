"""Calls torch.export over flat tensors, with the declared dimensions dynamic or with constant sizes.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.traceback import preserve_node_meta
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper
from torch.utils._pytree import tree_leaves

from cgbundle.format.schema import Size
from cgbundle.format.shapes import linear

from ..errors import ModelError
from ..model.flat_module import FlatModule, unwatched
from ..model.side_effects import BRANCH, NOTHING, Obstacle, SideEffects, branch_fix
from ..model.source import Source
from ..model.tracing.attributes import unregistered_attributes_kept
from ..model.user_code import called_by, first_line, text_of, user_line, user_place
from .assertions import settle_assertions
from .exported import memory_order
from .higher_order import untraced
from .higher_order.expand import expanded, give_sizes_at_once, without_composites
from .higher_order.refused_bodies import refused_body
from .higher_order.shared_memory import copy_shared
from .signature.constant_sizes import Lines, constant_size_lines
from .torch_program import move_graph


def export_dynamic(
    source: Source, flat: FlatModule, shapes: Sequence[tuple[Size, ...]], sizes: Mapping[str, tuple[int, ...]]
) -> ExportedProgram:
    """Exports one program for all sizes.  Raises size-excluded, export-failed, data-dependent-branch, data-dependent-shape."""
    # torch.export makes a dimension with one possible value a constant, so the range is larger than the declared sizes
    roots = {name: Dim(name, min=values[0], max=max(values[0] + 3, values[-1])) for name, values in sizes.items()}
    tensors = flat.like.tensors
    with constant_size_lines() as lines:
        try:
            return _export(flat, tensors, _dynamic(shapes, roots))
        except ModelError:
            raise
        except Exception as error:
            narrower = _narrower(text_of(error), roots)
            if narrower is None:
                raise _explain(source, error, sizes, lines) from error
        try:
            return _export(flat, tensors, _dynamic(shapes, narrower))
        except ModelError:
            raise
        except Exception as error:
            raise _explain(source, error, sizes, lines) from error


def export_static(source: Source, flat: FlatModule, tensors: Sequence[torch.Tensor]) -> ExportedProgram:
    """Exports the program for the sizes of `tensors`.  Raises export-failed, data-dependent-branch, data-dependent-shape."""
    try:
        return _export(flat, tensors, None)
    except ModelError:
        raise
    except Exception as error:
        raise _explain(source, error, {}) from error


def past_branches(
    flat: FlatModule, calls: Sequence[SideEffects], tensors: Sequence[torch.Tensor], attempt: Callable[[], ExportedProgram]
) -> tuple[ExportedProgram, tuple[Obstacle, ...]]:
    """Exports a program by `attempt`.  If torch.export stops at a branch on a number that Python read out of a tensor, exports
    again with the number that eager PyTorch read, so that the checks see the rest of the model.  If the model fails with similar
    numbers, or on the other side of a branch, the program asserts the number or side.  Otherwise an obstacle records the branch.
    `calls`: each call of `flat` appends its side effects.  `flat.earlier`: the eager call with `tensors`."""
    passed: list[Obstacle] = []
    tested: set[int] = set()
    while True:
        try:
            program = attempt()
        except ModelError as error:
            stop = error.__cause__
            numbers = calls[-1].reads_of(_free_symbols(stop)) - flat.known
            if error.code != "data-dependent-branch" or not numbers or stop is None:
                raise
            flat.known = flat.known | numbers
            if numbers <= calls[-1].whole and all(_fail(flat, tensors, other) for other in _other_numbers(flat.earlier, numbers)):
                flat.asserted = replace(flat.asserted, reads=flat.asserted.reads | numbers)
                continue
            where, line = user_place(stop)
            passed.append(Obstacle(rule="data-dependent-branch", message=BRANCH, where=where, source=line))
        else:
            open_questions = sorted(calls[-1].guessed - tested)[:QUESTIONS]
            tested.update(calls[-1].guessed)
            failing = [at for at in open_questions if _fail(flat, tensors, _other_answer(flat.earlier, at))]
            if failing:
                flat.asserted = replace(flat.asserted, answers=flat.asserted.answers | {*failing})
                continue
            return program, tuple(dict.fromkeys([*passed, *calls[-1].obstacles]))


QUESTIONS = 8
"""Maximum number of branches whose other side is traced after an export."""


def _other_numbers(earlier: SideEffects, reads: Set[int]) -> Iterator[SideEffects]:
    """Yields the call with other numbers: those of `reads` minus 1, then plus 1, wherever the call read them."""
    values = {number for at in reads if at < len(earlier.reads) for number in tree_leaves(earlier.reads[at])}
    for step in (-1, 1):
        yield _changed(earlier.answers, [_stepped(read, step, values) for read in earlier.reads])


def _stepped(value: Any, step: int, values: Collection[Any]) -> Any:
    """Returns `value` plus `step` if it is in `values`.  Negates booleans, and changes the elements of lists (from tolist())."""
    if isinstance(value, list):
        return [_stepped(element, step, values) for element in value]
    if type(value) not in (int, bool) or value not in values:
        return value
    return not value if isinstance(value, bool) else value + step


def _other_answer(earlier: SideEffects, at: int) -> SideEffects:
    """Returns the call with the opposite answer at branch number `at`."""
    return _changed([answer != (place == at) for place, answer in enumerate(earlier.answers)], earlier.reads)


def _changed(answers: Sequence[bool], reads: Sequence[Any]) -> SideEffects:
    effects = SideEffects()
    effects.answers, effects.reads = list(answers), list(reads)
    return effects


def _fail(flat: FlatModule, tensors: Sequence[torch.Tensor], earlier: SideEffects) -> bool:
    """Whether the model's code raises for the answers and numbers of `earlier`, for example because shapes do not match.  Traces
    the model instead of running it, since a kernel with a wrong number could fault and make the GPU unusable."""
    before = flat.earlier, flat.known, flat.asserted, flat.watch
    flat.earlier, flat.known, flat.asserted, flat.watch = earlier, frozenset(range(len(earlier.reads))), NOTHING, unwatched
    try:
        with torch.no_grad(), redirect_stderr(io.StringIO()), _quiet(*LOGGERS):
            torch.export.export(flat, _separate(tensors), strict=False)
    except (GuardOnDataDependentSymNode, DynamicOutputShapeException, DataDependentOutputException, UnsupportedOperatorException):
        return False
    except Exception as error:
        if type(error).__module__.startswith("torch."):
            raise
        return True
    finally:
        flat.earlier, flat.known, flat.asserted, flat.watch = before
    return False


def _free_symbols(error: BaseException | None) -> frozenset[Any]:
    """Returns the symbols of the condition that stopped an export."""
    return frozenset(getattr(getattr(error, "cond", None), "free_symbols", ()))


def _export(flat: FlatModule, tensors: Sequence[torch.Tensor], dynamic: Any) -> ExportedProgram:
    text = io.StringIO()
    # with preserve_node_meta, nodes in bodies (of torch.cond and similar operators) keep the lines that Dynamo recorded, not the
    # caller's
    with torch.no_grad(), redirect_stderr(text), _quiet(LOGGERS[0]), preserve_node_meta(), unregistered_attributes_kept(flat.model):
        program = untraced.export(flat, _separate(tensors), dynamic)
    sys.stderr.write(text.getvalue())
    _make_plain(program)
    _move_constants(program, flat.device)
    _make_dense(program)
    settle_assertions(program)
    give_sizes_at_once(program)
    copy_shared(program.graph_module)
    return without_composites(expanded(program))


def _make_plain(program: ExportedProgram) -> None:
    """Replaces parameters of another library's class (geoopt's ManifoldParameter) by a torch.nn.Parameter with the same memory.
    Inductor's fake tensors do not support such a class (torch 2.11)."""
    plain: dict[int, torch.nn.Parameter] = {}
    for name, value in program.state_dict.items():
        if isinstance(value, torch.nn.Parameter) and type(value) is not torch.nn.Parameter and not is_wrapper(value):
            with torch._C.DisableTorchFunctionSubclass():
                memory = value.detach().as_subclass(torch.Tensor)
            program.state_dict[name] = plain.setdefault(id(value), torch.nn.Parameter(memory, value.requires_grad))


def _move_constants(program: ExportedProgram, device: torch.device) -> None:
    """Moves constants to `device`, where the model is.  torch.FloatTensor([...]) and torch.Tensor([...]) in forward() create
    constants on the CPU: a dispatch mode cannot intercept these constructors."""
    tensors = {name: value for name, value in program.constants.items() if isinstance(value, torch.Tensor)}
    moved = {name: value.to(device) for name, value in tensors.items() if value.device != device}
    if moved:
        program.constants.update(moved)
        for module in [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]:
            move_graph(module, device)


def _make_dense(program: ExportedProgram) -> None:
    """Replaces constants with gaps or overlaps, such as an expanded tensor in an attribute, by row-major copies: a bundle stores
    only dense tensors."""
    names = {spec.target: spec.arg.name for spec in program.graph_signature.input_specs if spec.target in program.constants}
    places = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    for target, name in names.items():
        value = program.constants[target]
        dense = (
            isinstance(value, torch.Tensor) and value.layout is torch.strided and value.permute(memory_order(value)).is_contiguous()
        )
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or dense:
            continue
        program.constants[target] = value.contiguous()
        fake = places[name].meta["val"]
        with fake.fake_mode:
            places[name].meta["val"] = fake.contiguous()


def _separate(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copies tensors that share a storage with an earlier one, since in a bundle no input is a view of another.

    torch cannot make a program functional that writes to inputs that share a storage.  Expanded tensors are not copied.
    """
    seen: set[int] = set()
    separate_tensors = []
    for tensor in tensors:
        storage = tensor.untyped_storage().data_ptr()
        if storage in seen and all(stride or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        seen.add(storage)
        separate_tensors.append(tensor)
    return tuple(separate_tensors)


LOGGERS = tuple([logging.getLogger(f"torch.{name}") for name in ("fx.experimental.symbolic_shapes", "_subclasses.fake_tensor")])
"""Loggers of conditions that torch cannot guard on, and of operators that fail in a trace."""


@contextmanager
def _quiet(*loggers: logging.Logger) -> Iterator[None]:
    """Disables these loggers in the context.  A failing export logs details, but the exception has the cause."""
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _dynamic(shapes: Sequence[tuple[Size, ...]], roots: Mapping[str, Any]) -> Any:
    if not shapes:
        return None  # without inputs, torch.export sees no argument `*tensors` to which shapes could belong
    return (tuple([{axis: _dim(size, roots) for axis, size in enumerate(shape) if not isinstance(size, int)} for shape in shapes]),)


def _dim(size: Size, roots: Mapping[str, Any]) -> Any:
    rule = linear(size)
    assert rule is not None, size
    name, scale, offset = rule
    dim = roots[name] if scale == 1 else scale * roots[name]
    return dim + offset if offset else dim


def _narrower(text: str, roots: Mapping[str, Any]) -> dict[str, Any] | None:
    """Reads new dimensions from the fixes that torch.export suggests: "batch = Dim('batch', min=2)", "seq = 8*_seq".

    Accepts ranges and multiples, because every declared size is checked against the program afterwards.  Returns None for anything
    else, such as a constant.
    """
    _, heading, fixes = text.partition("Suggested fixes:")
    if not heading:
        return None
    dims = dict(roots)
    for name, low, high in re.findall(r"^\s*(\w+) = Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)\s*$", fixes, re.MULTILINE):
        dims[name] = Dim(name, min=int(low or 1), max=int(high) if high else None)
    for name, scale, root, offset in re.findall(r"^\s*(\w+) = (?:(\d+)\*)?(_\w+)(?: ([+-] \d+))?\s*$", fixes, re.MULTILINE):
        step = int(offset.replace(" ", "")) if offset else 0
        base = dims.get(root) or Dim(root)
        dims[name] = int(scale or 1) * base + step if step else int(scale or 1) * base
    return dims if dims != dict(roots) and dims.keys() >= roots.keys() and not _constants(fixes) else None


# --- error messages for failures of torch.export -------------------------------------------------------------------

NO_LINES: Lines = {}

_INPUT_SIZE = r"L\['tensors'\]\[\d+\]\.size\(\)\[\d+\]"
"""Matches torch.export's name for the size of an input's axis."""


def _constants(fixes: str) -> dict[str, str]:
    """Returns the dimensions that torch.export found to be constant, with their values."""
    return dict(re.findall(r"^\s*(\w+) = (\d+)\s*$", fixes, re.MULTILINE))


NUMPY = ".numpy() is not supported for tensor subclasses"
"""torch's error (2.11, 2.13) if NumPy reads the values of a traced tensor."""

SUBCLASS = re.compile(r"Creating a new Tensor subclass (\w+) but the raw Tensor object is already associated")
"""torch's error (2.11, 2.13) if the model converts a traced tensor to a tensor subclass."""


def _explain(source: Source, error: Exception, sizes: Mapping[str, tuple[int, ...]], lines: Lines = NO_LINES) -> ModelError:
    """Returns the ModelError for an error of torch.export.  `sizes`: the sizes of the dimensions that were dynamic.  `lines`: those
    that make a size constant."""
    text = text_of(error)
    fixed = _constants(text)
    for name in sizes:
        if name in fixed:
            places = lines.get(int(fixed[name]), set())
            # several lines may belong to several dimensions of one size
            where, source_line = next(iter(places)) if len(places) == 1 else ("", "")
            reason = f"the model's code fixes it to {fixed[name]}" + (f": {source_line}" if source_line else "")
            return ModelError(
                "size-excluded",
                f"{where or source.label}: dimension {name!r} cannot vary: {reason}",
                f"remove code that depends on the value of {name} (an if, int(), a constant in a view), or do not declare it; "
                "operators such as nn.GRU and nn.LSTM fix the number of steps",
            )
        if re.search(rf"\b{name}\b", text) and "onstraint" in text:
            named = [line.strip(" -*") for line in text.splitlines() if re.search(rf"\b{name}\b", line)]
            line = next((line for line in named if line.startswith("Not all values")), named[0])
            return ModelError("size-excluded", f"{source.label}: dimension {name!r}: {_guard(re.sub(_INPUT_SIZE, name, line))}")
    if isinstance(error, GuardOnDataDependentSymNode | DataDependentOutputException):  # the latter: from operators like torch.cov
        place, line = user_place(error)
        return branch(place or source.label, line, BRANCH + called_by(error))
    place = found_place = user_line(error, source.label)
    if not place:
        match = re.search(r'File "([^"]+)", line (\d+), in forward', text)
        place = f"{match[1]}:{match[2]}" if match else source.label
    if isinstance(error, DynamicOutputShapeException) or (isinstance(error, TypeError) and "but got FakeTensor" in text):
        name = f" ({error.func})" if isinstance(error, DynamicOutputShapeException) else ""
        return ModelError("data-dependent-shape", f"{place}: the size of a tensor depends on data{name}{called_by(error)}")
    if NUMPY in text:
        return ModelError("numpy-untraceable", f"{place}: NumPy cannot be traced: torch.export has no values for it")
    if match := SUBCLASS.search(text):
        return ModelError(
            "export-differs",
            f"{place}: a traced tensor cannot become a {match[1]}",
            f"compute with plain tensors here: call the function that {match[1]} calls, without the class",
        )
    if untraced.BACKWARD in text:
        return ModelError(
            "export-differs",
            f"{place}: backward() cannot be traced: it writes to .grad, of which a bundle has none",
            "compute the derivative by torch.autograd.grad(output, inputs)",
        )
    if not sizes and found_place and type(error).__module__ == "builtins" and "torch.export" not in text:
        # the model's code raises it, although the code runs in eager PyTorch
        reason = f"{type(error).__name__}: {first_line(error)}"
        return ModelError("export-differs", f"{place}: while torch.export traces it, the model fails here: {reason}")
    if isinstance(error, UnsupportedOperatorException) and error.func.namespace not in ("aten", "prims"):
        name = error.func.name().partition(".")[0]
        return ModelError(
            "export-failed", f"{place}: torch.export needs a fake implementation of the operator {name}, and it has none",
            f"register a function that returns an empty tensor of the result's shape: @torch.library.register_fake({name!r}); "
            "a bundle for a CPU also needs the operator in Python: torch.library.custom_op over PyTorch's operations",
        )  # fmt: skip
    refused, hint = refused_body(error)
    reason = refused or f"{type(error).__name__}: {first_line(error)}"
    return ModelError("export-failed", f"{place}: torch.export cannot export the model: {reason}", hint)


def _guard(line: str) -> str:
    """Says in other words which sizes a condition of torch.export excludes.  Returns the line itself if it has another form."""
    match = re.fullmatch(r"Not all values of (\w+) = .* in the specified range (.*) satisfy the generated guard (.*?)\.?", line)
    return f"torch.export needs {match[3]}, which is not true for all sizes ({match[2]})" if match else line


def branch(where: str, line: str, message: str = BRANCH) -> ModelError:
    """Returns the error for a Python branch on the value of a tensor in source line `line` at `where`."""
    return ModelError("data-dependent-branch", f"{where}: data-dependent-branch: {message}: {line}", branch_fix(line, message))
