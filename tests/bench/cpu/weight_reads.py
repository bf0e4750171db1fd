"""Measures how fast weights outside the page cache are read: `tests/bench/cpu/weight_reads.py FILE [GB]`.

Prints GB/s of the runtime's reader, called as in an upload but without a GPU, beside `dd`. The readers alternate, and the file's
pages are dropped before each. Also prints how much of the file the page cache holds afterwards.
"""

from __future__ import annotations

import itertools
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from cgbundle.cuda import upload as weight_reads
from cgbundle.cuda.memory import Piece, place
from cgbundle.cuda.upload import AHEAD, Way, WeightReader, chunks, way

ROUNDS = 4


def main(path: str, gigabytes: str = "1") -> None:
    file = os.open(path, os.O_RDONLY)
    size = min(os.fstat(file).st_size, int(float(gigabytes) * 1e9))
    readers: dict[str, Callable[[], None]] = {
        "dd bs=4M iflag=direct": lambda: dd(path, size, "iflag=direct"),
        "dd bs=4M": lambda: dd(path, size),
        "the runtime": lambda: read(file, size, around=False),
        "the runtime, a file larger than half of the memory": lambda: read(file, size, around=True),
    }
    throughputs: dict[str, list[float]] = {name: [] for name in readers}
    cached = {}
    for _ in range(ROUNDS):
        for name, once in readers.items():
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            begun = time.perf_counter()
            once()
            throughputs[name].append(size / (time.perf_counter() - begun) / 1e9)
            cached[name] = weight_reads.is_cached(file)
    for name, rates in throughputs.items():
        kept = "stays in the page cache" if cached[name] else ""
        print(f"{name:52} {'  '.join(f'{rate:5.2f}' for rate in rates)} GB/s  {kept}")


def read(file: int, size: int, *, around: bool) -> None:
    """Reads the file as `Upload` does; with `around`, without the page cache, as a file larger than half of the memory."""
    settings: Way = way(size)
    groups = chunks([Piece(0, size, 0)], settings.chunk)
    if around:
        small, os.sysconf = os.sysconf, lambda name: 1
    try:
        reader = WeightReader(file, aligned=True)
    finally:
        if around:
            os.sysconf = small
    numbers, ahead, announced = itertools.count(), -(-AHEAD // settings.chunk), [0]

    def work() -> None:
        view = memoryview(mmap.mmap(-1, settings.chunk))
        while (index := next(numbers)) < len(groups):
            if reader.cold:
                begin, announced[0] = max(announced[0], index), index + ahead
                reader.announce([place(group) for group in groups[begin : index + ahead]])
            reader.read(view, *place(groups[index]))

    threads = [threading.Thread(target=work) for _ in range(settings.readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader.close()


def dd(path: str, size: int, *options: str) -> None:
    """Reads the same bytes with dd, to /dev/null."""
    line = ["dd", f"if={path}", "of=/dev/null", "bs=4M", f"count={-(-size >> 22)}", *options]
    subprocess.run(line, check=True, capture_output=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
