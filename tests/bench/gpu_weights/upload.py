"""Measures how fast weights reach the GPU, by several methods and settings: `tests/bench/gpu_weights/upload.py [MB]`.

Prints milliseconds from an idle context to the last byte on the GPU, including pinning. The file is in the page cache; medians of
three.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

from cuda.bindings import driver as bindings

from cgbundle.cuda.driver import Context, check, cu
from cgbundle.cuda.memory import Piece, allocate
from cgbundle.cuda.upload import Upload, Way
from cgbundle.format.safetensors_files import _address


def pageable(path: str, size: int, base: int) -> None:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = memoryview(mapped)
        check("cuMemcpyHtoD", cu.cuMemcpyHtoD(base, _address(view), size))
        view.release()


def pinned_once(path: str, size: int, base: int) -> None:
    address = int(check("cuMemHostAlloc", cu.cuMemHostAlloc(size, 0)))
    with open(path, "rb") as file:
        file.readinto(memoryview((ctypes.c_char * size).from_address(address)).cast("B"))
    check("cuMemcpyHtoD", cu.cuMemcpyHtoD(base, address, size))
    check("cuMemFreeHost", cu.cuMemFreeHost(address))


def registered(path: str, size: int, base: int) -> None:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = memoryview(mapped)
        address = _address(view)
        try:
            check("cuMemHostRegister", bindings.cuMemHostRegister(address, size, 8))
            check("cuMemcpyHtoD", cu.cuMemcpyHtoD(base, address, size))
            check("cuMemHostUnregister", bindings.cuMemHostUnregister(address))
        finally:
            view.release()


def measure(name: str, variant: Callable[[], None]) -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        try:
            variant()
        except Exception as error:  # noqa: BLE001 - a method that fails on this machine is a result too
            print(f"{name:40} {error}")
            return
        times.append(1e3 * (time.perf_counter() - start))
    print(f"{name:40} {statistics.median(times):7.1f} ms   ({', '.join(f'{t:.1f}' for t in times)})", flush=True)


def main() -> None:
    size = int(sys.argv[1] if len(sys.argv) > 1 else 330) << 20
    context = Context(0)
    with tempfile.NamedTemporaryFile() as file, context:
        block = os.urandom(1 << 20)
        for _ in range(size >> 20):
            file.write(block)
        file.flush()
        base = allocate(size, "weights")
        for megabytes in (2, 8, 16):
            start = time.perf_counter()
            address = check("cuMemHostAlloc", cu.cuMemHostAlloc(megabytes << 20, 0))
            print(f"pinning {megabytes} MB: {1e3 * (time.perf_counter() - start):.2f} ms")
            check("cuMemFreeHost", cu.cuMemFreeHost(address))
        measure("pageable, mapped", lambda: pageable(file.name, size, base))
        measure("all of it pinned", lambda: pinned_once(file.name, size, base))
        measure("mapped file registered", lambda: registered(file.name, size, base))
        for threads in (1, 2, 4, 6, 8):
            for chunk in (1, 2, 4):
                listed = [Piece(0, size, 0)]
                measure(
                    f"{threads} readers, slots of {chunk} MB",
                    lambda t=threads, c=chunk, p=listed: Upload(
                        context, file.fileno(), p, base, Way(t, 2 * t, True, c << 20)
                    ).wait(),  # type: ignore[misc]
                )
        for lanes in (4, 8, 12, 16):
            listed = [Piece(0, size, 0)]
            measure(
                f"{lanes} lanes of the C library",
                lambda n=lanes, p=listed: Upload(context, file.fileno(), p, base, Way(8, 16, True, lanes=n)).wait(),  # type: ignore[misc]
            )


if __name__ == "__main__":
    main()
