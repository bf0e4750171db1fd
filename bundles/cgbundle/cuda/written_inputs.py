"""Calls of a bundle whose model writes to some of its inputs: the recordings change static buffers, and what they leave there is
copied back to the caller's memory in the order of the stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..format.schema import Manifest
from . import driver
from .backend import CudaCalls, DeviceOutputs, HostOutputs
from .device import CudaBackend
from .memory import copy


class WritingCalls(CudaCalls):
    """`CudaCalls` that leave in the caller's memory what the model wrote to the inputs that `manifest.written` lists."""

    def _attach(self, backend: CudaBackend, manifest: Manifest, device: int, *, lazy: bool) -> None:
        super()._attach(backend, manifest, device, lazy=lazy)
        self._written: list[list[tuple[int, int, int]]] = []
        for number in range(len(manifest.programs)):
            places, (sizes, _) = backend.input_addresses(number), backend.sizes(number)
            self._written.append([(index, places[index], sizes[index]) for index in manifest.written])

    def run(self, program: int, addresses: Sequence[int], device: int | None, turn: Any) -> DeviceOutputs | HostOutputs:
        """Replays, and copies the written inputs back; memory of the CPU (device None) holds them when this returns, the GPU's in
        the order of the stream.  A caller's tensor that is the static buffer itself is up to date already."""
        results = super().run(program, addresses, device, turn)
        for index, place, size in self._written[program]:
            if addresses[index] != place:
                copy(addresses[index], place, size, turn, target_on_device=device is not None)
        if device is None:
            driver.check("cuStreamSynchronize", driver.cu.cuStreamSynchronize(turn))
        return results
