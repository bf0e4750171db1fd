"""Calls of torch.export over flat tensors: with the declared dimensions dynamic, or with every size a constant.

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
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_leaves

from cgbundle.format.schema import Size
from cgbundle.format.size_expressions import linear

from ..errors import ModelError
from ..model.flat_module import FlatModule, unwatched
from ..model.side_effects import BRANCH, NOTHING, Obstacle, SideEffects, branch_fix
from ..model.source import Source
from ..model.tracing.attributes import unregistered_attributes_kept
from ..model.user_code import called_by, first_line, text_of, user_line, user_place
from .assertions import settle_assertions
from .exported import memory_order
from .higher_order import body_constants, untraced
from .higher_order.composite_operators import give_sizes_at_once, without_composites
from .higher_order.expand import expanded
from .higher_order.refused_bodies import refused_body
from .higher_order.shared_memory import copy_shared
from .torch_program import move_graph


def export_dynamic(
    source: Source, flat: FlatModule, shapes: Sequence[tuple[Size, ...]], sizes: Mapping[str, tuple[int, ...]]
) -> ExportedProgram:
    """One program for all sizes.  Raises size-excluded, export-failed, data-dependent-branch, data-dependent-shape."""
    # export takes a dimension with a single value above 1 for a constant: the range always goes beyond the sizes
    roots = {name: Dim(name, min=values[0], max=max(values[0] + 3, values[-1])) for name, values in sizes.items()}
    tensors = flat.like.tensors
    try:
        return _export(flat, tensors, _dynamic(shapes, roots))
    except ModelError:
        raise
    except Exception as error:
        narrower = _narrower(text_of(error), roots)
        if narrower is None:
            raise _explain(source, error, sizes) from error
    try:
        return _export(flat, tensors, _dynamic(shapes, narrower))
    except ModelError:
        raise
    except Exception as error:
        raise _explain(source, error, sizes) from error


def export_static(source: Source, flat: FlatModule, tensors: Sequence[torch.Tensor]) -> ExportedProgram:
    """The program for the sizes of `tensors`.  Raises export-failed, data-dependent-branch, data-dependent-shape."""
    try:
        return _export(flat, tensors, None)
    except ModelError:
        raise
    except Exception as error:
        raise _explain(source, error, {}) from error


def past_branches(
    flat: FlatModule, calls: Sequence[SideEffects], tensors: Sequence[torch.Tensor], attempt: Callable[[], ExportedProgram]
) -> tuple[ExportedProgram, tuple[Obstacle, ...]]:
    """A branch on a number that Python read out of a tensor stops the export.  It is made again with the number that eager PyTorch
    had, so that the checks see what comes after.  Where the model fails with any other number, and on the other side of a branch,
    there is one way to go: the program asserts it.  `calls`: grows by what each call of `flat` does.  `flat.earlier` is what one
    did with `tensors`."""
    passed: list[Obstacle] = []
    asked: set[int] = set()
    while True:
        try:
            program = attempt()
        except ModelError as error:
            stop = error.__cause__
            more = calls[-1].reads_of(_free_symbols(stop)) - flat.known
            if error.code != "data-dependent-branch" or not more or stop is None:
                raise
            flat.known = flat.known | more
            if more <= calls[-1].whole and all(_fail(flat, tensors, other) for other in _other_numbers(flat.earlier, more)):
                flat.asserted = replace(flat.asserted, reads=flat.asserted.reads | more)
                continue
            where, line = user_place(stop)
            passed.append(Obstacle(rule="data-dependent-branch", message=BRANCH, where=where, source=line))
        else:
            open_questions = sorted(calls[-1].guessed - asked)[:QUESTIONS]
            asked.update(calls[-1].guessed)
            only = [at for at in open_questions if _fail(flat, tensors, _other_answer(flat.earlier, at))]
            if only:
                flat.asserted = replace(flat.asserted, answers=flat.asserted.answers | {*only})
                continue
            return program, tuple(dict.fromkeys([*passed, *calls[-1].obstacles]))


QUESTIONS = 8
"""Branches of which both sides are tried: each is a trace."""


def _other_numbers(earlier: SideEffects, reads: Set[int]) -> Iterator[SideEffects]:
    """What a call would have read: a number beside each of `reads`, wherever it read the same number."""
    values = {number for at in reads if at < len(earlier.reads) for number in tree_leaves(earlier.reads[at])}
    for step in (-1, 1):
        yield _changed(earlier, earlier.answers, [_beside(read, step, values) for read in earlier.reads])


def _beside(value: Any, step: int, values: Collection[Any]) -> Any:
    """`value`, or for what tolist() gave, its numbers."""
    if isinstance(value, list):
        return [_beside(element, step, values) for element in value]
    if type(value) not in (int, bool) or value not in values:
        return value
    return not value if isinstance(value, bool) else value + step


def _other_answer(earlier: SideEffects, at: int) -> SideEffects:
    """What a call would have been told at a branch."""
    return _changed(earlier, [answer != (place == at) for place, answer in enumerate(earlier.answers)], earlier.reads)


def _changed(earlier: SideEffects, answers: Sequence[bool], reads: Sequence[Any]) -> SideEffects:
    effects = SideEffects()
    effects.answers, effects.reads = list(answers), list(reads)
    return effects


def _fail(flat: FlatModule, tensors: Sequence[torch.Tensor], earlier: SideEffects) -> bool:
    """Whether the model fails by itself where it goes on as `earlier` says, which no data decides: shapes that do not fit, an error
    that it raises.  It is traced, not run: a wrong number would end the use of a GPU."""
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
    """The symbols of the condition that stopped an export."""
    return frozenset(getattr(getattr(error, "cond", None), "free_symbols", ()))


def _export(flat: FlatModule, tensors: Sequence[torch.Tensor], dynamic: Any) -> ExportedProgram:
    said = io.StringIO()
    # Dynamo traces the functions of torch.cond and its like first: so the lines that it noted last, and not those that call them
    with torch.no_grad(), redirect_stderr(said), _quiet(LOGGERS[0]), preserve_node_meta(), unregistered_attributes_kept(flat.model):
        program = body_constants.lifted(untraced.export(flat, _separate(tensors), dynamic))
    sys.stderr.write(said.getvalue())
    _move_constants(program, flat.device)
    _make_dense(program)
    settle_assertions(program)
    give_sizes_at_once(program)
    copy_shared(program.graph_module)
    return without_composites(expanded(program))


def _move_constants(program: ExportedProgram, device: torch.device) -> None:
    """What forward() makes by torch.FloatTensor([...]) or torch.Tensor([...]) is on the CPU in the trace too, until it is moved: no
    mode is asked about these.  The program has it on `device`, where the model is, as all other constants."""
    tensors = {name: value for name, value in program.constants.items() if isinstance(value, torch.Tensor)}
    elsewhere = {name: value.to(device) for name, value in tensors.items() if value.device != device}
    if elsewhere:
        program.constants.update(elsewhere)
        for module in [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]:
            move_graph(module, device)


def _make_dense(program: ExportedProgram) -> None:
    """Constants with gaps or overlaps, as an expanded tensor that the model keeps in an attribute, become row-major copies: a
    bundle stores dense tensors only."""
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
    """The tensors, each in a storage of its own where it shared one: in a bundle no input is a view of another.

    torch cannot make a program functional that writes to such.  A tensor whose elements share memory stays as it is.
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
"""Those of what could not be guarded on, and of operators that fail while they are traced."""


