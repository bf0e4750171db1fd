"""The baselines of a benchmark, and the packages that they need."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from ...errors import BuildError

TORCH = {
    "eager": "eager PyTorch",
    "compile": "torch.compile, empty cache",
    "compile-warm": "torch.compile in a new process, warm disk cache",
    "manual": "CUDA graphs of PyTorch's eager kernels, captured by hand",
}
"""Baselines that run in PyTorch, with a description."""

BASELINES = {**TORCH, "ort": "ONNX Runtime"}
"""All baselines, in the order of the tables."""


def choose(against: Sequence[str], target: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns the baselines to measure (default: all of this target), and reasons for skipped ones.  Raises baseline-unknown."""
    unknown = [name for name in against if name not in BASELINES]
    if unknown:
        raise BuildError("baseline-unknown", f"no baseline {unknown[0]!r}: there are {', '.join(BASELINES)}")
    selected = [name for name in BASELINES if name in against or (not against and not (name == "manual" and target == "cpu"))]
    reasons = {name: reason for name in selected if (reason := _missing(name, target))}
    return tuple([name for name in selected if name not in reasons]), reasons


def _missing(name: str, target: str) -> str:
    if name == "manual" and target == "cpu":
        return "skipped: it captures CUDA graphs, and this bundle is for the CPU"
    if name == "ort":
        missing = [package for package in ("onnxruntime", "onnx", "onnxscript") if importlib.util.find_spec(package) is None]
        if "onnxruntime" in missing:
            return "skipped: ONNX Runtime is not installed (pip install onnxruntime onnx onnxscript)"
        if missing:
            return f"skipped: exporting for ONNX Runtime needs {' and '.join(missing)}"
    missing = [package for package in ("torch", "safetensors") if importlib.util.find_spec(package) is None]
    return f"skipped: {missing[0]} is not installed" if missing else ""
