"""A serving process, timed from the moment its parent started it: the clock, the inputs, and the report.

Imports nothing but what every Python has loaded already: what cgbundle needs must be paid for, and seen, when cgbundle asks for it.
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
"""Environment variable: when the parent started this process, on the monotonic clock, which is the same in all processes."""


def now() -> float:
    """Seconds on the clock that parent and child share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Laps:
    """Seconds of each named stretch since the process was started, in order."""

    def __init__(self) -> None:
        self.started = self.last = float(os.environ[SPAWNED])
        self.seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Ends the stretch `name` now."""
        moment = now()
        self.seconds[name] = self.seconds.get(name, 0.0) + moment - self.last
        self.last = moment

    @property
    def total(self) -> float:
        """Seconds from the start of the process to the last mark."""
        return self.last - self.started


def parse_inputs(texts: list[str]) -> list[tuple[str, str, tuple[int, ...]]]:
    """(file, dtype, shape) of each input, from `file:int64:1x64`."""
    specs = []
    for text in texts:
        file, dtype, shape = text.rsplit(":", 2)
        specs.append((file, dtype, tuple([int(size) for size in shape.split("x")])))
    return specs


def numpy_inputs(texts: list[str]) -> list[Any]:
    """The inputs as NumPy arrays."""
    import numpy

    return [numpy.fromfile(file, dtype).reshape(shape) for file, dtype, shape in parse_inputs(texts)]


def plain_inputs(texts: list[str]) -> list[Any]:
    """The inputs as cgbundle's own tensors, for a server without NumPy."""
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
    """The whole of a server up to its first output."""
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
    """The output's elements, for the parent to compare."""
    with open(path, "wb") as file:
        file.write(output.tobytes())


def foreign(before: set[str]) -> list[str]:
    """Packages imported since `before` that are neither the standard library's nor cgbundle."""
    packages = {name.partition(".")[0] for name in set(sys.modules) - before}
    return sorted(packages - sys.stdlib_module_names - {"cgbundle", "serving", "watched"})
