"""What the runtime needs of a tensor library, and which library a caller uses: one that the caller has imported already."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from ..errors import CallError
from ..format.schema import DTYPES
from ..format.spans import dense

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
"""DLDeviceType."""

LEGACY_STREAM = 1
"""CU_STREAM_LEGACY: producers are asked to make their data ready on it, and replays then run in its order."""

ADDRESSES = 1 << 57
"""The addresses that a process can have."""

Descriptor = tuple[int, Sequence[int], str, Sequence[int] | None, int | None]
"""address, shape, dtype, strides in elements (None: row-major), CUDA device (None: CPU)."""

Wrapper = Callable[[int, object], Any]
"""(address, owner) -> a tensor over CPU memory that the owner keeps alive."""

Guard = Callable[[Sequence[Any]], "tuple[list[int], Any] | None"]
"""The inputs of a call -> their addresses, and what has to live until the replay; None where they differ in anything but these."""


class Library:
    """The operations on a library's tensors; slicing and assignment are the tensors' `x[slices]` and `x[slices] = y`."""

    name: str

    def take(self, value: Any, name: str) -> tuple[Any, Descriptor]:
        """`value` as this library's tensor, and where and what it is.  Raises input-kind, naming the input."""
        raise NotImplementedError

    def describe(self, value: Any) -> Descriptor:
        """Where and what a tensor of this library is."""
        raise NotImplementedError

    def guard(self, values: Sequence[Any]) -> Guard:
        """Tells the inputs of calls that are like `values` from others, as fast as the library can."""
        kinds = [type(value) for value in values]
        layouts = [self.take(value, "")[1][1:] for value in values]
        take = self.take

        def like(inputs: Sequence[Any]) -> tuple[list[int], Any] | None:
            if [type(value) for value in inputs] != kinds:
                return None
            try:
                taken = [take(value, "") for value in inputs]
            except CallError:
                return None  # the slow path takes the input again, and names it
            same = [descriptor[1:] for _, descriptor in taken] == layouts
            return ([descriptor[0] for _, descriptor in taken], taken) if same else None

        return like

    def strides(self, value: Any) -> Sequence[int]:
        """Strides in elements."""
        raise NotImplementedError

    def byte_strides(self, value: Any) -> Sequence[int]:
        """Strides in bytes."""
        raise NotImplementedError

    def ordered(self, value: Any, order: Sequence[int]) -> Any:
        """A copy whose axes lie in memory in `order`, outermost first, without gaps."""
        raise NotImplementedError

    def wrapper(self, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> Wrapper:
        """`wrap` for one layout on the CPU, worked out ahead: calls make many."""
        raise NotImplementedError

    def wrap(
        self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], owner: object, device: int | None = None
    ) -> Any:
        """A tensor over memory that `owner` keeps alive, on the CPU (None) or a CUDA device."""
        return self.wrapper(dtype, shape, strides)(address, owner)

    def empty(self, dtype: str, shape: Sequence[int], device: int | None = None) -> Any:
        """A tensor of zeros in memory of its own, row-major."""
        raise NotImplementedError

    def as_strided(self, value: Any, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int) -> Any:
        """A view of the memory of `value`: `offset` in bytes from its first element, `strides` in elements of `dtype`."""
        raise NotImplementedError

    def stream(self, device: int) -> int | None:
        """The caller's current stream on a CUDA device, as the driver's handle; None: the library has no such thing."""
        return None

    def copy(self, value: Any) -> Any:
        """A row-major copy of `value` in memory of its own."""
        raise NotImplementedError

    def empty_like(self, value: Any) -> tuple[Any, int] | None:
        """A tensor for a copy of `value`, which is row-major and on a GPU, and its address: of any contents, and ready in the order
        of the caller's current stream.  None where `copy` does no worse."""
        return None

    def cast(self, value: Any, dtype: str) -> Any:
        """A tensor of `dtype` with the numbers of `value`, where it lies; `numbers.is_safe` holds."""
        raise NotImplementedError

    def writable(self, value: Any, name: str) -> Any:
        """An input of the caller's, as a tensor over its memory that may be assigned to.  Raises input-unwritable."""
        return value

    def converted(self, value: Any, like: Any) -> Any:
        """What the caller gets: for libraries read through DLPack, a tensor of the type of `like`."""
        return value


def library_of(value: Any) -> Library:
    """The library that `value`, an input, belongs to; never imports one."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return _library("numpy_arrays", "Numpy")(numpy)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor):
        return _library("torch_tensors", "Torch")(torch)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(value, cupy.ndarray):
        return _library("numpy_arrays", "Cupy")(cupy)
    return _library("dlpack", "DLPack")()


def _library(module: str, name: str) -> Callable[..., Library]:
    """A subclass, from a module that is imported where its library is used."""
    from importlib import import_module

    library: Callable[..., Library] = getattr(import_module(f".{module}", __package__), name)
    return library


def caller_captures() -> bool:
    """Whether the caller's current stream, as far as a library of the caller's knows one, is being captured into a CUDA graph."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    cupy = sys.modules.get("cupy")
    return cupy is not None and hasattr(cupy, "cuda") and bool(cupy.cuda.get_current_stream().is_capturing())


@lru_cache(maxsize=1024)
def array_type(length: int) -> Any:
    """A ctypes array of bytes, at least one, with an attribute for an owner, which plain ctypes arrays do not have."""
    return type("Memory", (ctypes.c_char * max(1, length),), {})


def kind_of(value: Any) -> str:
    """What is no tensor, for messages: `a list of 3`, `the float 2.5`, `None`, else the name of its type."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, tuple | list | dict):
        return f"a {kind} of {len(value)}"
    return "None" if value is None else f"the {kind} {value!r}" if type(value) in (bool, int, float, complex) else kind


def check_place(address: int, dtype: str, shape: Sequence[int], strides: Sequence[int] | None, name: str) -> None:
    """Raises input-kind for a shape, strides or an address that no memory can have."""
    fine = all(size >= 0 for size in shape) and (strides is None or len(strides) == len(shape))
    if fine and 0 not in shape:
        steps = zip(shape, dense(shape) if strides is None else strides, strict=True)
        ends = [(size - 1) * stride * DTYPES[dtype] for size, stride in steps]
        first, last = address + sum(min(0, end) for end in ends), address + sum(max(0, end) for end in ends)
        fine = first > 0 and last < ADDRESSES
    if not fine:
        layout = f"shape {list(shape)}, strides {None if strides is None else list(strides)}, address {address:#x}"
        raise CallError("input-kind", f"input {name!r}: this is not valid memory: {layout}")
