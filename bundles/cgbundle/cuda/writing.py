"""Calls of a bundle whose model writes to some of its inputs: the recordings change static buffers, and what they leave there is
copied back to the caller's memory in the order of the stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..schema import Manifest
from . import driver
from .backend import CudaCalls, DeviceOutputs, HostOutputs
from .driver import Context
from .memory import copy


class WritingCalls(CudaCalls):
    """`CudaCalls` that leave in the caller's memory what the model wrote to the inputs that `manifest.written` lists."""

    def __init__(
        self,
        folder: str,
        manifest: Manifest,
        device: int,
        mode: str,
        context: Context | None = None,
        poison: int | None = None,
        lazy: bool = False,
    ) -> None:
        super().__init__(folder, manifest, device, mode, context, poison, lazy)
        self._written: list[list[tuple[int, int, int]]] = []
        for number in range(len(manifest.programs)):
            places, (sizes, _) = self._backend.input_addresses(number), self._backend.sizes(number)
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
