"""Runs the model in eager PyTorch: checks that it runs, finds its output shapes, and compares its exported program with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.export import ExportedProgram

from cgbundle.format.schema import Size, Tree
from cgbundle.format.shapes import evaluate

from ...errors import ModelError
from ...model.flat_module import FlatModule, ProgramModule, Reference, run_eager
from ...model.source import SEED, Source, all_keys, sample, written_method
from ...model.user_code import definition, first_line, text_of, user_line
from ...util.tolerance import compare, tolerance
from ..exported import EagerShapes
from ..higher_order.refused_bodies import refused_body
from ..programs import Programs, coarsest
from .signature import symbols_of

FAR = tolerance(torch.bfloat16)
"""A difference larger than rounding errors of any dtype.  The self-test finds smaller errors."""

ASSERTED = "Runtime assertion failed"
"""torch's error (2.11, 2.13) if a call does not satisfy a condition that the export assumed."""

NO_HISTORY = "does not require grad and does not have a grad_fn"
"""torch's error (2.11, 2.13) for a derivative while gradients are off."""

NO_HISTORY_FIX = "models are called without gradients: compute what is differentiated under `with torch.enable_grad():`"


def try_eager(
    source: Source, flat: FlatModule, sizes: Mapping[str, tuple[int, ...]], seed: int = SEED, *, keep: bool = False
) -> list[EagerShapes]:
    """Runs the model at its smallest and largest sizes, and returns the output shapes.  `keep`: do not restore buffers afterwards.

    Raises size-excluded, eager-failed, structure-unsupported."""
    results, shapes, failed = [], [], []
    for pick in (0, -1):
        call_sizes = {name: values[pick] for name, values in sizes.items()}
        try:
            shapes.append((call_sizes, eager_shapes(source, flat, call_sizes, sample(source, call_sizes, seed).tensors, keep=keep)))
        except ModelError as error:
            if error.code != "size-excluded":
                raise
            failed.append(error)
        results.append(flat.result)
    if len(failed) == len(results):
        cause = failed[0].__cause__
        hint = NO_HISTORY_FIX if cause and NO_HISTORY in text_of(cause) else refused_body(cause)[1]
        raise ModelError("eager-failed", str(failed[0]), hint) from cause
    if failed:
        ran = ", ".join([f"{name}={value}" for name, value in shapes[0][0].items()])
        raise ModelError("size-excluded", str(failed[0]), f"it runs at {ran}: {failed[0].hint}") from failed[0].__cause__
    check_result(source, *results)
    return shapes


def eager_shapes(
    source: Source, flat: FlatModule, chosen: Mapping[str, int], tensors: Sequence[torch.Tensor], *, keep: bool = False
) -> list[tuple[int, ...]]:
    """Runs the model at the sizes `chosen`, and returns the shapes of the outputs.  Raises size-excluded, structure-unsupported."""
    try:
        return [tuple(output.shape) for output in run_eager(flat, tensors, keep=keep).outputs]
    except Exception as error:
        if isinstance(error, ModelError):
            raise
        place = user_line(error, source.label) or source.label
        nested = _nested(flat) if isinstance(error, TypeError) else ""
        raise ModelError(
            "size-excluded",
            f"{place}: the model fails in eager PyTorch at {_at(chosen) or 'its inputs'}: {_error_text(error)}{nested}",
        ) from error


def _error_text(error: Exception) -> str:
    """Returns an error's type and first line; a plain RuntimeError, as from PyTorch, without its type."""
    refused, _ = refused_body(error)
    if refused:
        return refused
    kind = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
    return kind + first_line(error)


