"""Guards: from the dtypes, devices and shapes of a call to the sizes of the declared dimensions.  Pure.

Errors name the input, the axis, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import CallError
from ..format.schema import EntrySpec, TensorSpec
from ..format.size_expressions import linear, text
from ..tensors.library import Descriptor


def call_sizes(entry: EntrySpec, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The sizes of the declared dimensions, in declared order, for inputs of `shapes` (one per input of the signature).

    Raises input-shape or dimension-disagrees.
    """
    found: dict[str, tuple[int, str]] = {}
    for spec, shape in zip(entry.inputs, shapes, strict=True):
        if len(shape) != len(spec.shape):
            expected = f"expected {len(spec.shape)} axes {signature(spec)}"
            raise CallError("input-shape", f"input {spec.name!r}: {expected}, got {len(shape)}: {list(shape)}")
        for axis, (size, actual) in enumerate(zip(spec.shape, shape, strict=True)):
            rule, where = linear(size), f"input {spec.name!r}, axis {axis}"
            if rule is None:
                if actual != size:
                    raise CallError("input-shape", f"{where}: expected {text(size)}, got {actual}; the input is {signature(spec)}")
                continue
            name, scale, offset = rule
            value, rest = divmod(actual - offset, scale)
            if rest or value < 0:
                raise CallError("input-shape", f"{where}: expected {text(size)}, which no {name} makes {actual}")
            first = found.setdefault(name, (value, where))
            if first[0] != value:
                message = f"{where}: expected {name}={first[0]} as in {first[1]}, got {value}"
                axes = f"the axes of {spec.name!r} that are {name} have to be equal"
                raise CallError("dimension-disagrees", message, axes if f"input {spec.name!r}," in first[1] else "")
    return tuple([found[dimension.name][0] for dimension in entry.dimensions])


def where_declared(entry: EntrySpec, dimension: str) -> str:
    """Where a declared dimension first shows in a call: `input 'ids', axis 0`."""
    for spec in entry.inputs:
        for axis, size in enumerate(spec.shape):
            rule = linear(size)
            if rule and rule[0] == dimension:
                return f"input {spec.name!r}, axis {axis}"
    return dimension


def common_device(inputs: Sequence[TensorSpec], found: Sequence[Descriptor], own: int | None) -> int | None:
    """Where all inputs lie: on the CPU (None), or on CUDA device `own`, which is the program's.  Raises input-device."""
    device = found[0][4]
    for each in found:
        if each[4] != device:
            raise _wrong_device(inputs, found, own)
    if device is not None and device != own:
        raise _wrong_device(inputs, found, own)
    return device


def _wrong_device(inputs: Sequence[TensorSpec], found: Sequence[Descriptor], own: int | None) -> CallError:
    for spec, (*_, device) in zip(inputs, found, strict=True):
        if device is not None and device != own:
            here = "the CPU" if own is None else f"the CPU or CUDA device {own}"
            return CallError("input-device", f"input {spec.name!r}: expected a tensor on {here}, got one on device {device}")
    other = next(index for index, each in enumerate(found) if each[4] != found[0][4])
    return CallError("input-device", f"input {inputs[other].name!r}: lies on another device than input {inputs[0].name!r}")


def wrong_dtype(spec: TensorSpec, dtype: str, *, written: bool) -> CallError:
    """The input-dtype of an input of another dtype than the signature's; `written`: the model writes to it."""
    from ..tensors.casts import is_safe  # only where a call has failed

    hint = f"convert it to {spec.dtype} before the call"
    if written:
        hint += ": the model writes to it, so it is never cast"
    elif is_safe(dtype, spec.dtype):
        hint += ", or load the bundle with cast=True"
    else:
        hint += f": that may change its values, so cast=True would not (not every {dtype} has an equal {spec.dtype})"
    return CallError("input-dtype", f"input {spec.name!r}: expected dtype {spec.dtype}, got {dtype}", hint)


def unreadable(error: CallError, spec: TensorSpec, value: object) -> CallError:
    """The error of a library that cannot take `value` for an input, with what the signature says of that input."""
    hint = error.hint
    if isinstance(value, dict):
        hint = "every input is an argument of its own: program(**inputs)"
    elif isinstance(value, tuple | list) and any(hasattr(each, "shape") for each in value):
        hint = "every input is an argument of its own: program(*inputs)"
    elif isinstance(value, list | tuple | int | float | complex):
        numpys = not spec.dtype.startswith(("bfloat", "float8"))
        make = f"numpy.asarray(value, dtype={spec.dtype!r})" if numpys else f"torch.tensor(value, dtype=torch.{spec.dtype})"
        hint = f"make a tensor of it: {make}"
    return CallError("input-kind", f"{error}; the bundle takes {spec.dtype} {signature(spec)}", hint)


def signature(spec: TensorSpec) -> str:
    """The input's shape as a person would write it: `[batch, 64]`."""
    return "[" + ", ".join(text(size) for size in spec.shape) + "]"
