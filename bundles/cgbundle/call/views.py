"""Outputs handed out without a copy (`outputs="view"`), guarded: reading one after the program's next replay raises."""

from __future__ import annotations

from typing import Any

from ..errors import CallError
from ..format.schema import TensorSpec
from ..tensors.library import Library


class Epoch:
    """Counts the replays of a session, or those of one entry where `entry` names it.  `closed`: its memory is about to go, also
    under a replay that still runs."""

    __slots__ = ("closed", "entry", "number")

    def __init__(self, entry: str = "") -> None:
        self.number, self.closed, self.entry = 0, False, entry


class View:
    """An output of call number `call`.  `tensor` is the caller's kind of tensor over the runtime's memory; `clone()` a copy that
    stays.

    Shape and dtype may be read at any time; everything else raises stale-view once the session has been called again.  One that
    another entry takes where it lies (`Manifest.donations`) stays until its own entry is called again.  A view is an input as the
    tensor is.
    """

    __slots__ = ("_epoch", "_library", "_spec", "_value", "call")

    def __init__(self, spec: TensorSpec, value: Any, library: Library, epoch: Epoch, call: int) -> None:
        self._spec, self._value, self._library, self._epoch, self.call = spec, value, library, epoch, call

    @property
    def name(self) -> str:
        """The output's name in the signature."""
        return self._spec.name

    @property
    def dtype(self) -> str:
        """As the signature spells it: "float32"."""
        return self._spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this call's output."""
        return tuple(self._value.shape)

    @property
    def tensor(self) -> Any:
        """The output itself, valid until the next call."""
        epoch = self._epoch
        if epoch.number != self.call or epoch.closed:
            of = f" of {epoch.entry!r}" if epoch.entry else ""
            after = "the program was closed" if epoch.closed else f"call {epoch.number}{of}"
            raise CallError("stale-view", f"output {self.name!r} of call {self.call}{of} was read after {after}")
        return self._value

    def clone(self) -> Any:
        """A copy of the caller's kind that no later call touches."""
        return self._library.copy(self.tensor)

    def part(self, slices: tuple[slice, ...]) -> View:
        """A view of a part of this one, good as long as this is.  Raises stale-view."""
        return View(self._spec, self.tensor[slices], self._library, self._epoch, self.call)

    def __getitem__(self, index: Any) -> Any:
        """A part of the tensor, as its library gives it.  Raises stale-view."""
        return self.tensor[index]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"output {self.name!r} has no axes")
        return int(self.shape[0])

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
