"""What the runtime needs of a tensor library, and what the libraries that it knows have in common."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from ..errors import CallError

Descriptor = tuple[int, Sequence[int], str, Sequence[int] | None, int | None]
"""address, shape, dtype, strides in elements (None: row-major), CUDA device (None: CPU)."""

Wrapper = Callable[[int, object], Any]
"""(address, owner) -> a tensor over CPU memory that the owner keeps alive."""


Likeness = Callable[[Sequence[Any]], "tuple[list[int], Any] | None"]
"""The inputs of a call -> their addresses, and what has to live until the replay; None where they differ in anything but these."""


class Library(Protocol):
    """The operations on a library's tensors; slicing and assignment are its own `x[slices]` and `x[slices] = y`."""

    name: str

    def take(self, value: Any, name: str) -> tuple[Any, Descriptor]:
        """`value` as this library's tensor, and where and what it is.  Raises input-kind, naming the input."""

    def describe(self, value: Any) -> Descriptor:
        """Where and what a tensor of this library is."""

    def like(self, values: Sequence[Any]) -> Likeness:
        """Tells the inputs of calls that are like `values` from others, as fast as the library can."""

    def strides(self, value: Any) -> Sequence[int]:
        """Strides in elements."""

    def byte_strides(self, value: Any) -> Sequence[int]:
        """Strides in bytes."""

    def ordered(self, value: Any, order: Sequence[int]) -> Any:
        """A copy whose axes lie in memory in `order`, outermost first, without gaps."""

    def wrapper(self, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> Wrapper:
        """`wrap` for one layout on the CPU, worked out ahead: calls make many."""

    def wrap(
        self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], owner: object, device: int | None = None
    ) -> Any:
        """A tensor over memory that `owner` keeps alive, on the CPU (None) or a CUDA device."""

    def empty(self, dtype: str, shape: Sequence[int], device: int | None = None) -> Any:
        """A tensor of zeros in memory of its own, row-major."""

    def as_strided(self, value: Any, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int) -> Any:
        """A view of the memory of `value`: `offset` in bytes from its first element, `strides` in elements of `dtype`."""

    def stream(self, device: int) -> int | None:
        """The caller's current stream on a CUDA device, as the driver's handle; None: the library has no such thing."""

    def copy(self, value: Any) -> Any:
        """A row-major copy of `value` in memory of its own."""

    def empty_like(self, value: Any) -> tuple[Any, int] | None:
        """A tensor for a copy of `value`, which is row-major and on a GPU, and its address: of any contents, and ready in the order
        of the caller's current stream.  None where `copy` does no worse."""

    def cast(self, value: Any, dtype: str) -> Any:
        """A tensor of `dtype` with the numbers of `value`, where it lies; `casts.is_safe` holds."""

    def writable(self, value: Any, name: str) -> Any:
        """An input of the caller's, as a tensor over its memory that may be assigned to.  Raises input-unwritable."""

    def converted(self, value: Any, like: Any) -> Any:
        """What the caller gets: for libraries read through DLPack, a tensor of the type of `like`."""


def likeness(take: Callable[[Any, str], tuple[Any, Descriptor]], values: Sequence[Any]) -> Likeness:
    """`Library.like` by what a library's `take` says of each input."""
    kinds = [type(value) for value in values]
    layouts = [take(value, "")[1][1:] for value in values]

    def like(given: Sequence[Any]) -> tuple[list[int], Any] | None:
        if [type(value) for value in given] != kinds:
            return None
        try:
            taken = [take(value, "") for value in given]
        except CallError:
            return None  # who takes it another way names the input
        return ([found[0] for _, found in taken], taken) if [found[1:] for _, found in taken] == layouts else None

    return like


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
