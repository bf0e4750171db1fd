"""Triton's ptxas: assembles PTX, and determines the lowest driver that runs the result."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path

from ...errors import BuildError
from ..requirements import EXTRA

FIRST_BLACKWELL = 100
"""The first compute capability for which Triton uses `ptxas-blackwell` (triton/backends/nvidia/compiler.py, 3.6 and 3.7)."""


def assemble(ptx: str, capability: int) -> bytes:
    """Assembles PTX text for a capability (90 for sm_90), and returns the image.  Raises extra-missing, kernel-failed."""
    with tempfile.TemporaryDirectory(prefix="cgcompile-") as folder:
        Path(folder, "kernels.ptx").write_text(ptx)
        options = [f"--gpu-name=sm_{capability}", "--output-file", "kernels.cubin", "kernels.ptx"]
        command: list[str | Path] = [_ptxas(capability), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        if done.returncode:
            raise BuildError("kernel-failed", f"ptxas for sm_{capability}: {' '.join((done.stdout + done.stderr).split())[:160]}")
        return Path(folder, "kernels.cubin").read_bytes()


def lowest_driver(capability: int) -> int:
    """Returns the lowest driver version (12000 = 12.0) that runs cubins of a capability (90 for sm_90).  A cubin runs on all
    drivers of the major version of its ptxas (CUDA minor version compatibility).  Raises extra-missing, kernel-failed."""
    result = subprocess.run([_ptxas(capability), "--version"], capture_output=True, text=True, check=False)
    release = re.search(r"release (\d+)\.", result.stdout)
    if release is None or result.returncode:
        output = " ".join((result.stdout + result.stderr).split())
        raise BuildError("kernel-failed", f"ptxas --version printed no version: {output[:80]}", "install triton again")
    return int(release[1]) * 1000


def _ptxas(capability: int) -> Path:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise BuildError("extra-missing", "building for a GPU needs triton, which is not installed", EXTRA)
    name = "ptxas-blackwell" if capability >= FIRST_BLACKWELL else "ptxas"
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise BuildError(
            "kernel-failed", f"the package triton has no {name} at {path}", "install the version of Triton that your torch requires"
        )
    return path
