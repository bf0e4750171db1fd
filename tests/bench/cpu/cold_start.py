"""Cold start of one model: bundle, eager PyTorch and torch.compile, alternating, each in a new process."""

from __future__ import annotations

import shutil
import statistics
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.common import children
from tests.bench.common.cases import Case

WAYS = ("bundle", "without NumPy", "watched", "eager", "uninitialized", "compile")
TOLERANCE = 1e-5
"""Largest allowed difference, relative to the largest element of eager PyTorch's output. All models here are float32."""


@dataclass(kw_only=True, slots=True)
class Measured:
    """Results of the repetitions, by variant: the children's reports, and the largest relative difference from eager PyTorch."""

    case: Case
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    cold_compile: float = 0.0

    def seconds(self, variant: str) -> list[float]:
        """Returns the seconds from process start to first output of every repetition."""
        return [run["seconds"] for run in self.runs[variant]]

    def ratio(self, variant: str) -> float:
        """Returns how many times faster the bundle is than `variant`, by medians."""
        return statistics.median(self.seconds(variant)) / statistics.median(self.seconds("bundle"))

    @property
    def fastest_eager(self) -> str:
        """Returns the variant of eager PyTorch that does not initialize weights before it loads them. transformers never does."""
        return "eager" if self.case.own_weights else "uninitialized"

    def parts(self) -> dict[str, list[float]]:
        """Returns the seconds of each stage of the watched repetitions."""
        return {name: [part(run) for run in self.runs["watched"]] for name, part in PARTS.items()}

    def wrong(self) -> list[str]:
        """Returns a sentence for every variant whose output differs from eager PyTorch."""
        return [
            f"{self.case.name}: {variant} differs from eager by {error:.1e}"
            for variant, error in self.errors.items()
            if not error <= TOLERANCE
        ]


def libtorch(run: dict[str, Any]) -> float:
    """Returns the seconds that the dynamic loader spent on torch's libraries."""
    return sum(seconds for file, seconds in run["libraries"].items() if file.startswith(("libtorch", "libc10")))


def ours(run: dict[str, Any]) -> float:
    """Returns the seconds from process start to first output that cgbundle itself takes. They exclude the interpreter, the inputs,
    loading libtorch and the model's run. They include loading the model's shared object."""
    laps = run["laps"]
    total = laps["import ctypes"] + laps["import cgbundle"] + laps["load"] + laps["first call"]
    return total - libtorch(run) - run["runs"][0]


PARTS: dict[str, Callable[[dict[str, Any]], float]] = {
    "interpreter": lambda run: run["laps"]["interpreter"],
    "import cgbundle": lambda run: run["laps"]["import cgbundle"],
    "load: dynamic loader, libtorch": libtorch,
    "load: dynamic loader, the model": lambda run: sum(run["libraries"].values()) - libtorch(run),
    "load: the rest": lambda run: run["laps"]["load"] + run["laps"]["import ctypes"] - sum(run["libraries"].values()),
    "inputs (with import numpy)": lambda run: run["laps"]["inputs"],
    "first call: the model's run": lambda run: run["runs"][0],
    "first call: the rest": lambda run: run["laps"]["first call"] - run["runs"][0],
    "ours": ours,
}


def measure(case: Case, bundle: Path, inputs: list[str], cache: Path, repeat: int, say: Callable[[str], None]) -> Measured:
    """Runs all variants `repeat` times alternately, after one round that fills the caches. Raises ChildFailed."""
    measured = Measured(case=case)
    compiled = cache / f"{case.name}.inductor"
    shutil.rmtree(compiled, ignore_errors=True)
    caching = {"TORCHINDUCTOR_CACHE_DIR": str(compiled), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    weights = "model" if case.own_weights else bundle / "weights.safetensors"
    output = {variant: cache / f"{case.name}.{variant}.bin" for variant in WAYS}
    variants: dict[str, Callable[[], Any]] = {
        "bundle": lambda: children.run("cpu/serve_bundle.py", "numpy", bundle, output["bundle"], *inputs),
        "without NumPy": lambda: children.run("cpu/serve_bundle.py", "plain", bundle, output["without NumPy"], *inputs),
        "watched": lambda: children.run("cpu/serve_bundle.py", "watched", bundle, output["watched"], *inputs),
        "eager": lambda: children.run("cpu/serve_torch.py", "eager", case.source, weights, output["eager"], *inputs),
        "uninitialized": lambda: children.run(
            "cpu/serve_torch.py", "uninitialized", case.source, weights, output["uninitialized"], *inputs
        ),
        "compile": lambda: children.run(
            "cpu/serve_torch.py", "compile", case.source, weights, output["compile"], *inputs, extra=caching
        ),
    }
    if case.own_weights:
        del variants["uninitialized"]
    for variant, once in variants.items():
        say(f"{case.name}: {variant}, first time")
        run = once()
        if variant == "compile":
            measured.cold_compile = run["seconds"]
    for index in range(repeat):
        for variant, once in variants.items():
            say(f"{case.name}: {variant}, {index + 1} of {repeat}")
            run = once()
            if variant == "compile" and not run["hits"]:
                raise children.ChildFailed(
                    f"{case.name}: torch.compile found nothing in its warm cache: the comparison would be unfair"
                )
            measured.runs.setdefault(variant, []).append(run)
            measured.errors[variant] = max(measured.errors.get(variant, 0.0), difference(output[variant], output["eager"]))
    return measured


def difference(path: Path, reference: Path) -> float:
    """Returns the largest difference of two float32 files, relative to the largest element of the second; inf if lengths differ."""
    actual, expected = array("f", path.read_bytes()), array("f", reference.read_bytes())
    if len(actual) != len(expected) or not expected:
        return float("inf")
    worst = max(abs(a - b) for a, b in zip(actual, expected, strict=True))
    # max() may ignore a NaN, so look for it
    return float("inf") if any(a != a for a in actual) else worst / max(map(abs, expected))
