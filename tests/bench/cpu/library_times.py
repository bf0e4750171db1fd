"""Times the dynamic loader (dlopen) and the run of the model's shared object inside cgbundle, from outside.

`ctypes.CDLL` is replaced before cgbundle imports it, so this module uses no private name of cgbundle.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from tests.bench.common.serving import now

RUN = "AOTInductorModelContainerRun"


class Stopwatch:
    """Wraps a C function and times its calls; attributes are those of the function."""

    def __init__(self, function: Any) -> None:
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "seconds", [])
        object.__setattr__(self, "arguments", ())

    def __call__(self, *arguments: Any) -> Any:
        start = now()
        result = self.function(*arguments)
        self.seconds.append(now() - start)
        object.__setattr__(self, "arguments", arguments)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.function, name, value)


class Watch:
    """The measurements: seconds of every dlopen by file name, and the stopwatches of the model's run."""

    def __init__(self) -> None:
        self.libraries: dict[str, float] = {}
        self.handles: dict[str, Any] = {}
        self.stopwatches: list[Stopwatch] = []
        self.original = ctypes.CDLL

    def runs(self) -> list[float]:
        """Returns the seconds of every run. Raises SystemExit if there was none, because the breakdown would be wrong."""
        seconds = [second for stopwatch in self.stopwatches for second in stopwatch.seconds]
        if not seconds:
            raise SystemExit(f"no call of {RUN} was seen: does cgbundle still load libraries with ctypes.CDLL?")
        return seconds

    def stop(self) -> None:
        ctypes.CDLL = self.original  # type: ignore[misc]


def watch() -> Watch:
    seen = Watch()

    class Library(ctypes.CDLL):
        def __init__(self, name: Any, *args: Any, **options: Any) -> None:
            start = now()
            super().__init__(name, *args, **options)
            file = os.path.basename(str(name))
            seen.libraries[file] = seen.libraries.get(file, 0.0) + now() - start
            seen.handles[file] = self

        def __getitem__(self, name: Any) -> Any:
            function = super().__getitem__(name)
            if name != RUN:
                return function
            stopwatch = Stopwatch(function)
            seen.stopwatches.append(stopwatch)
            return stopwatch

    ctypes.CDLL = Library  # type: ignore[misc]
    return seen
