"""The ptxas that Triton brings: what it assembles, and the lowest driver that runs a kernel image which it made."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path

from ...errors import BuildError
from ..requirements import EXTRA

BLACKWELL = 100
"""Capabilities from here on are compiled by a ptxas of their own (triton/backends/nvidia/compiler.py, 3.6 and 3.7)."""


def assemble(ptx: str, capability: int) -> bytes:
    """The image of PTX text for a capability (90 for sm_90).  Raises extra-missing, kernel-failed."""
    with tempfile.TemporaryDirectory(prefix="cgcompile-") as folder:
        Path(folder, "kernels.ptx").write_text(ptx)
        options = [f"--gpu-name=sm_{capability}", "--output-file", "kernels.cubin", "kernels.ptx"]
        command: list[str | Path] = [_ptxas(capability), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        if done.returncode:
            raise BuildError("kernel-failed", f"ptxas for sm_{capability}: {' '.join((done.stdout + done.stderr).split())[:160]}")
        return Path(folder, "kernels.cubin").read_bytes()


def lowest_driver(capability: int) -> int:
    """The major CUDA version of the ptxas for a capability (90 for sm_90), as drivers count (12000 = 12.0): a cubin runs on every
    driver of its major version (CUDA's minor version compatibility).  Raises extra-missing, kernel-failed."""
    done = subprocess.run([_ptxas(capability), "--version"], capture_output=True, text=True, check=False)
    release = re.search(r"release (\d+)\.", done.stdout)
    if release is None or done.returncode:
        said = " ".join((done.stdout + done.stderr).split())
        raise BuildError("kernel-failed", f"ptxas --version says no version: {said[:80]}", "install triton again")
    return int(release[1]) * 1000


def _ptxas(capability: int) -> Path:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise BuildError("extra-missing", "building for a GPU needs triton, which is not installed", EXTRA)
    name = "ptxas-blackwell" if capability >= BLACKWELL else "ptxas"
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise BuildError(
            "kernel-failed", f"triton has no {name} at {path}", "install the version of Triton that your torch requires"
        )
    return path
