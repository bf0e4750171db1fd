"""What code for the CPU calls of libtorch, as an object file of ours that is linked to it: `standalone.cpp`.

torch's own headers declare the functions, so that another signature in another version of torch is an error of the compiler.
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
"""Headers of ours that it includes."""

HEADERS = Path(torch.__file__).parent / "include"

LINKED = ("-Wl,-Bsymbolic", "-Wl,-z,defs")
"""Options of the linker: a process that has torch keeps both apart, and what nothing defines is an error here."""

UNDEFINED = re.compile(r"undefined reference to `([^']+)'")


def command(compiler: str, target: Path) -> list[str]:
    """How `compiler` makes the object file at `target`.  It says itself which processor it compiles for, where "native" stands."""
    version = torch.__version__.partition("+")[0]
    options = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-w", "-DNDEBUG", "-DSTANDALONE_TORCH_HEADER"]
    headers = [f"-I{HEADERS}", f"-I{HEADERS / 'torch/csrc/api/include'}"]
    return [compiler, str(SOURCE), *options, f'-DBUILT_WITH="{version}"', *headers, "-c", "-o", str(target)]


def dependencies() -> Iterator[object]:
    """All that the object file depends on, but for the compiler and its options about the processor."""
    yield SOURCE.read_bytes(), *[header.read_bytes() for header in INCLUDED]
    yield torch.__version__, torch.version.git_version, platform.libc_ver()


def is_in(code: bytes) -> bool:
    """Whether a shared object brings it, and so needs none of torch's libraries."""
    return BUILT_WITH.encode() in code


def missing(said: str) -> BuildError | None:
    """What a linker's message says that there is not here; None for another message."""
    names = sorted(set(UNDEFINED.findall(said)))
    if not names:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return BuildError("not-standalone", f"the compiled code calls {names[0]}{more}, which only torch's libraries have")
