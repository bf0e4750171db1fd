"""What building and running for a target needs of this machine, looked for without importing any of it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress

from ..errors import BuildError

NEEDED = {"host": ("torch", "numpy"), "capture": ("torch", "numpy"), "cross-compile": ("torch", "numpy", "triton")}
"""Packages by the recorder of a `choice.Chosen`."""

TRITON = (3, 6), (3, 8)
"""The first version of Triton that kernels for a GPU that is not there are built and interpreted with, and the first that is not:
`interpret.front_end` uses its private interfaces, which 3.8 changed."""

EXTRA, BINDINGS = "pip install 'torch>=2.11,<2.14' 'triton>=3.6,<3.8' numpy", "pip install 'cuda-bindings>=13'"
"""What to type for what building needs, and for what recording on a GPU needs: the packages of the extras `compile` and `cuda`,
since no index has cgcompile itself."""

TRITON_FIX = "pip install 'triton>=3.6,<3.8'"

DRIVER = "libcuda.so.1"
"""The CUDA driver's library: without it torch sees no GPU either."""


def compiler() -> str:
    """The C++ compiler: the user's choice, or GCC."""
    return os.environ.get("CXX", "g++")


def described(*command: str) -> str:
    """What a program of the machine says of itself; "" where it is not there: compiling says so."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd="/")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def check_compiler() -> None:
    """Raises compiler-failed where there is no C++ compiler."""
    if shutil.which(compiler()) is None:
        raise BuildError("compiler-failed", f"no C++ compiler: {compiler()!r} is not on the PATH", "install g++, or set CXX")


def installed(package: str) -> str:
    """The version of a package, "" where it is not installed: as the names of folders say.  importlib.metadata knows it, too, but
    importing that takes 30 ms of the 300 that a command without torch has."""
    name = re.compile(rf"{package.replace('-', '[-_.]')}-([^-]+)(-py[\d.]+)?\.(dist|egg)-info", re.IGNORECASE)
    for folder in sys.path:
        with suppress(OSError):  # a zip file, or nothing
            for entry in os.listdir(folder or os.curdir):
                if match := name.fullmatch(entry):
                    return match[1]
    return ""


def check_packages(recorder: str) -> None:
    """Raises extra-missing for a package that a recorder needs, and triton-unsupported for a Triton that is none of TRITON."""
    for package in NEEDED[recorder]:
        if importlib.util.find_spec(package) is None:
            raise BuildError("extra-missing", f"building needs {package}, which is not installed", EXTRA)
    if recorder == "capture" and importlib.util.find_spec("cuda") is None:
        raise BuildError("extra-missing", "recording on a GPU needs cuda-bindings, which is not installed", BINDINGS)
    if "triton" in NEEDED[recorder]:
        version = installed("triton")
        first, end = TRITON
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if not first <= numbers < end:
            known = f"{first[0]}.{first[1]} to {end[0]}.{end[1] - 1}"
            raise BuildError(
                "triton-unsupported",
                f"Triton {version or 'of no known version'} is installed, and this needs one of {known}",
                TRITON_FIX,
            )


def has_driver() -> bool:
    """Whether there is a CUDA driver: it is loaded, but not started."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True
