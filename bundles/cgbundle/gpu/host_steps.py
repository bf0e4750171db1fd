"""Host steps: regions that the CPU computes between steps of the GPU. They read and write memory `host`, one pinned buffer; copy
steps move values. The calling thread first waits for the stream: then inputs have arrived, and no copy still reads what is
overwritten."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from ..cpu import libtorch
from ..cpu.host_region import Found, HostRegion, RegionOutputs, check_layout, layout_of, open_region
from ..cpu.host_weights import HostWeights
from ..cuda.driver import check, cu
from ..cuda.memory import Memories
from ..format.archive import Archive
from ..format.schema import Program, Step, Value
from ..format.shapes import span


class _Place(NamedTuple):
    """The place of an output, its bytes, and its required layout (as of `LibTorch.layout`)."""

    address: int
    bytes: int
    layout: Found
    value: Value


class HostSteps:
    """The host regions of a bundle, loaded on first use, with constants in place in `weights` (None without constants). Raises
    library-missing, library-refused."""

    def __init__(self, bundle: Archive, weights: HostWeights | None, memories: Memories, threads: int | None = None) -> None:
        self._bundle, self._manifest, self._weights, self._memories = bundle, bundle.manifest, weights, memories
        self._torch = libtorch.load(bundle.manifest.target.torch, threads)
        self._regions: dict[int, HostRegion] = {}

    def step(self, program: Program, step: Step) -> Callable[[Any], None]:
        """A host step as a function of the stream, complete on return. Raises library-refused, weights-invalid. The step raises as
        `HostRegion.run`, library-refused for a tensor with another layout than the manifest's, driver-failed."""
        where, torch = self._manifest.regions[step.region].file, self._torch
        region = self._region(step.region)
        region.check_counts(len(step.inputs), len(step.outputs))
        regions, number = self._regions, step.region
        inputs = [program.values[index] for index in step.inputs]
        addresses = [self._memories.address(value.memory, value.offset) for value in inputs]
        layouts = [layout_of(value, torch) for value in inputs]
        places = [self._place(program.values[index]) for index in step.outputs]

        def call(stream: Any) -> None:
            error = cu.cuStreamSynchronize(stream)
            if error:
                check("cuStreamSynchronize", error, f"before {where}")
            results = RegionOutputs(torch, len(places))
            try:
                regions[number].run(addresses, layouts, results.handles)
                for handle, place in zip(results.handles, places, strict=True):
                    _take(torch, handle or 0, place, where)
            finally:
                del results  # a traceback would keep them

        return call

    def over(self, weights: HostWeights) -> dict[int, HostRegion]:
        """New instances of the loaded regions over other weights."""
        opened: dict[int, HostRegion] = {}
        try:
            for index in self._regions:
                opened[index] = self._opened(index, weights)
        except BaseException:
            for region in opened.values():
                region.close()
            raise
        return opened

    def take(self, regions: dict[int, HostRegion], weights: HostWeights) -> None:
        """Replaces the regions by those of `over`, and closes the old ones, while no step runs."""
        before = list(self._regions.values())
        self._regions.update(regions)
        self._weights = weights
        for region in before:
            region.close()

    def close(self) -> None:
        with ExitStack() as closing:
            for region in self._regions.values():
                closing.callback(region.close)
            self._regions.clear()
            self._weights = None

    def _place(self, value: Value) -> _Place:
        address = self._memories.address(value.memory, value.offset)
        return _Place(address, span(value), (self._torch.dtype(value.dtype), value.shape, value.strides), value)

    def _region(self, index: int) -> HostRegion:
        region = self._regions.get(index)
        if region is None:
            region = self._regions[index] = self._opened(index, self._weights)
        return region

    def _opened(self, index: int, weights: HostWeights | None) -> HostRegion:
        row = self._manifest.regions[index]
        return open_region(self._bundle, row, self._manifest.weights, weights, self._torch)


def _take(torch: libtorch.LibTorch, handle: int, place: _Place, where: str) -> None:
    layout = torch.layout(handle)
    if layout != place.layout:
        check_layout(layout, place.layout[0], place.value, f"{where}: an output")
    if place.bytes:
        source = ctypes.c_void_p()
        torch.data_pointer(handle, ctypes.byref(source))
        ctypes.memmove(place.address, source.value or 0, place.bytes)
