"""Runs a command as on an x86-64 processor that has AVX2 and no AVX-512.

    python -m tests.avx2 make test                                     all tests
    python -m tests.avx2 .venv/bin/python -m pytest tests/cpu/session  some of them

The processes of the command see three changes:

- `/proc/cpuinfo`, which cgbundle and cgcompile read, lists no AVX-512. A preloaded library opens a copy of the file instead.
- `-march=native` does not enable AVX-512. Scripts of the compilers' names come first on the PATH.
- torch, Inductor and MKL are limited to AVX2 by their own variables. oneDNN keeps AVX-512: with its variable integer products
  overflow, and tests fail that pass on a real processor without AVX-512.

The processor still executes AVX-512 instructions. A bundle that contains them and does not list them is not detected.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

HIDDEN = ("avx512", "avx10", "amx")
"""How the names of hidden flags begin.  No processor without AVX-512 has AMX."""

VARIABLES = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}

COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "clang++")

COMPILER = """#!/bin/sh
for option do
  case $option in -march=native) set -- "$@" -mno-avx512f ;; esac
done
exec {compiler} "$@"
"""
"""The compiler turns off all extensions of AVX-512 with its foundation."""

LIBRARY = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>

int open(const char *path, int flags, ...) {
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) {
        va_list rest;
        va_start(rest, flags);
        mode = va_arg(rest, mode_t);
        va_end(rest);
    }
    return openat(AT_FDCWD, path && !strcmp(path, "/proc/cpuinfo") ? COPY : path, flags, mode);
}

int open64(const char *, int, ...) __attribute__((alias("open")));
"""


def environment(folder: Path) -> dict[str, str]:
    """The variables of a process that sees no AVX-512.  `folder`: for the files that they name."""
    copy, source, library, scripts = folder / "cpuinfo", folder / "open.c", folder / "open.so", folder / "bin"
    copy.write_text(without_avx512(CPUINFO.read_text()))
    source.write_text(f"#define COPY {json.dumps(str(copy))}\n{LIBRARY}")
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    scripts.mkdir()
    for name in COMPILERS:
        if executable := shutil.which(name):
            script = scripts / name
            script.write_text(COMPILER.format(compiler=shlex.quote(executable)))
            script.chmod(0o755)
    preloaded = " ".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
    return os.environ | VARIABLES | {"LD_PRELOAD": preloaded, "PATH": f"{scripts}:{os.environ['PATH']}"}


def without_avx512(text: str) -> str:
    """The content of /proc/cpuinfo without the flags that are hidden."""
    lines = []
    for line in text.splitlines():
        name, colon, values = line.partition(":")
        if name.strip() == "flags":
            line = f"{name}{colon} {' '.join(flag for flag in values.split() if not flag.startswith(HIDDEN))}"
        lines.append(line)
    return "\n".join([*lines, ""])


def main(command: list[str]) -> int:
    """The status of the command."""
    if not command or os.uname().machine != "x86_64":
        print("usage: python -m tests.avx2 COMMAND..., on x86-64", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="cgcompile-avx2-") as folder:
        variables = environment(Path(folder))
        seen = subprocess.run(["cat", CPUINFO], env=variables, capture_output=True, text=True, check=True).stdout
        if "avx512" in seen:
            print("the preloaded library does not hide AVX-512 here", file=sys.stderr)
            return 2
        return subprocess.run(command, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
