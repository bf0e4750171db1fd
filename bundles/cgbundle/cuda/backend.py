"""What a loaded program needs of a CUDA device: replays on tensors of the GPU, or of the CPU by way of the GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager

from ..schema import Manifest
from .device import CudaBackend


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
    """The programs of a cuda bundle on GPU number `device`, ready to be replayed.  Raises as `CudaBackend` does."""

    def __init__(self, folder: str, manifest: Manifest, device: int, mode: str) -> None:
        self.device: int | None = device
        self._backend = CudaBackend(folder, manifest, device, mode)
        try:
            self._backend.prepare()
        except BaseException:
            self._backend.close()
            raise
        self._sizes = [self._backend.sizes(index) for index in range(len(manifest.programs))]
        self._results = [DeviceOutputs(self._backend.output_addresses(index), device) for index in range(len(manifest.programs))]

    def turn(self, stream: int | None) -> AbstractContextManager[object]:
        """Holds the program's memory for one call, whose work goes to `stream` (None: the backend's own)."""
        return self._backend.turn(stream)

    def run(self, program: int, addresses: Sequence[int], device: int | None, stream: int | None) -> DeviceOutputs | HostOutputs:
        """Replays; inputs of the CPU (device None) are copied to the GPU, the outputs back, and the copies waited for."""
        inputs, outputs = self._sizes[program]
        on_device = device is not None
        given = [(at, on_device, size) for at, size in zip(addresses, inputs, strict=True)]
        with self._backend.turn(stream) as handle:
            made = self._backend.replay(program, given, handle)
            if on_device:
                return self._results[program]
            results = HostOutputs(outputs)
            for target, source, size in zip(results.addresses, made, outputs, strict=True):
                self._backend.copy(target, source, size, stream, target_on_device=False)
            self._backend.synchronize(stream)
        return results

    def close(self) -> None:
        """Gives every byte back.  No replay may be running."""
        self._backend.close()
