"""The kernel images that an engine loads.  CUPTI calls `image_log.cpp`, because a callback in Python can cause a deadlock.

A callback runs inside a driver call.  In Python it would wait there for the GIL, while another thread may hold the GIL and wait for
a lock of the driver.  vLLM 0.24 deadlocks where torch loads several compiled parts of a model in threads.  Only the callback for a
node that a capture adds to a graph calls Python, to read its line.  So load no kernels in other threads during a capture.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import BuildError
from ...targets.requirements import check_compiler, compiler
from .cupti import GRAPHNODE_CREATED, HOLDERS, MODULE_LOADED, ImageLog, Load

SOURCE = Path(__file__).with_name("image_log.cpp")

NODE_CREATED = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Holder(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("at", ctypes.c_uint32), ("indirect", ctypes.c_uint32))


class _Load(ctypes.Structure):
    _fields_ = (
        ("next", ctypes.c_void_p),
        ("call", ctypes.c_char_p),
        ("serial", ctypes.c_uint64),
        ("handle", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("holder", ctypes.c_int64),
        ("depth", ctypes.c_int),
        ("image", ctypes.c_ubyte * 1),
    )


class NativeEvents:
    """The CUPTI callback in C++, and the events that it recorded.  `line`: returns the running line of Python; it is called for
    every node that is added to a graph.  Raises compiler-failed."""

    def __init__(self, line: Callable[[], str]) -> None:
        self.lines: dict[int, str] = {}
        """Line of Python by the handle of a graph's node."""
        rows = [_Holder(name.encode(), at, indirect) for name, (_kind, at, indirect) in HOLDERS.items()]
        self._holders = (_Holder * len(rows))(*rows)
        self._node_created = NODE_CREATED(partial(self._note_line, line))
        self._library = _library()
        self.log = int(self._library.new_log(self._holders, len(rows), self._node_created))
        self.callback = self._library.on_event
        self._last: _Load | None = None

    def new_loads(self) -> list[tuple[Load, bytes]]:
        """Returns the loads since the previous call, with their images."""
        kinds = [kind for kind, _at, _indirect in HOLDERS.values()]
        loads: list[tuple[Load, bytes]] = []
        address = self._library.first_load(self.log) if self._last is None else self._last.next
        while address:
            self._last = _Load.from_address(address)
            image = ctypes.string_at(address + _Load.image.offset, self._last.bytes)
            load = Load(
                serial=self._last.serial,
                call=self._last.call.decode(),
                kind=kinds[self._last.holder] if self._last.holder >= 0 else "",
                handle=self._last.handle,
                image=hashlib.sha256(image).hexdigest(),
            )
            loads.append((load, image))
            address = self._last.next
        return loads

    def _note_line(self, line: Callable[[], str], node: int) -> None:
        self.lines[node] = line()


class EngineImageLog(ImageLog):
    """An `ImageLog` for processes in which several threads use CUDA."""

    def __init__(self, line: Callable[[], str]) -> None:
        self._loads, self._images = [], {}
        self._events = NativeEvents(line)
        self._subscribe(self._events.callback, self._events.log, MODULE_LOADED, GRAPHNODE_CREATED)

    @property
    def lines(self) -> dict[int, str]:
        """Returns the line of Python that added a graph's node, by the node's handle."""
        return self._events.lines

    @property
    def images(self) -> dict[str, bytes]:
        """Returns every image seen, by its SHA-256."""
        self._read()
        return super().images

    def modules(self) -> dict[int, tuple[str, ...]]:
        """Returns the images of every module, by its handle.  Raises loader-unknown."""
        self._read()
        return super().modules()

    def _read(self) -> None:
        for load, image in self._events.new_loads():
            self._loads.append(load)
            self._images.setdefault(load.image, image)


def _library() -> Any:
    """Compiles and loads `image_log.cpp`."""
    check_compiler()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "image_log.so"
        command = [compiler(), "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(target)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            reason = next((line for line in process.stderr.splitlines() if "error" in line), "no message")
            raise BuildError("compiler-failed", f"observe: {compiler()} does not compile {SOURCE.name}: {reason}")
        library = ctypes.CDLL(str(target))
    library.new_log.restype = library.first_load.restype = ctypes.c_void_p
    library.new_log.argtypes = (ctypes.c_void_p, ctypes.c_int64, NODE_CREATED)
    library.first_load.argtypes = (ctypes.c_void_p,)
    return library
