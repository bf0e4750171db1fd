"""What a loaded program needs of a CUDA device: replays on tensors of the GPU, or of the CPU by way of the GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from ..schema import Manifest
from . import driver
from .device import CudaBackend
from .memory import copy
from .turn import Turn


class DeviceOutputs:
    """Outputs in the program's own GPU memory, the same after every replay."""

    static = True

    def __init__(self, addresses: Sequence[int], device: int) -> None:
        self.addresses = addresses
        self.device: int | None = device


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
        self.device: int | None = device
        self._backend = CudaBackend(folder, manifest, device, mode, context=context, poison=poison)
        try:
            self._backend.prepare(() if lazy else None)
        except BaseException:
            self._backend.close()
            raise
        self.turn: Callable[[int | None], Turn] = self._backend.turn
        """Holds the program's memory for one call, whose work goes to a stream (None: the backend's own)."""
        self._sizes = [self._backend.sizes(index) for index in range(len(manifest.programs))]
        self._results = [DeviceOutputs(self._backend.output_addresses(index), device) for index in range(len(manifest.programs))]

    def run(self, program: int, addresses: Sequence[int], device: int | None, turn: Any) -> DeviceOutputs | HostOutputs:
        """Replays; inputs of the CPU (device None) are copied to the GPU, the outputs back, and the copies waited for."""
        if device is not None:
            self._backend.replay_on_device(program, addresses, turn)
            return self._results[program]
        inputs, outputs = self._sizes[program]
        given = [(at, False, size) for at, size in zip(addresses, inputs, strict=True)]
        made = self._backend.replay(program, given, turn)
        results = HostOutputs(outputs)
        for target, source, size in zip(results.addresses, made, outputs, strict=True):
            copy(target, source, size, turn, target_on_device=False)
        driver.check("cuStreamSynchronize", driver.cu.cuStreamSynchronize(turn))
        return results

    def poison(self, byte: int) -> None:
        """Overwrites the arena and memory `host`: a sound replay reads nothing there that it has not written itself."""
        self._backend.poison(byte)

    def close(self) -> None:
        """Waits for a running replay, then gives every byte back."""
        self._backend.close()
