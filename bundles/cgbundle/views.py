"""Outputs handed out without a copy (`outputs="view"`), guarded: reading one after the program's next replay raises."""

from __future__ import annotations

from typing import Any

from .arrays import Library
from .errors import StaleView


class Epoch:
    """Counts the replays of a program."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


class View:
    """An output of call number `call`.  `tensor` is the caller's kind of tensor over the runtime's memory; `clone()` a copy that
    stays.

    Shape and dtype may be read at any time; everything else raises StaleView once the program has been called again.
    """

    __slots__ = ("_epoch", "_library", "_value", "call", "dtype", "name", "shape")

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], value: Any, library: Library, epoch: Epoch) -> None:
        self.name, self.dtype, self.shape = name, dtype, shape
        self._value, self._library, self._epoch, self.call = value, library, epoch, epoch.number

    @property
    def tensor(self) -> Any:
        """The output itself, valid until the next call."""
        if self._epoch.number != self.call:
            raise StaleView(f"output {self.name!r} of call {self.call} was read after call {self._epoch.number}")
        return self._value

    def clone(self) -> Any:
        """A copy of the caller's kind that no later call touches."""
        return self._library.copy(self.tensor)

    def __getitem__(self, index: Any) -> Any:
        return self.tensor[index]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"output {self.name!r} has no axes")
        length: int = self.shape[0]
        return length

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy

        value = self.tensor
        array = value.__array__() if hasattr(value, "__array__") else value
        return numpy.array(array, dtype) if copy else numpy.asarray(array, dtype)

    def __dlpack__(self, **options: Any) -> object:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.tensor.__dlpack_device__()
        return device

    def __repr__(self) -> str:
        return f"cgbundle.View({self.name!r}, {self.dtype}, {list(self.shape)}, call {self.call})"
