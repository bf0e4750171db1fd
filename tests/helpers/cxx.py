#!/usr/bin/env -S python3 -IS
"""g++ with precompiled headers. tests/conftest.py sets CXX to this file while tests run.

Every source that AOTInductor writes starts with the same headers, which take half of the compile time. They are compiled once per
test run and set of options, into the folder that `SHARED` names. The object files are byte for byte those of plain g++. A build
queries its compiler a dozen times per source, so start-up time matters: only `precompiled` imports its modules.
"""

from __future__ import annotations

import os
import sys

SHARED = "CGCOMPILE_TESTS_SHARED"
COMPILER = "g++"
SOURCES = (".wrapper.cpp", ".kernel.cpp")


def main(arguments: list[str]) -> None:
    """Replaces this process by the compiler. Only commands of the form `SOURCE OPTIONS -c -o OBJECT` are changed."""
    header_options: tuple[str, ...] = ()
    if arguments and arguments[0].endswith(SOURCES) and arguments[-3:-1] == ["-c", "-o"] and SHARED in os.environ:
        header_options = precompiled(arguments[0], arguments[1:-3], os.path.join(os.environ[SHARED], "headers"))
    os.execvp(COMPILER, [COMPILER, *header_options, *arguments])


def precompiled(source: str, options: list[str], folder: str) -> tuple[str, ...]:
    """Returns the options that include the precompiled headers of `source`; none for the first source with these headers and
    options.
    """
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
                file.write(headers)  # a single source compiles faster without precompiled headers
            return ()
        if not os.path.exists(f"{header}.gch"):
            temporary = f"{header}.made"
            if subprocess.run([COMPILER, "-x", "c++-header", *options, header, "-o", temporary], check=False).returncode:
                return ()  # the compiler reports the error when it compiles the source
            os.rename(temporary, f"{header}.gch")
    return ("-include", header)


def leading_includes(source: str) -> str:
    """Returns the `#include` lines before the first line of code."""
    includes = []
    for line in source.splitlines():
        if line.startswith("#include"):
            includes.append(line)
        elif line.strip() and not line.startswith("//"):
            break
    return "\n".join([*includes, ""])


if __name__ == "__main__":
    main(sys.argv[1:])
