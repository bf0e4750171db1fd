"""`cgbundle.Tensor`, and through it every library that speaks DLPack (JAX and others)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain
from typing import Any

from ..errors import CallError
from ..format.schema import DTYPES
from ..format.spans import dense, span_of
from .library import LEGACY_STREAM, Descriptor, Library, Wrapper, check_place
from .tensor import Tensor, copy, empty, from_bytes


def _check(value: Tensor, name: str) -> None:
    """Raises input-kind for a tensor that the caller has made of what is none."""
    numbers = [value.address, *value.shape, *value.strides, *(() if value.device is None else (value.device,))]
    if value.dtype not in DTYPES or any([type(number) is not int for number in numbers]):
        raise CallError("input-kind", f"input {name!r}: a cgbundle.Tensor with an invalid dtype, address, shape, strides or device")
    if value.device is None:
        check_place(value.address, value.dtype, value.shape, value.strides, name)


class DLPack(Library):
    """Tensors of our own; results go back to another library through its `from_dlpack`."""

    name = "dlpack"

    def take(self, value: Any, name: str) -> tuple[Any, Descriptor]:
        if isinstance(value, Tensor):
            known = value._taken  # of a tensor that is given again nothing is asked again: a server's calls have eleven of them
            if known is not None and (
                known[0] is value.address and known[1] is value.shape and known[2] is value.dtype
                and known[3] is value.strides and known[4] is value.device
            ):  # fmt: skip
                return value, known[5]
            _check(value, name)
            descriptor = self.describe(value)
            if type(value.shape) is type(value.strides) is tuple:  # which nobody changes in place
                value._taken = (value.address, value.shape, value.dtype, value.strides, value.device, descriptor)
            return value, descriptor
        from .capsules import read  # tensors of other libraries alone are read through these

        taken = Tensor(*read(value, name))
        return taken, self.describe(taken)

    def describe(self, value: Tensor) -> Descriptor:
        return value.address, value.shape, value.dtype, None if value.contiguous else value.strides, value.device

    def strides(self, value: Tensor) -> Sequence[int]:
        return value.strides

    def byte_strides(self, value: Tensor) -> Sequence[int]:
        return [stride * DTYPES[value.dtype] for stride in value.strides]

    def ordered(self, value: Tensor, order: Sequence[int]) -> Tensor:
        fresh: Tensor = self.empty(value.dtype, value.shape, value.device)
        fresh.strides = dense(value.shape, order)
        copy(fresh, value)
        return fresh

    def wrapper(self, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> Wrapper:
        return lambda address, owner: Tensor(address, dtype, shape, strides, owner)

    def wrap(
        self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], owner: object, device: int | None = None
    ) -> Tensor:
        return Tensor(address, dtype, shape, strides, owner, device)

    def empty(self, dtype: str, shape: Sequence[int], device: int | None = None) -> Tensor:
        if device is not None:
            raise CallError(
                "input-device",
                "a DLPack tensor on a GPU can only be replayed at a recorded size and laid out as recorded",
                "pass torch or CuPy tensors",
            )
        return empty(dtype, shape)

    def as_strided(self, value: Tensor, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
        return Tensor(value.address + offset, dtype, shape, strides, value.owner, value.device)

    def stream(self, device: int) -> int | None:
        return LEGACY_STREAM

    def copy(self, value: Tensor) -> Tensor:
        if value.device is None:
            return value.clone()
        size = max(1, span_of(value.dtype, value.shape, value.strides))
        output = value.owner.copy_out(value.address, size, LEGACY_STREAM)  # of the runtime's own: no library copies it for us
        return Tensor(output.address, value.dtype, value.shape, value.strides, output, value.device)

    def cast(self, value: Tensor, dtype: str) -> Tensor:
        return cast(value, dtype)

    def writable(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return value
        from .capsules import check_writable, read

        check_writable(value, name)
        return Tensor(*read(value, name))

    def converted(self, value: Tensor, like: Any) -> Any:
        if isinstance(like, Tensor):
            return value
        module: Any = sys.modules.get(type(like).__module__.partition(".")[0])
        space: Any = like.__array_namespace__() if hasattr(like, "__array_namespace__") else module
        return space.from_dlpack(value) if hasattr(space, "from_dlpack") else value


def cast(value: Tensor, dtype: str) -> Tensor:
    """A row-major copy with elements of `dtype`, to which the cast is safe.  Raises input-device for memory of a GPU."""
    if value.device is not None:
        hint = "cast it before the call, or pass torch or CuPy tensors"
        raise CallError("input-device", "a DLPack tensor on a GPU is not cast", hint)
    from .numbers import PARTS, decode, encoded  # few calls need a cast

    numbers = decode(value.dtype, value.tobytes())
    if dtype in PARTS and value.dtype not in PARTS:
        numbers = list(chain.from_iterable((number, 0) for number in numbers))
    return from_bytes(encoded(numbers, PARTS.get(dtype, dtype)), dtype, value.shape)
