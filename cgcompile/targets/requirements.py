"""Checks what a build needs on this machine: packages, which are not imported, a compiler, a driver."""

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
"""The required packages per recorder of a `choice.Chosen`."""

TRITON = (3, 6), (3, 8)
"""The first version of Triton that cross-compiling supports, and the first later version that it does not.  `interpret.front_end`
uses private interfaces of Triton, which 3.8 changed."""

EXTRA, BINDINGS = "pip install 'torch>=2.11,<2.14' 'triton>=3.6,<3.8' numpy", "pip install 'cuda-bindings>=13'"
"""Install commands for the packages that a build needs, and for those that recording on a GPU needs.  They list the packages of
the extras `compile` and `cuda`, because cgcompile is not on a package index."""

TRITON_FIX = "pip install 'triton>=3.6,<3.8'"

DRIVER = "libcuda.so.1"
"""The CUDA driver's library.  Without it torch finds no GPU."""


def compiler() -> str:
    """Returns the C++ compiler: $CXX, else g++."""
    return os.environ.get("CXX", "g++")


def described(*command: str) -> str:
    """Returns the output of a command, such as a compiler's version, or "" if it cannot run: the compilation reports the error."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd="/")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout + process.stderr


def check_compiler() -> None:
    """Raises compiler-failed if there is no C++ compiler."""
    if shutil.which(compiler()) is None:
        raise BuildError("compiler-failed", f"no C++ compiler: {compiler()!r} is not on the PATH", "install g++, or set CXX")


def installed(package: str) -> str:
    """Returns the version of a package from the folder names in `sys.path`, or "" if it is not installed.  Importing
    importlib.metadata would take 30 ms of the 300 that a command without torch takes."""
    name = re.compile(rf"{package.replace('-', '[-_.]')}-([^-]+)(-py[\d.]+)?\.(dist|egg)-info", re.IGNORECASE)
    for folder in sys.path:
        with suppress(OSError):  # a zip file, or no such folder
            for entry in os.listdir(folder or os.curdir):
                if match := name.fullmatch(entry):
                    return match[1]
    return ""


def check_packages(recorder: str) -> None:
    """Raises extra-missing if a package of the recorder is missing, and triton-unsupported for a Triton outside TRITON."""
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
            supported = f"{first[0]}.{first[1]} to {end[0]}.{end[1] - 1}"
            raise BuildError(
                "triton-unsupported",
                f"Triton {version or 'of no known version'} is installed, and this needs one of {supported}",
                TRITON_FIX,
            )


def has_driver() -> bool:
    """Whether a CUDA driver is installed.  Loads its library, but does not initialize it."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True
