"""The recording of an engine's graphs by one process, and the file that keeps it for the second process.

The file is an untrusted pickle: its reader creates only the dataclasses of MODULES and plain containers.
"""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from cgbundle.validate.engine import Key

from ...errors import BuildError
from ..take import Take, Word

MAGIC = b"cgcompile engine recording 1\n"

MODULES = ("cgcompile.capture.take", "cgcompile.capture.engine.engine_take")
"""Modules whose classes a recording may hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedTensor:
    """A tensor that the caller named, outside the private pools.  It starts `offset` bytes into range number `span` of the take.
    `strides` are in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    span: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PointerWord:
    """A word in the memory of range number `range` whose value looks like an address of this process."""

    range: int
    word: Word


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTake:
    """One process's recording of an engine.  `take` has one graph per key, and begins with the ranges that hold `tensors`.

    `pooled`: names of the tensors in private pools; the take stores them as outputs of its first graph.  `pointers`: words in named
    tensors and private pools that look like addresses.  `versions`: must be equal in both processes.  `process`: a unique name."""

    take: Take
    keys: tuple[Key, ...]
    tensors: tuple[NamedTensor, ...]
    pooled: tuple[str, ...]
    pointers: tuple[PointerWord, ...]
    versions: tuple[tuple[str, str], ...]
    process: str


def write_recording(path: Path, take: EngineTake) -> None:
    """Writes the file atomically.  Raises OSError."""
    part = path.with_name(f".{path.name}.{uuid4().hex}.part")
    try:
        with open(part, "wb") as file:
            file.write(MAGIC)
            pickle.dump(take, file, protocol=5)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def read_recording(path: Path) -> EngineTake:
    """Reads the take in the file.  Raises engine-recording-invalid."""
    data = path.read_bytes()
    try:
        if not data.startswith(MAGIC):
            raise ValueError("not a recording of this version")
        take = _Records(io.BytesIO(data[len(MAGIC) :])).load()
        if not isinstance(take, EngineTake):
            raise ValueError("its content is not a recording")
    except (ValueError, TypeError, EOFError, AttributeError, IndexError, KeyError, ImportError, pickle.UnpicklingError) as error:
        raise BuildError("engine-recording-invalid", f"{path}: {error}") from None
    return take


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in MODULES and name.isidentifier():
            record = super().find_class(module, name)
            if isinstance(record, type) and record.__module__ == module:
                return record
        raise pickle.UnpicklingError(f"class {module}.{name} is not allowed in a recording")


def process_name() -> str:
    """Returns a unique name of this process: boot id, pid, and start time in clock ticks."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return f"{boot}/{os.getpid()}/{started}"
