#!/usr/bin/env -S python3 -IS
"""g++ with precompiled headers: CXX names this file while tests run (tests/conftest.py).

Every source that AOTInductor writes begins with the same headers, which take half of the compiler's time.  They are compiled once
per run and set of options, into the folder that `SHARED` names.  The object files are equal byte for byte to those made without.

A build asks its compiler a dozen questions for every source, which take as long as to start Python: what is imported late is for
sources alone.
"""

from __future__ import annotations

import os
import sys

SHARED = "CGCOMPILE_TESTS_SHARED"
COMPILER = "g++"
SOURCES = (".wrapper.cpp", ".kernel.cpp")


def main(arguments: list[str]) -> None:
    """Becomes the compiler; of other commands than `SOURCE OPTIONS -c -o OBJECT` nothing changes."""
    ahead: tuple[str, ...] = ()
    if arguments and arguments[0].endswith(SOURCES) and arguments[-3:-1] == ["-c", "-o"] and SHARED in os.environ:
        ahead = precompiled(arguments[0], arguments[1:-3], os.path.join(os.environ[SHARED], "headers"))
    os.execvp(COMPILER, [COMPILER, *ahead, *arguments])


def precompiled(source: str, options: list[str], folder: str) -> tuple[str, ...]:
    """The options that include the headers of `source`, compiled with `options`; none for the first source of its kind."""
    import fcntl
    import hashlib
    import subprocess

    with open(source) as file:
        headers = leading_includes(file.read())
    name = hashlib.sha256("\0".join([headers, *options]).encode()).hexdigest()[:16]
    header = os.path.join(folder, f"{name}.h")
    os.makedirs(folder, exist_ok=True)
    with open(f"{header}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(header):
            with open(header, "w") as file:
                file.write(headers)  # one source alone costs less than its headers
            return ()
        if not os.path.exists(f"{header}.gch"):
            temporary = f"{header}.made"
            if subprocess.run([COMPILER, "-x", "c++-header", *options, header, "-o", temporary], check=False).returncode:
                return ()  # the source itself will say what is wrong
            os.rename(temporary, f"{header}.gch")
    return ("-include", header)


def leading_includes(source: str) -> str:
    """The `#include` lines before the first line of code."""
    includes = []
    for line in source.splitlines():
        if line.startswith("#include"):
            includes.append(line)
        elif line.strip() and not line.startswith("//"):
            break
    return "\n".join([*includes, ""])


if __name__ == "__main__":
    main(sys.argv[1:])