def _nested(flat: FlatModule) -> str:
    """Returns a remark on arguments that are tuples, in case the model expects a tensor; else ""."""
    names = [name for name, _ in flat.like.call["call"]]
    arguments = dict(zip(names, flat.like.args, strict=False)) | flat.like.kwargs
    tuples = [f"a {type(value).__name__} for {name}" for name, value in arguments.items() if isinstance(value, tuple | list)]
    return (
        f"; inputs() returns {', '.join(tuples)}; return a tensor if the model expects one: (x,) is one argument, ((x,),) a tuple"
        if tuples
        else ""
    )


def check_result(source: Source, one: Tree | None, other: Tree | None) -> None:
    """Raises structure-unsupported if the results at two sizes have different nesting or constants."""
    if one != other:
        raise ModelError(
            "structure-unsupported",
            f"{source.label}: the result's nesting or constants change with the sizes: {one} and {other}",
            "return tensors, and numbers that do not depend on a declared dimension; or let inputs() declare another dimension, "
            "or one size of this one",
        )


def check_dynamic(
    source: Source,
    flat: FlatModule,
    program: ExportedProgram,
    shapes: Sequence[tuple[Size, ...]],
    sizes: Mapping[str, tuple[int, ...]],
    branched: bool,
) -> None:
    """Raises size-excluded for a declared size that violates the export's constraints, or if program and model differ.

    torch.export assumes that a dynamic size is larger than 1: `if x.shape[0] == 1` is False in the program.  So program and model
    are compared at int_keys with a size of 1, and at the smallest.  A program with a branch on data (`branched`) is not compared.
    """
    symbols_of(source, program, shapes, sizes)
    if branched:
        return
    if not sizes:
        check_static(source, flat, program, {}, sample(source, {}).tensors)
        return
    keys = all_keys(sizes)
    bound = coarsest(Programs(by_key=dict.fromkeys(keys, program), dynamic=True))
    exported = ProgramModule([program])
    for key in keys:
        chosen = dict(zip(sizes, key, strict=True))
        ones = any(evaluate(size, chosen) == 1 for shape in shapes for size in shape if not isinstance(size, int))
        if (ones or key == keys[0]) and _differ(flat, exported, sample(source, chosen).tensors, bound):
            raise ModelError(
                "size-excluded", f"{source.label}: at {_at(chosen)} the exported program computes another result than the model"
            )


def check_static(
    source: Source, flat: FlatModule, program: ExportedProgram, chosen: Mapping[str, int], tensors: Sequence[torch.Tensor]
) -> None:
    """Raises export-differs if the program of one int_key and the model differ, both run in eager PyTorch.

    If two calls of the model differ, too, it keeps state outside buffers, which other checks report.
    """
    if _differ(flat, ProgramModule([program]), tensors, FAR):
        where = definition(written_method(source.model, source.entry)) or source.label
        at = f" at {_at(chosen)}" if chosen else ""
        raise ModelError("export-differs", f"{where}: while torch.export traces it, the model computes another result{at}")


def _at(chosen: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in chosen.items())


def _differ(flat: FlatModule, exported: Reference, tensors: Sequence[torch.Tensor], bound: float) -> bool:
    """Whether program and model differ, while two calls of the model agree.  Raises export-differs if only the program fails."""
    expected = _seeded(flat, tensors)
    try:
        actual = _seeded(exported, tensors)
    except RuntimeError as error:
        if ASSERTED in str(error):
            return True  # torch.export assumed a condition that is false here, such as that a size is not 1
        reason = str(error).partition("\n")[0]
        raise ModelError("export-differs", f"the exported program fails where the model runs: {reason}") from error
    return _apart(expected, actual, bound) and not _apart(expected, _seeded(flat, tensors), bound)


def _apart(expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor], bound: float) -> bool:
    return any(compare(want, got).error > bound for want, got in zip(expected, actual, strict=True))


def _seeded(reference: Reference, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns the outputs of a call with a fixed random seed."""
    with torch.random.fork_rng(devices=sorted({tensor.device.index or 0 for tensor in tensors if tensor.is_cuda})):
        torch.manual_seed(SEED)
        return run_eager(reference, tensors).outputs
