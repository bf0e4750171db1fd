#!/usr/bin/env python3
"""g++ with precompiled headers: CXX names this file while tests run (tests/conftest.py).

Every source that AOTInductor writes begins with the same headers, which take half of the compiler's time.  They are compiled once
per run and set of options, into the folder that `SHARED` names.  The object files are equal byte for byte to those made without.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SHARED = "CGCOMPILE_TESTS_SHARED"
COMPILER = "g++"
SOURCES = (".wrapper.cpp", ".kernel.cpp")


def main(arguments: Sequence[str]) -> None:
    """Becomes the compiler; of other commands than `SOURCE OPTIONS -c -o OBJECT` nothing changes."""
    ahead: Sequence[str] = ()
    if arguments and arguments[0].endswith(SOURCES) and arguments[-3:-1] == ["-c", "-o"] and SHARED in os.environ:
        ahead = precompiled(Path(arguments[0]), arguments[1:-3], Path(os.environ[SHARED]) / "headers")
    os.execvp(COMPILER, [COMPILER, *ahead, *arguments])


def precompiled(source: Path, options: Sequence[str], folder: Path) -> tuple[str, ...]:
    """The options that include the headers of `source`, compiled with `options`; none for the first source of its kind."""
    headers = leading_includes(source.read_text())
    name = hashlib.sha256("\0".join([headers, *options]).encode()).hexdigest()[:16]
    header, compiled = folder / f"{name}.h", folder / f"{name}.h.gch"
    folder.mkdir(exist_ok=True)
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not header.exists():
            header.write_text(headers)  # one source alone costs less than its headers
            return ()
        if not compiled.exists():
            made = compiled.with_suffix(".made")
            if subprocess.run([COMPILER, "-x", "c++-header", *options, str(header), "-o", str(made)], check=False).returncode:
                return ()  # the source itself will say what is wrong
            made.rename(compiled)
    return ("-include", str(header))


def leading_includes(source: str) -> str:
    """The `#include` lines before the first line of code."""
    found = []
    for line in source.splitlines():
        if line.startswith("#include"):
            found.append(line)
        elif line.strip() and not line.startswith("//"):
            break
    return "\n".join([*found, ""])


if __name__ == "__main__":
    main(sys.argv[1:])
