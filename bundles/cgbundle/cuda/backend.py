"""What a loaded program needs of a CUDA device: replays on tensors of the GPU, or of the CPU by way of the GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Self

from ..errors import CallError
from ..format.schema import Manifest
from ..tensors.libraries import caller_captures
from . import driver
from .device import CudaBackend
from .memory import Output, copy
from .turn import Turn


class DeviceOutputs:
    """Outputs in the program's own GPU memory, the same after every replay; it owns the tensors over them."""

    static = True

    def __init__(self, addresses: Sequence[int], device: int, backend: CudaBackend) -> None:
        self.addresses = addresses
        self.device: int | None = device
        self._backend = backend

    def copy_out(self, address: int, size: int, stream: int) -> Output:
        """GPU memory of its own with the same bytes, in the order of a stream."""
        return self._backend.copy_out(address, size, stream)


class HostOutputs:
    """Outputs copied to memory of the CPU that lives as long as this object."""

    device: int | None = None
    static = False

    def __init__(self, sizes: Sequence[int]) -> None:
        self._memory = [(ctypes.c_char * max(1, size))() for size in sizes]
        self.addresses: Sequence[int] = [ctypes.addressof(memory) for memory in self._memory]


class CudaCalls:
    """The programs of a cuda bundle on GPU number `device`, ready to be replayed, or with `lazy` made ready one by one at their
    first call; `context` as for `CudaBackend`, which says what is raised."""

    def __init__(
        self,
        folder: str,
        manifest: Manifest,
        device: int,
        mode: str,
        context: driver.Context | None = None,
        poison: int | None = None,
        lazy: bool = False,
    ) -> None:
        self._attach(CudaBackend(folder, manifest, device, mode, context=context, poison=poison), manifest, device, lazy=lazy)

    def session(self) -> Self:
        """The same programs in a further session: see `CudaBackend.session`."""
        made = object.__new__(type(self))
        made._attach(self._backend.session(), self._manifest, self._device, lazy=self._lazy)
        return made

    def _attach(self, backend: CudaBackend, manifest: Manifest, device: int, *, lazy: bool) -> None:
        self._backend, self._manifest, self._device, self._lazy = backend, manifest, device, lazy
        self.device: int | None = device
        try:
            backend.prepare(() if lazy else None)
        except BaseException:
            backend.close()
            raise
        self.turn: Callable[[int | None], Turn] = backend.turn
        """Holds the program's memory for one call, whose work goes to a stream (None: the backend's own)."""
        self.place, self.fetch, self.store, self.reset = backend.place, backend.fetch, backend.store, backend.reset
        numbers = range(len(manifest.programs))
        self._sizes = [backend.sizes(index) for index in numbers]
        self._results = [DeviceOutputs(backend.output_addresses(index), device, backend) for index in numbers]

    def run(self, program: int, addresses: Sequence[int], device: int | None, turn: Any) -> DeviceOutputs | HostOutputs:
        """Replays; inputs of the CPU (device None) are copied to the GPU, the outputs back, and the copies waited for."""
        if device is not None:
            self._backend.replay_on_device(program, addresses, turn)
            return self._results[program]
        if caller_captures():
            raise CallError(
                "capture-refused",
                "inputs on the CPU cannot become part of the CUDA graph that is being captured",
                "pass tensors of the GPU",
            )
        inputs, outputs = self._sizes[program]
        given = [(at, False, size) for at, size in zip(addresses, inputs, strict=True)]
        made = self._backend.replay(program, given, turn)
        results = HostOutputs(outputs)
        for target, source, size in zip(results.addresses, made, outputs, strict=True):
            copy(target, source, size, turn, target_on_device=False)
        driver.check("cuStreamSynchronize", driver.cu.cuStreamSynchronize(turn))
        return results

    @property
    def owner(self) -> object:
        """Keeps nothing: memory of the GPU is given back when the session is closed."""
        return self._results[0] if self._results else None

    def buffers(self, program: int) -> tuple[list[int], object]:
        """The addresses of the program's static input buffers, and what owns tensors over them."""
        with self._backend.turn():  # which raises where this was closed
            return self._backend.input_addresses(program), self.owner

    def poison(self, byte: int) -> None:
        """Overwrites the arena and memory `host`: a sound replay reads nothing there that it has not written itself."""
        self._backend.poison(byte)

    def close(self) -> None:
        """Waits for a running replay, then gives every byte back."""
        self._backend.close()
