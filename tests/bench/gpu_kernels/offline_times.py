"""Child process: `offline_times.py TRACED CAPTURED...` compares the GPU time of a cross-compiled bundle with captured bundles of
the same model, for every int_key, Prints JSON.

Rounds of all bundles alternate, so that they run at the same clock frequency. Inputs are those of the self-test.
"""

from __future__ import annotations

import json
import statistics
import sys

from cuda.bindings import driver as cu

from cgbundle import self_test
from cgbundle.cuda.driver import check
from cgbundle.format import archive, file_names
from cgbundle.format.safetensors_files import Mapped
from cgbundle.format.schema import EntrySpec
from cgbundle.gpu.backend import CudaBackend

ROUNDS, REPLAYS = 15, 40


def main(paths: list[str]) -> None:
    """Prints [{"key", "microseconds": [of each bundle], "spread"}]."""
    entries = [archive.read_manifest(path).entries[0] for path in paths]
    backends = [CudaBackend(archive.Archive(path)) for path in paths]
    rows = []
    for program in entries[0].programs:
        numbers = [[program.key for program in entry.programs].index(program.key) for entry in entries]
        for path, entry, backend, number in zip(paths, entries, backends, numbers, strict=True):
            fill(path, entry, backend, program.key, number)
        times: list[list[float]] = [[] for _ in paths]
        for _ in range(ROUNDS):
            for index, (backend, number) in enumerate(zip(backends, numbers, strict=True)):
                times[index].append(microseconds(backend, number))
        rows.append(
            {
                "key": list(program.key),
                "microseconds": [statistics.median(time) for time in times],
                "spread": [[min(time), max(time)] for time in times],
            }
        )
    print(json.dumps(rows))


def fill(path: str, entry: EntrySpec, backend: CudaBackend, key: tuple[int, ...], number: int) -> None:
    """Copies the self-test's inputs to the static buffers."""
    stored = Mapped(f"{path}/{file_names.SELF_TEST}", file_names.SELF_TEST)
    tensors = self_test.inputs_of(stored, entry, key)
    with backend.locked(None) as stream:
        backend.run(number, [tensor.address for tensor in tensors], None, stream)
    stored.close()


def microseconds(backend: CudaBackend, number: int) -> float:
    """Returns microseconds per replay, over one round."""
    addresses, _ = backend.buffers(number)
    with backend.locked(None) as stream:
        start, end = (check("cuEventCreate", cu.cuEventCreate(0)) for _ in range(2))
        backend.run(number, addresses, backend.device, stream)
        check("cuEventRecord", cu.cuEventRecord(start, stream))
        for _ in range(REPLAYS):
            backend.run(number, addresses, backend.device, stream)
        check("cuEventRecord", cu.cuEventRecord(end, stream))
        check("cuEventSynchronize", cu.cuEventSynchronize(end))
        return float(check("cuEventElapsedTime", cu.cuEventElapsedTime(start, end))) * 1000 / REPLAYS


if __name__ == "__main__":
    main(sys.argv[1:])
