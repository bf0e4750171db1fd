"""Calls of the CUDA backend for tests and benchmarks, without a `Program`: inputs on the host or the GPU, outputs on the GPU."""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from cgbundle.cuda import driver, memory
from cgbundle.format.schema import KERNEL_CODE, Manifest
from cgbundle.format.shapes import span
from cgbundle.gpu.backend import CudaBackend
from tests.helpers.bundles.archives import ArchiveOf

Given = tuple[int, bool, int]
"""Location of an input: address, whether it is on the GPU, size in bytes."""

GRANULARITY = 2 << 20
"""Granularity of the driver's memory allocation, in bytes."""


def opened(manifest: Manifest, folder: str | os.PathLike[str], device: int = 0, mode: str = "graph", **options: Any) -> CudaBackend:
    """Opens the bundle in `folder` on a GPU. Graphs are built at once, because tests count driver calls."""
    return CudaBackend(ArchiveOf(folder, manifest), device, mode, **{"lazy": False, **options})


def run(backend: CudaBackend, program: int, inputs: Sequence[Given | None], stream: int | None = None) -> list[int]:
    """Replays a program in stream order and returns the addresses of the outputs. An input of None leaves its buffer unchanged."""
    with backend.locked(stream) as handle:
        return replay(backend, program, inputs, handle)


def replay(backend: CudaBackend, program: int, inputs: Sequence[Given | None], handle: Any) -> list[int]:
    """Does what `run` does, for a caller that has entered `backend.locked`, which returned `handle`."""
    places = static_buffers(backend, program)
    addresses = []
    for source, (target, size) in zip(inputs, places, strict=True):
        if source is not None and not source[1]:
            memory.copy(target, source[0], size, handle, source_on_device=False)
        addresses.append(source[0] if source is not None and source[1] else target)
    return list(backend.run(program, addresses, backend.device, handle).addresses)


def static_buffers(backend: CudaBackend, program: int) -> list[tuple[int, int]]:
    """Returns (address, bytes) of the static buffer of each input."""
    row = backend._manifest.entries[0].programs[program]
    values = [row.values[index] for index in row.inputs]
    return [(backend._memories.address(value.memory, value.offset), span(value)) for value in values]


def call(backend: CudaBackend, program: int, values: array[float], stream: int | None = None) -> array[float]:
    """Replays a program with one input and one output of equal size, copied from and to the host."""
    start, count = values.buffer_info()
    (output,) = run(backend, program, [(start, False, 4 * count)], stream)
    result = array("f", bytes(4 * count))
    to_host(backend, result.buffer_info()[0], output, 4 * count, stream)
    return result


def to_host(backend: CudaBackend, target: int, source: int, size: int, stream: int | None = None) -> None:
    """Copies GPU memory to the host address `target` and waits for the copy."""
    with backend.locked(stream) as handle:
        memory.copy(target, source, size, handle, target_on_device=False)
        driver.check("cuStreamSynchronize", driver.cu.cuStreamSynchronize(handle))


def synchronize(backend: CudaBackend, stream: int | None = None) -> None:
    """Waits for all work on the stream."""
    with backend.locked(stream) as handle:
        driver.check("cuStreamSynchronize", driver.cu.cuStreamSynchronize(handle))


def allocate(backend: CudaBackend, size: int, stream: int | None = None) -> memory.Output:
    """Allocates GPU memory that outlives the backend, in stream order."""
    with backend.locked(stream) as handle:
        return memory.Output(backend._context, size, handle)


def planned(sizes: Mapping[str, int]) -> int:
    """Returns the bytes of GPU memory that the driver allocates for memories of these sizes."""
    on_gpu = [size for name, size in sizes.items() if name not in (memory.HOST, KERNEL_CODE)]
    return sum(-(-max(size, memory.SMALLEST) // GRANULARITY) * GRANULARITY for size in on_gpu)