@contextmanager
def _quiet(*loggers: logging.Logger) -> Iterator[None]:
    """A failing export logs what it could not guard on, and prints its graph: what they mean is in the exception."""
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
        return None  # a call without inputs: `*tensors` is no argument that torch.export knows then
    return (tuple([{axis: _dim(size, roots) for axis, size in enumerate(shape) if not isinstance(size, int)} for shape in shapes]),)


def _dim(size: Size, roots: Mapping[str, Any]) -> Any:
    rule = linear(size)
    assert rule is not None, size
    name, scale, offset = rule
    dim = roots[name] if scale == 1 else scale * roots[name]
    return dim + offset if offset else dim


def _narrower(text: str, roots: Mapping[str, Any]) -> dict[str, Any] | None:
    """torch.export names the constraint that it found as suggested fixes: "batch = Dim('batch', min=2)", "seq = 8*_seq".

    A range or a multiple is taken up, because every declared size is checked against the exported program afterwards; None for
    anything else, a constant above all.
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


# --- what torch.export says when it stops, in our words ------------------------------------------------------------

_INPUT_SIZE = r"L\['tensors'\]\[\d+\]\.size\(\)\[\d+\]"
"""How export spells the size of an input's axis."""


def _constants(fixes: str) -> dict[str, str]:
    """Dimensions that export found to be constant, with the value."""
    return dict(re.findall(r"^\s*(\w+) = (\d+)\s*$", fixes, re.MULTILINE))


