"""What one process records of an engine's graphs, and the file that keeps it for the second process.

The file is a pickle that is not trusted: reading it can only create the records of this package and plain containers.
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
"""Where the classes are from that a recording may hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedTensor:
    """A tensor that the caller named, outside of the graphs' own memory: `offset` bytes into range `span` of the take; `strides` in
    elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    span: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PointerWord:
    """A word of memory, in range `range`, that is an address of this process."""

    range: int
    word: Word


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTake:
    """`take` has a graph for each of `keys`.  Its first ranges are the spans of `tensors`; the outputs of its first graph are the
    tensors in the graphs' own memory, called `pooled`.  `pointers`: words of both that look like addresses.  `process` is no other
    process's, `versions` are those that must be equal in two of them."""

    take: Take
    keys: tuple[Key, ...]
    tensors: tuple[NamedTensor, ...]
    pooled: tuple[str, ...]
    pointers: tuple[PointerWord, ...]
    versions: tuple[tuple[str, str], ...]
    process: str


def write_recording(path: Path, take: EngineTake) -> None:
    """Writes the file so that it is whole or absent.  Raises OSError."""
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
    """The take in the file.  Raises engine-recording-invalid."""
    data = path.read_bytes()
    try:
        if not data.startswith(MAGIC):
            raise ValueError("it begins otherwise than a recording of this version")
        take = _Records(io.BytesIO(data[len(MAGIC) :])).load()
        if not isinstance(take, EngineTake):
            raise ValueError("it holds something else")
    except (ValueError, TypeError, EOFError, AttributeError, IndexError, KeyError, ImportError, pickle.UnpicklingError) as error:
        raise BuildError("engine-recording-invalid", f"{path}: {error}") from None
    return take


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in MODULES and name.isidentifier():
            record = super().find_class(module, name)
            if isinstance(record, type) and record.__module__ == module:
                return record
        raise pickle.UnpicklingError(f"{module}.{name} is no record of a recording")


def process_name() -> str:
    """A name that no other process on any machine has: its boot, number and start."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return f"{boot}/{os.getpid()}/{started}"
