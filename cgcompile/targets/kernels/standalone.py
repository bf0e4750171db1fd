"""Functions that replace libtorch's, in `standalone.cpp`: an object file that is linked to code for the CPU.

torch's headers declare the functions.  If another version of torch changes a signature, the compiler reports an error.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from cgbundle.cpu.libtorch import BUILT_WITH

from ...errors import BuildError

SOURCE = Path(__file__).with_name("standalone.cpp")

INCLUDED = tuple([Path(__file__).with_name(name) for name in ("products.h", "vectors.h")])
"""Headers in this folder that `standalone.cpp` includes."""

HEADERS = Path(torch.__file__).parent / "include"

LINKED = ("-Wl,-Bsymbolic", "-Wl,-z,defs")
"""Linker options.  In a process with torch, -Bsymbolic keeps these functions apart from torch's.  Undefined symbols are errors."""

UNDEFINED = re.compile(r"undefined reference to `([^']+)'")


def command(compiler: str, target: Path) -> list[str]:
    """Returns the command that creates the object file at `target`.  `compiler`: a script that may replace -march=native."""
    version = torch.__version__.partition("+")[0]
    options = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-w", "-DNDEBUG", "-DSTANDALONE_TORCH_HEADER"]
    headers = [f"-I{HEADERS}", f"-I{HEADERS / 'torch/csrc/api/include'}"]
    return [compiler, str(SOURCE), *options, f'-DBUILT_WITH="{version}"', *headers, "-c", "-o", str(target)]


def dependencies() -> Iterator[object]:
    """Yields everything on which the object file depends, except the compiler and its options for the processor."""
    yield SOURCE.read_bytes(), *[header.read_bytes() for header in INCLUDED]
    yield torch.__version__, torch.version.git_version, platform.libc_ver()


def is_in(code: bytes) -> bool:
    """Whether a shared object contains these functions, and so needs no library of torch."""
    return BUILT_WITH.encode() in code


def missing(message: str) -> BuildError | None:
    """Returns the error for undefined references in a linker's message, or None for any other message."""
    names = sorted(set(UNDEFINED.findall(message)))
    if not names:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return BuildError("not-standalone", f"the compiled code calls {names[0]}{more}, which only torch's libraries have")