NUMPY = ".numpy() is not supported for tensor subclasses"
"""What torch (2.11, 2.13) says where NumPy asks a traced tensor for its values."""

SUBCLASS = re.compile(r"Creating a new Tensor subclass (\w+) but the raw Tensor object is already associated")
"""What torch (2.11, 2.13) says where the model's code makes a tensor of a class of its own out of a traced one."""


def _explain(source: Source, error: Exception, sizes: Mapping[str, tuple[int, ...]]) -> ModelError:
    """The error for what torch.export raised; `sizes` are those of the dimensions that were dynamic."""
    text = text_of(error)
    fixed = _constants(text)
    for name in sizes:
        if name in fixed:
            return ModelError(
                "size-excluded",
                f"{source.label}: dimension {name!r} cannot vary: the model's code fixes it to {fixed[name]}",
                f"remove code that depends on the value of {name} (an if, int(), a constant in a view), or do not declare it",
            )
        if re.search(rf"\b{name}\b", text) and "onstraint" in text:
            lines = [line.strip(" -*") for line in text.splitlines() if re.search(rf"\b{name}\b", line)]
            line = next((line for line in lines if line.startswith("Not all values")), lines[0])
            return ModelError("size-excluded", f"{source.label}: dimension {name!r}: {re.sub(_INPUT_SIZE, name, line)}")
    if isinstance(error, GuardOnDataDependentSymNode | DataDependentOutputException):  # the latter: an operator asks, as torch.cov
        place, line = user_place(error)
        return branch(place or source.label, line, BRANCH + called_by(error))
    place = found_place = user_line(error, source.label)
    if not place:
        match = re.search(r'File "([^"]+)", line (\d+), in forward', text)
        place = f"{match[1]}:{match[2]}" if match else source.label
    if isinstance(error, DynamicOutputShapeException) or (isinstance(error, TypeError) and "but got FakeTensor" in text):
        what = f" ({error.func})" if isinstance(error, DynamicOutputShapeException) else ""
        return ModelError("data-dependent-shape", f"{place}: the size of a tensor depends on data{what}{called_by(error)}")
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
        # raised by the model's own code, which eager PyTorch could run
        said = f"{type(error).__name__}: {first_line(error)}"
        return ModelError("export-differs", f"{place}: while torch.export traces it, the model fails here: {said}")
    refused, hint = refused_body(error)
    said = refused or f"{type(error).__name__}: {first_line(error)}"
    return ModelError("export-failed", f"{place}: torch.export cannot export the model: {said}", hint)


def branch(where: str, line: str, message: str = BRANCH) -> ModelError:
    """Python branched on the value of a tensor at `where`."""
    return ModelError("data-dependent-branch", f"{where}: data-dependent-branch: {message}: {line}", branch_fix(line, message))
