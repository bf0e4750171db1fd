"""`python -m tests.helpers.drivers.null_driver BUNDLE`: loads a bundle for a GPU over a driver that does nothing. Prints the
runtime modules that this imports, as JSON. This file imports no runtime module that the load does not need."""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
from typing import Any

ADD = ((0, 8), (8, 8), (16, 8), (24, 4))
"""(offset, size) of the parameters of `add`, the only kernel."""

ANSWERS: dict[str, Any] = {
    "cuDriverGetVersion": 13000, "cuDeviceGetCount": 1, "cuDeviceGet": 0, "cuDeviceGetName": b"Null", "cuStreamIsCapturing": 0,
}  # fmt: skip


class NullDriver:
    """A driver whose calls all succeed. Its memory is host memory that is never freed."""

    def __init__(self) -> None:
        self._numbers = itertools.count(0x1000)
        self._memory: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            from cgbundle.cuda.libcuda import answers

            if name == "cuFuncGetParamInfo":
                return (0, *ADD[args[1]]) if args[1] < len(ADD) else (1, None, None)
            if name == "cuDeviceGetAttribute":
                return 0, 9 if args[0] == 75 else 0
            if name in ("cuMemAlloc", "cuMemHostAlloc"):
                self._memory.append(ctypes.create_string_buffer(args[0]))
                return 0, ctypes.addressof(self._memory[-1])
            return (0, ANSWERS.get(name, next(self._numbers))) if answers(name) else 0

        return call

    def held(self, name: str) -> Any:
        return getattr(self, name)


def main(path: str) -> None:
    import cgbundle
    from cgbundle.cuda import libcuda

    libcuda.Driver = NullDriver  # type: ignore[assignment, misc]
    with cgbundle.load(path, lazy=False):
        print(json.dumps(sorted(name for name in sys.modules if name.partition(".")[0] == "cgbundle")))


if __name__ == "__main__":
    main(*sys.argv[1:])
