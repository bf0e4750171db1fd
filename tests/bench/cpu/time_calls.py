"""Child process: `time_calls.py BUNDLE INPUT` compares calls of a bundle (one input, one output) with the run of its shared object.

The shared object runs through its C interface with input handles that were created before. Its runs alternate with
whole calls, so that both see the same load.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from ctypes import byref, c_int32, c_int64, c_void_p
from typing import Any

from tests.bench.common import serving
from tests.bench.cpu import library_times

ROUNDS = 20
CALLS = 200
WARM = 200
CREATE = "aoti_torch_create_tensor_from_blob"


class Bare:
    """The run of the shared object alone."""

    def __init__(self, watch: library_times.Watch, value: Any) -> None:
        (stopwatch,) = watch.stopwatches
        self.run, self.container = stopwatch.function, stopwatch.arguments[0]
        self.torch = next(handle for handle in watch.handles.values() if hasattr(handle, CREATE))  # libtorch, or the model itself
        self.value = value
        self.shape = (c_int64 * value.ndim)(*value.shape)
        self.strides = (c_int64 * value.ndim)(*[stride // value.itemsize for stride in value.strides])
        self.dtype = c_int32(self.torch[f"aoti_torch_dtype_{value.dtype.name}"]())

    def handle(self) -> Any:
        """Returns an array with one input handle; a run consumes the handle."""
        pointer = c_void_p()
        create = self.torch[CREATE]
        address = c_void_p(self.value.ctypes.data)
        sizes = (c_int64(self.value.ndim), self.shape, self.strides, c_int64(0))
        if create(address, *sizes, self.dtype, c_int32(0), c_int32(0), byref(pointer)):
            raise SystemExit("torch refused the input tensor")
        return (c_void_p * 1)(pointer.value)

    def time(self, calls: int) -> list[int]:
        """Returns the nanoseconds of each of `calls` runs."""
        handles = [self.handle() for _ in range(calls)]
        outputs = (c_void_p * 1)()
        delete = self.torch["aoti_torch_delete_tensor_object"]
        run, container, clock = self.run, self.container, time.perf_counter_ns
        nanoseconds = []
        for handle in handles:
            start = clock()
            run(container, handle, 1, outputs, 1, None, None)
            nanoseconds.append(clock() - start)
            delete(c_void_p(outputs[0]))
        return nanoseconds


def time_program(program: Any, value: Any, calls: int) -> list[int]:
    """Returns the nanoseconds of each of `calls` whole calls, without freeing the result."""
    clock = time.perf_counter_ns
    nanoseconds = []
    for _ in range(calls):
        start = clock()
        result = program(value)
        nanoseconds.append(clock() - start)
        del result
    return nanoseconds


def main(bundle: str, text: str) -> None:
    """Prints microseconds per call, medians and quartiles, as JSON."""
    (value,) = serving.numpy_inputs([text])
    watch = library_times.watch()
    import cgbundle

    # this program only provides the run function and the model container, which stay valid while it is open
    opened = cgbundle.load(bundle)
    opened(value)
    watch.stop()
    bare = Bare(watch, value)
    copy, view = cgbundle.load(bundle), cgbundle.load(bundle, outputs="view")
    variants: dict[str, Callable[[int], list[int]]] = {
        "bare": bare.time,
        "copy": lambda calls: time_program(copy, value, calls),
        "view": lambda calls: time_program(view, value, calls),
    }
    seconds: dict[str, list[int]] = {name: [] for name in variants}
    for variant in variants.values():
        variant(WARM)
    for _ in range(ROUNDS):
        for name, variant in variants.items():
            seconds[name] += variant(CALLS)
    quartiles = {name: [cut / 1000 for cut in statistics.quantiles(times, n=4)] for name, times in seconds.items()}
    print(json.dumps({"quartiles": quartiles, "calls": ROUNDS * CALLS}))
    opened.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
