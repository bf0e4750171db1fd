"""State that a model keeps from call to call: buffers by name, and the state of the random numbers, which `seed` sets."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from struct import pack
from typing import TYPE_CHECKING, Any

from ..call.locks import during
from ..errors import CallError, StateMissing, did_you_mean
from ..format.schema import STATE, Manifest, Weight
from ..format.shapes import is_dense, memory_order
from ..tensors.library import caller_captures, library_of
from ..tensors.tensor import Tensor, from_bytes

if TYPE_CHECKING:
    from ..call.backend import Backend

SEEDS = 1 << 63  # seeds are smaller, so that int64 holds them


class State(Mapping[str, Tensor]):
    """The state of one session, by the names of the model's buffers; empty for a model that changes none.

    `state[name]` is a copy in CPU memory, `state[name] = value` writes, both in order with the session's calls.  A value is a NumPy
    array, a torch tensor on the CPU or the program's GPU, a `Tensor`, or another tensor with DLPack.  Raises ProgramClosed,
    SessionBusy, and StateMissing, which is a KeyError.

    `rows`: the numbers of rows that `load` chose, by the names of the dimensions: {"pages": 4096}.
    """

    def __init__(self, manifest: Manifest, backend: Backend) -> None:
        weights, self._random = manifest.weights, manifest.random
        self._backend, self._weights, self._program = backend, weights, manifest.name
        hidden = {manifest.random, *[dimension.count for dimension in manifest.state_dimensions]}
        rows = [(row.name, index) for index, row in enumerate(weights) if row.memory == STATE and index not in hidden]
        self._places = dict(rows)
        self.rows = {dimension.name: weights[dimension.weights[0]].shape[0] for dimension in manifest.state_dimensions}

    def __getitem__(self, name: str) -> Tensor:
        """A copy in host memory, after the earlier calls are done.  Raises state-missing, capture-refused."""
        index, weight = self._row(name)
        raw = self.fetch(index)
        memory = from_bytes(raw, "uint8", (len(raw),))
        return Tensor(memory.address, weight.dtype, weight.shape, weight.strides, memory)

    def __setitem__(self, name: str, value: Any) -> None:
        """Raises state-invalid for another dtype or shape, or a tensor of another device."""
        index, weight = self._row(name)
        library, backend, problem = library_of(value), self._backend, ""
        try:
            value, (address, shape, dtype, strides, device) = library.take(value, name)
        except CallError as error:
            raise CallError("state-invalid", str(error).replace("input", "state", 1)) from None
        if dtype != weight.dtype:
            problem = f"expected {weight.dtype}, got {dtype}"
        elif tuple(shape) != weight.shape:
            problem = f"expected shape {list(weight.shape)}, got {list(shape)}"
        elif device is not None and device != backend.device:
            here = "the CPU" if backend.device is None else f"the CPU or CUDA device {backend.device}"
            problem = f"expected a tensor on {here}, got one on device {device}"
        if problem:
            raise CallError("state-invalid", f"state {name!r}: {problem}")
        order = memory_order(weight.shape, weight.strides)
        if not is_dense(shape, library.strides(value) if strides is None else strides, order):
            value = library.ordered(value, order)
            address = library.describe(value)[0]
        if device is None:
            self._refuse_capture()
        caller = None if device is None else library.stream(device)
        during(backend, caller, lambda stream: backend.store(index, address, device, stream))

    def view(self, name: str) -> Tensor:
        """The state itself, without a copy: the next call reads what is written to this tensor.  On a GPU the caller has to order
        its accesses with the calls, and must not use the tensor after the session is closed."""
        index, weight = self._row(name)
        backend = self._backend
        with backend.turn:  # raises if the session was closed
            return Tensor(backend.address(index), weight.dtype, weight.shape, weight.strides, backend.owner, backend.device)

    def fetch(self, weight: int) -> bytes:
        """The bytes of weight number `weight` of the manifest, in memory order, after the earlier calls."""
        self._refuse_capture()
        return during(self._backend, None, lambda stream: self._backend.fetch(weight, stream))

    def reset(self) -> None:
        """Resets all state except the random numbers to its initial values, in order with the calls."""
        self._refuse_capture()
        during(self._backend, None, self._backend.reset)

    def seed(self, number: int) -> None:
        """Seeds the random numbers, as `Program.seed`."""
        if self._random is None:
            raise StateMissing("state-missing", f"program {self._program!r} has no seed: its model draws no random numbers")
        if not 0 <= number < SEEDS:
            raise ValueError(f"seed {number}: expected an integer from 0 to 2**63 - 1")
        self._refuse_capture()
        place, memory = self._random, ctypes.create_string_buffer(pack("<qq", number, 0), 16)
        during(self._backend, None, lambda stream: self._backend.store(place, ctypes.addressof(memory), None, stream))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        rows = [self._weights[index] for index in self._places.values()]
        return f"<cgbundle state: {', '.join(f'{row.name} {row.dtype} {list(row.shape)}' for row in rows) or 'none'}>"

    def _row(self, name: str) -> tuple[int, Weight]:
        index = self._places.get(name)
        if index is None:
            known = ", ".join(map(repr, self._places))
            text = f"no state {name!r}{did_you_mean(name, self._places)}: {f'it has {known}' if known else 'its model keeps none'}"
            raise StateMissing("state-missing", f"program {self._program!r} has {text}")
        return index, self._weights[index]

    def _refuse_capture(self) -> None:
        """Raises capture-refused while the caller captures a graph: the CPU's work cannot be in it."""
        if self._backend.device is not None and caller_captures():
            text = "state cannot be read, written from the CPU, reset or seeded while a CUDA graph is captured"
            raise CallError("capture-refused", text, "do it before or after the capture")
