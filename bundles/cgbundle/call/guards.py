"""Guards: from the dtypes, devices and shapes of a call to the sizes of the declared dimensions.  Pure.

Errors name the input, the axis, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import CallError
from ..format.schema import Manifest, TensorSpec
from ..format.size_expressions import linear, text
from ..tensors.library import Descriptor


def call_sizes(manifest: Manifest, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The sizes of the declared dimensions, in declared order, for inputs of `shapes` (one per input of the signature).

    Raises input-shape or dimension-disagrees.
    """
    found: dict[str, tuple[int, str]] = {}
    for spec, shape in zip(manifest.inputs, shapes, strict=True):
        if len(shape) != len(spec.shape):
            expected = f"expected {len(spec.shape)} axes {signature(spec)}"
            raise CallError("input-shape", f"input {spec.name!r}: {expected}, got {len(shape)}: {list(shape)}")
        for axis, (size, actual) in enumerate(zip(spec.shape, shape, strict=True)):
            rule, where = linear(size), f"input {spec.name!r}, axis {axis}"
            if rule is None:
                if actual != size:
                    raise CallError("input-shape", f"{where}: expected {text(size)}, got {actual} {signature(spec)}")
                continue
            name, scale, offset = rule
            value, rest = divmod(actual - offset, scale)
            if rest or value < 0:
                raise CallError("input-shape", f"{where}: expected {text(size)}, which no {name} makes {actual}")
            first = found.setdefault(name, (value, where))
            if first[0] != value:
                message = f"{where}: expected {name}={first[0]} as in {first[1]}, got {value}"
                raise CallError("dimension-disagrees", message)
    return tuple([found[dimension.name][0] for dimension in manifest.dimensions])


def where_declared(manifest: Manifest, dimension: str) -> str:
    """Where a declared dimension first shows in a call: `input 'ids', axis 0`."""
    for spec in manifest.inputs:
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


def check_dtype(spec: TensorSpec, dtype: str) -> None:
    """Raises input-dtype unless the input has the dtype of the signature."""
    if dtype != spec.dtype:
        raise CallError(
            "input-dtype",
            f"input {spec.name!r}: expected dtype {spec.dtype}, got {dtype}",
            f"convert it to {spec.dtype} before the call: the runtime never casts",
        )


def signature(spec: TensorSpec) -> str:
    """The input's shape as a person would write it: `[batch, 64]`."""
    return "[" + ", ".join(text(size) for size in spec.shape) + "]"
