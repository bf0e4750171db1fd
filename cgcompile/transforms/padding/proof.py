"""Proves for each declared dimension whether a call may be padded or chunked.

A dimension is "rows" if padded elements may have any value, "zeros" if they must be zeros (an attention mask removes the effect of
padded positions), else "no".  `row_mixing` proves it, operator by operator.  Before that, eager PyTorch runs the model on unpadded,
padded and chunked inputs, and compares the outputs within their bounds.  This finds what the program of one size does not contain,
such as a branch in Python.  A dimension may be chunked if it is "rows" with padding at either end, and every output has exactly one
axis that is a multiple of it.  One program for all sizes computes the same at all of them, so two sizes are tried.  If each int_key
has its own program, Python may have taken another branch at any size, so every size between the declared ones is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple

import torch

from cgbundle.format.schema import Dimension
from cgbundle.format.shapes import evaluate, linear, names

from ...model.devices.index_guard import FAILURES, guarded_indices
from ...model.flat_module import PREFIX, padded_calls, run_eager
from ...model.source import sample
from ...util.tolerance import compare
from ..error_bounds import ErrorBound, error_bounds
from ..prepared import Prepared
from .row_mixing import Functional, TwoSizes, changed, functional, two_sizes

Tensors = Sequence[torch.Tensor]

MOST = 128
"""The most sizes of a dimension that are tried if each int_key has its own program.  If there are more between the declared sizes,
no call is padded."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """A call at the sizes `small`, padded to the sizes `large`.  The tried dimension has size `short` and `long` in these."""

    short: int
    long: int
    small: dict[str, int]
    large: dict[str, int]


class _Padding(NamedTuple):
    """The fields of `Dimension` before chunking is decided, and the compared programs."""

    pad: Literal["rows", "zeros", "no"]
    reason: str
    not_chunked: str = ""
    compared: Sequence[TwoSizes] = ()


def prove_padding(prepared: Prepared, tell: Callable[[str], None]) -> tuple[Dimension, ...]:
    """Returns the declared dimensions, each with the result of its proof."""
    with guarded_indices(prepared.source.device):
        return _proved(prepared, tell)


def _proved(prepared: Prepared, tell: Callable[[str], None]) -> tuple[Dimension, ...]:
    proved, lookup = [], cache(functional)
    for name, values in prepared.sizes.items():
        tell(name)
        pad, reason, not_chunked, compared = _prove_pad(prepared, name, lookup)
        chunk, chunk_reason = (False, reason) if pad != "rows" else _prove_chunk(prepared, name, compared)
        if shared := _partial(prepared, "outputs"):
            chunk, chunk_reason = (
                False,
                f"output {shared!r} is a part of another output, and the outputs of chunks are joined one by one",
            )
        shown = reason if pad == "no" or chunk else chunk_reason
        proved.append(
            Dimension(
                name=name, sizes=values, pad=pad, chunk=chunk, reason=shown, not_chunked=not_chunked if shown == reason else ""
            )
        )
    return tuple(proved)


def unpadded(prepared: Prepared) -> str:
    """Returns the reason why no call of the entry may be padded, if it is known without a trial, else ""."""
    if prepared.written:
        return f"{prepared.name}() writes to its input {prepared.signature.inputs[prepared.written[0]].name!r}"
    if prepared.generator:
        return f"{prepared.name}() draws random numbers, and other numbers for other sizes"
    if prepared.changes:
        return f"{prepared.name}() writes to its buffer {prepared.changes[0].removeprefix(PREFIX)!r}"
    if rows := prepared.signature.data_sizes:
        return f"the size of output {prepared.signature.outputs[rows[0].output].name!r} depends on data"
    if shared := _partial(prepared, "inputs"):
        return f"output {shared!r} is a part of an input; it would be a part of the padded copy, not of the caller's tensor"
    return ""


def _prove_pad(prepared: Prepared, name: str, lookup: Functional) -> _Padding:
    if why := unpadded(prepared):
        return _Padding("no", why)
    source, sizes = prepared.source, prepared.sizes
    pad: Literal["rows", "zeros"] = "rows"
    reason = f"rows along {name} do not depend on each other"
    trials = _trials(sizes, name) if prepared.programs.dynamic else _every_trial(sizes, name)
    if len(trials) > 2 * MOST:
        return _Padding(
            "no", f"the model was exported per size, and {len(trials) // 2} sizes between the declared ones are too many to try"
        )
    for trial in trials:
        short, long = sample(source, trial.small).tensors, sample(source, trial.large).tensors
        zeros = [torch.zeros_like(tensor) for tensor in long]
        try:
            expected = run_eager(prepared.reference, short).outputs
        except FAILURES as failure:
            return _Padding("no", f"the model fails ({type(failure).__name__}) at {name}={trial.short}")
        problem = _other_shape(prepared, trial.small, expected) or _compare(prepared, short, zeros, expected)
        if not problem and _compare(prepared, short, long, expected):
            pad = "zeros"
        if problem:
            sentence = f"{problem} where a trial with {name}={trial.short} was padded with zeros to {trial.long}"
            why = _first(two_sizes(prepared, name, lookup), fixed=True)  # a trial shows no operator
            return _Padding("no", f"{why}; {sentence}" if why else sentence, why)
    compared = two_sizes(prepared, name, lookup)
    if not compared:
        return _Padding("no", f"the model was exported per size, and its operators cannot be compared between sizes of {name}")
    mixing = _first(compared, fixed=False)
    if pad == "rows" and not mixing:
        return _Padding(pad, reason, compared=compared)
    if why := _first(compared, fixed=True):
        return _Padding("no", f"{why}; padding with zeros may change a result", why)
    mixing = mixing or f"outputs depend on the padding along {name}"
    return _Padding("zeros", f"{mixing}; verified: padding with zeros changes no result", mixing)


def _first(compared: Sequence[TwoSizes], fixed: bool, last: bool = False) -> str:
    """Returns the first reason of `row_mixing.changed`, or ""."""
    return next((why for comparison in compared if (why := changed(comparison, fixed, last))), "")


def _partial(prepared: Prepared, memory: str) -> str:
    """Returns the name of an output that is a view of a part of an input or output, or ""."""
    specs = {"inputs": prepared.signature.inputs, "outputs": prepared.signature.outputs}[memory]
    for alias in prepared.aliases:
        spec = prepared.signature.outputs[alias.output]
        moved = any(view.offset or view.strides != view.base_strides for view in alias.views.values())
        if alias.memory == memory and (moved or spec.shape != specs[alias.index].shape):
            return spec.name
    return ""


def _trials(sizes: Mapping[str, tuple[int, ...]], name: str) -> list[_Trial]:
    """Returns two trials padded to the smallest size above 1, with few and with many padded elements.  Other dimensions have their
    smallest size."""
    long = next((size for size in sizes[name] if size > 1), 2)
    others = {other: values[0] for other, values in sizes.items()}
    shorts = sorted({long - 1, max(1, long // 3)}, reverse=True)
    return [_Trial(short, long, {**others, name: short}, {**others, name: long}) for short in shorts]


def _every_trial(sizes: Mapping[str, tuple[int, ...]], name: str) -> list[_Trial]:
    """Returns a trial of every undeclared size, padded to the next declared one, with the smallest and then the largest other
    sizes."""
    frames = [(short, next(size for size in sizes[name] if size >= short)) for short in range(1, sizes[name][-1])]
    others = [{other: values[pick] for other, values in sizes.items()} for pick in (0, -1)]
    return [
        _Trial(short, long, {**other, name: short}, {**other, name: long})
        for other in others
        for short, long in frames
        if short < long
    ]


def _other_shape(prepared: Prepared, small: Mapping[str, int], expected: Tensors) -> str:
    """Returns a description of an output whose shape differs from the signature, or ""."""
    for spec, want in zip(prepared.signature.outputs, expected, strict=True):
        if tuple(want.shape) != tuple([evaluate(size, small) for size in spec.shape]):
            return f"output {spec.name!r} has the unexpected shape {list(want.shape)}"
    return ""


def _compare(prepared: Prepared, short: Tensors, frame: Tensors, expected: Tensors) -> str:
    """Returns "" if outputs of the padded run begin with the expected ones, else the difference."""
    filled = []
    for inner, outer in zip(short, frame, strict=True):
        padded = outer.clone()
        padded[tuple(slice(0, size) for size in inner.shape)] = inner
        filled.append(padded)
    try:
        with padded_calls(prepared.reference):
            outputs = run_eager(prepared.reference, filled).outputs
    except FAILURES as failure:
        return f"the model fails ({type(failure).__name__})"
    bounds = error_bounds(prepared)
    for spec, bound, want, output in zip(prepared.signature.outputs, bounds, expected, outputs, strict=True):
        front = output[tuple(slice(0, size) for size in want.shape)]
        if front.shape != want.shape:
            return f"output {spec.name!r} has shape {list(output.shape)}"
        if changed := _changed(want, front, bound):
            return f"output {spec.name!r} {changed}"
    return ""


def _changed(expected: torch.Tensor, got: torch.Tensor, bound: ErrorBound) -> str:
    """Returns "" if the outputs are equal within the bound, else the difference."""
    difference = compare(expected, got)
    if difference.error <= bound.bound:
        return ""
    return f"changes: {difference.text}," if bound.exact else f"changes by {difference.error:.1e}"


def _prove_chunk(prepared: Prepared, name: str, compared: Sequence[TwoSizes]) -> tuple[bool, str]:
    inputs, outputs, sizes = prepared.signature.inputs, prepared.signature.outputs, prepared.sizes
    for spec in outputs:
        rules = [linear(size) for size in spec.shape if name in names(size)]
        if len(rules) != 1 or rules[0] is None or rules[0][2] != 0:
            return False, f"output {spec.name!r} has no axis that is a multiple of {name}, so that parts of a call cannot be joined"
    for spec in inputs:
        if any(rule[0] == name and rule[2] != 0 for size in spec.shape if (rule := linear(size))):
            return False, f"input {spec.name!r} has an axis that is not a multiple of {name}, so that a call cannot be chunked"
    others = {other: values[0] for other, values in sizes.items()}
    for long, at in _chunk_points(sizes[name], prepared.programs.dynamic):
        full = sample(prepared.source, {**others, name: long}).tensors
        try:
            expected = run_eager(prepared.reference, full).outputs
            for start, stop in ((0, at), (at, long)):
                part = [_range(tensor, spec.shape, name, start, stop) for tensor, spec in zip(full, inputs, strict=True)]
                actual = run_eager(prepared.reference, part).outputs
                for spec, bound, want, output in zip(outputs, error_bounds(prepared), expected, actual, strict=True):
                    if changed := _changed(_range(want, spec.shape, name, start, stop), output, bound):
                        return False, f"output {spec.name!r} {changed} when {name}={long} is chunked at {at}"
        except FAILURES as failure:
            return False, f"the model fails ({type(failure).__name__}) on a part of {name}={long}"
    if why := _first(compared, fixed=False, last=True):
        return False, f"{why}; it is not proved that a chunked call returns the same"
    return True, f"rows along {name} do not depend on each other"


def _chunk_points(sizes: Sequence[int], dynamic: bool) -> list[tuple[int, int]]:
    """Returns (size, position of the cut).  If each int_key has its own program, also cuts each size at the next smaller one, and
    sizes beyond the largest one."""
    long = max(3, next((size for size in sizes if size > 1), 2))
    if dynamic:
        return [(long, 1)]
    last = sizes[-1]
    return [(long, 1), *[(high, low) for low, high in pairwise(sizes)], (last + 1, last), (2 * last, last)]


def _range(tensor: torch.Tensor, shape: Sequence[object], name: str, start: int, stop: int) -> torch.Tensor:
    slices = []
    for size in shape:
        rule = linear(size)  # type: ignore[arg-type]
        slices.append(slice(rule[1] * start, rule[1] * stop) if rule and rule[0] == name else slice(None))
    return tensor[tuple(slices)]
