"""Child process: `kernel_times.py BUNDLE` times every kernel of a bundle, in the order of the recording. Prints JSON: int_key ->
symbol -> microseconds.

A memset keeps the GPU busy until all launches are queued, with an event after each launch. So no launch waits for the CPU, and the
GPU's caches have the same contents as in a replay. An event between two kernels costs about a microsecond on the GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from itertools import pairwise
from typing import Any

from cuda.bindings import driver as cu

from cgbundle.cuda.driver import check
from cgbundle.format import archive
from cgbundle.format.archive import Archive
from cgbundle.format.table import KERNEL, Table
from cgbundle.gpu.backend import CudaBackend

ROUNDS = 9
FILLED = 4 << 30
"""Bytes that are filled three times before a round: about 5 ms on an H200."""


def main(bundle: str) -> None:
    """Prints {key: {"total": us, "kernels": [[symbol, launches, us], ...]}}."""
    entry = archive.read_manifest(bundle).entries[0]
    backend = CudaBackend(Archive(bundle), mode="stream")
    times = {}
    with backend.locked(None) as stream:
        room = check("cuMemAlloc", cu.cuMemAlloc(FILLED))
        for program in entry.programs:
            file = program.steps[0].file
            table = Table((archive_file(bundle, file)), file)
            times["x".join(map(str, program.key))] = timed(table, backend._executors[file, ()], stream, room)
        check("cuMemFree", cu.cuMemFree(room))
    backend.close()
    print(json.dumps(times))


def archive_file(bundle: str, file: str) -> bytes:
    with open(f"{bundle}/{file}", "rb") as opened:
        return opened.read()


def timed(table: Table, executor: Any, stream: Any, room: Any) -> dict[str, Any]:
    """Returns the sum of the median microseconds of all launches, in total and by symbol."""
    symbols = names(table)
    steps = executor._steps
    assert len(symbols) == len(steps)
    events = [check("cuEventCreate", cu.cuEventCreate(0)) for _ in range(len(steps) + 1)]
    rounds: list[list[float]] = []
    for _ in range(ROUNDS):
        for _ in range(3):
            check("cuMemsetD8Async", cu.cuMemsetD8Async(room, 1, FILLED, stream))
        check("cuEventRecord", cu.cuEventRecord(events[0], stream))
        for step, event in zip(steps, events[1:], strict=True):
            step(stream)
            check("cuEventRecord", cu.cuEventRecord(event, stream))
        check("cuStreamSynchronize", cu.cuStreamSynchronize(stream))
        rounds.append([1000 * check("elapsed", cu.cuEventElapsedTime(a, b)) for a, b in pairwise(events)])
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for index, symbol in enumerate(symbols):
        times[symbol] += statistics.median(durations[index] for durations in rounds)
        counts[symbol] += 1
    rows = sorted(times, key=lambda symbol: -times[symbol])
    return {"total": sum(times.values()), "kernels": [[symbol, counts[symbol], round(times[symbol], 2)] for symbol in rows]}


def names(table: Table) -> list[str]:
    """Returns the symbol of every launched row, or its kind."""
    labels, kernels = [], 0
    for kind in table.kind:
        if kind == KERNEL:
            labels.append(table.symbols[table.function[kernels]])
            kernels += 1
        else:
            labels.append("memset or memcpy")
    return labels


if __name__ == "__main__":
    main(sys.argv[1])
