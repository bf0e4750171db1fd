"""The clock, inputs and first call of a serving process. Times count from the moment its parent started it.

This module imports only what every Python process has loaded already. Otherwise the import time of cgbundle would be hidden.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False  # see cgbundle/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SPAWNED = "CGCOMPILE_BENCH_SPAWNED"
"""Environment variable: start time of this process on the monotonic clock, which all processes share."""


def now() -> float:
    """Returns the seconds on the clock that parent and child share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Laps:
    """Seconds of each named interval since the start of the process, in order."""

    def __init__(self) -> None:
        self.started = self.last = float(os.environ[SPAWNED])
        self.seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Ends the interval `name` now."""
        moment = now()
        self.seconds[name] = self.seconds.get(name, 0.0) + moment - self.last
        self.last = moment

    @property
    def total(self) -> float:
        """Returns the seconds from the start of the process to the last mark."""
        return self.last - self.started


def parse_inputs(texts: list[str]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Returns (file, dtype, shape) of each input, from texts such as `file:int64:1x64`."""
    specs = []
    for text in texts:
        file, dtype, shape = text.rsplit(":", 2)
        specs.append((file, dtype, tuple([int(size) for size in shape.split("x")])))
    return specs


def numpy_inputs(texts: list[str]) -> list[Any]:
    import numpy

    return [numpy.fromfile(file, dtype).reshape(shape) for file, dtype, shape in parse_inputs(texts)]


def plain_inputs(texts: list[str]) -> list[Any]:
    """Returns the inputs as cgbundle's tensors, for a server without NumPy."""
    import ctypes

    import cgbundle

    tensors = []
    for path, dtype, shape in parse_inputs(texts):
        with open(path, "rb") as file:
            data = file.read()
        memory = (ctypes.c_char * len(data)).from_buffer_copy(data)
        tensors.append(cgbundle.Tensor(ctypes.addressof(memory), dtype, shape, None, memory))
    return tensors


def serve(bundle: str, inputs: list[str], make: Callable[[list[str]], list[Any]], laps: Laps) -> Any:
    """Runs a server up to its first output."""
    import cgbundle

    laps.mark("import cgbundle")
    program = cgbundle.load(bundle)
    laps.mark("load")
    values = make(inputs)
    laps.mark("inputs")
    output = program(*values)
    laps.mark("first call")
    return output


def write(path: str, output: Any) -> None:
    """Writes the output's elements to a file; the parent compares them."""
    with open(path, "wb") as file:
        file.write(output.tobytes())


def foreign(before: set[str]) -> list[str]:
    """Returns the packages imported since `before` that are neither in the standard library nor cgbundle."""
    packages = {name.partition(".")[0] for name in set(sys.modules) - before}
    return sorted(packages - sys.stdlib_module_names - {"cgbundle", "serving", "watched"})
