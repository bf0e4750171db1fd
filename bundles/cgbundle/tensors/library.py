"""The interface to tensor libraries, and the choice of the caller's, which is imported already."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from ..errors import CallError
from ..format.schema import DTYPES
from ..format.shapes import dense

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
LEGACY_STREAM = 1  # CU_STREAM_LEGACY: producers make their data ready on it, and replays run in its order
ADDRESSES = 1 << 57  # size of a process's address space
Descriptor = tuple[int, Sequence[int], str, Sequence[int] | None, int | None]
"""Address, shape, dtype, strides in elements (None: row-major), CUDA device (None: CPU)."""

Wrapper = Callable[[int, object], Any]  # (address, owner) -> a tensor over CPU memory
Guard = Callable[[Sequence[Any]], "tuple[list[int], Any] | None"]
"""Inputs of a call -> (addresses, objects to keep alive during the replay), or None for another kind of call."""


class Library(Protocol):
    """Operations on a library's tensors, beside `x[slices]` and `x[slices] = y`."""

    name: str

    def take(self, value: Any, name: str) -> tuple[Any, Descriptor]: ...  # an input as a tensor; raises input-kind
    def describe(self, value: Any) -> Descriptor: ...
    def strides(self, value: Any) -> Sequence[int]: ...  # in elements
    def byte_strides(self, value: Any) -> Sequence[int]: ...
    # a dense copy with axes in memory in `order`, outermost first
    def ordered(self, value: Any, order: Sequence[int]) -> Any: ...
    # `wrap` for one layout on the CPU, prepared in advance
    def wrapper(self, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> Wrapper: ...
    def empty(self, dtype: str, shape: Sequence[int], device: int | None = None) -> Any: ...  # row-major, zeros
    # a view of `value`: `offset` in bytes from its first element, `strides` in elements of `dtype`
    def as_strided(self, value: Any, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int) -> Any: ...
    def copy(self, value: Any) -> Any: ...  # row-major
    def cast(self, value: Any, dtype: str) -> Any: ...  # on the same device; `numbers.is_safe` holds

    def guard(self, values: Sequence[Any]) -> Guard:
        """A guard for calls with inputs like `values`."""
        kinds = [type(value) for value in values]
        layouts = [self.take(value, "")[1][1:] for value in values]
        take = self.take

        def like(inputs: Sequence[Any]) -> tuple[list[int], Any] | None:
            if [type(value) for value in inputs] != kinds:
                return None
            try:
                checked = [take(value, "") for value in inputs]
            except CallError:
                return None  # the slow path raises it again, with the input's name
            same = [descriptor[1:] for _, descriptor in checked] == layouts
            return ([descriptor[0] for _, descriptor in checked], checked) if same else None

        return like

    def wrap(
        self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], owner: object, device: int | None = None
    ) -> Any:
        """A tensor over memory that `owner` keeps alive."""
        return self.wrapper(dtype, shape, strides)(address, owner)

    def stream(self, device: int) -> int | None:
        """The handle of the caller's current stream on a CUDA device; None if the library has no streams."""
        return None

    def empty_like(self, value: Any) -> tuple[Any, int] | None:
        """An uninitialized tensor for a copy of a row-major `value` on a GPU, and its address, ready on the caller's current
        stream; None if `copy` is as fast."""
        return None

    def writable(self, value: Any, name: str) -> Any:
        """A writable tensor over the memory of the caller's input. Raises input-unwritable."""
        return value

    def converted(self, value: Any, like: Any) -> Any:
        """A result in the library of `like`, for libraries that are read through DLPack."""
        return value


def library_of(value: Any) -> Library:
    """The library of an input; never imports one."""
    numpy, torch, cupy = [sys.modules.get(name) for name in ("numpy", "torch", "cupy")]
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return _library("numpy_arrays", "Numpy")(numpy)
    if torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor):
        return _library("torch_tensors", "Torch")(torch)
    if cupy is not None and isinstance(value, cupy.ndarray):
        return _library("numpy_arrays", "Cupy")(cupy)
    return _library("tensor", "DLPack")()


def _library(module: str, name: str) -> Callable[..., Library]:
    from importlib import import_module  # only the used library is imported

    library: Callable[..., Library] = getattr(import_module(f".{module}", __package__), name)
    return library


def caller_captures() -> bool:
    """Whether the current stream of a library of the caller is being captured into a CUDA graph."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    cupy = sys.modules.get("cupy")
    return cupy is not None and hasattr(cupy, "cuda") and bool(cupy.cuda.get_current_stream().is_capturing())


@lru_cache(maxsize=1024)
def array_type(length: int) -> Any:
    """A ctypes array of at least one byte, with an attribute for an owner."""
    return type("Memory", (ctypes.c_char * max(1, length),), {})


def kind_of(value: Any) -> str:
    """What a value is, for messages: `a list of 3`, `the float 2.5`, `None`, else the name of its type."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, tuple | list | dict):
        return f"a {kind} of {len(value)}"
    return "None" if value is None else f"the {kind} {value!r}" if type(value) in (bool, int, float, complex) else kind


def check_place(address: int, dtype: str, shape: Sequence[int], strides: Sequence[int] | None, name: str) -> None:
    """Raises input-kind for an impossible shape, strides or address."""
    fine = all(size >= 0 for size in shape) and (strides is None or len(strides) == len(shape))
    if fine and 0 not in shape:
        steps = zip(shape, dense(shape) if strides is None else strides, strict=True)
        ends = [(size - 1) * stride * DTYPES[dtype] for size, stride in steps]
        first, last = address + sum(min(0, end) for end in ends), address + sum(max(0, end) for end in ends)
        fine = first > 0 and last < ADDRESSES
    if not fine:
        layout = f"shape {list(shape)}, strides {None if strides is None else list(strides)}, address {address:#x}"
        raise CallError("input-kind", f"input {name!r}: this is not valid memory: {layout}")
