"""Results of a benchmark: values, medians, ratios to the bundle, and the machine."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from cgbundle.cpu.machine import processor_name
from cgbundle.format.schema import IntKey

from ...util.version import VERSION
from .protocol import PHASES

BUNDLE = "bundle"

FIRST = PHASES[:-1]
"""The phases up to the first output."""

PACKAGES = ("torch", "triton", "onnxruntime", "cuda-bindings")
"""Packages whose versions are reported, if installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of one call at an int_key, one value for each round.

    `what`: "call" is the whole call on the CPU; "dispatch" its CPU time on a GPU target; "device" its GPU time."""

    what: str
    key: IntKey
    seconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes that a worker uses when every int_key is ready.

    `resident`: in main memory; `own`: the part that is private and was written; `device`: on the GPU in addition to the
    CUDA context (-1: no GPU, or unknown)."""

    resident: int
    own: int
    device: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Error:
    """The difference between outputs and the self-test: error and bound of the output nearest to its bound.  `exact`: bitwise
    equal."""

    key: IntKey
    error: float
    allowed: float
    exact: bool

    @property
    def wrong(self) -> bool:
        """Whether the error exceeds its bound."""
        return not (self.exact or (self.error <= self.allowed and self.allowed > 0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """The results of the bundle or of one baseline.  `starts`: seconds of each phase (`protocol.PHASES`), a row per process.
    `why`: one line that says why something was not measured; "" if everything was."""

    name: str
    starts: tuple[tuple[float, ...], ...]
    timings: tuple[Timing, ...]
    memory: Memory | None
    errors: tuple[Error, ...]
    why: str

    def firsts(self) -> list[float]:
        """Returns for each start the seconds from process start to the first output."""
        return [sum(start[: len(FIRST)]) for start in self.starts]

    def readies(self) -> list[float]:
        """Returns for each start the seconds until every measured int_key is ready."""
        return [sum(start) for start in self.starts]

    def phase(self, index: int) -> float:
        """Returns the median seconds of one phase."""
        return median([start[index] for start in self.starts])

    def timing(self, what: str, key: IntKey) -> Timing | None:
        """Returns the timing of a kind of call at an int_key, or None."""
        return next((timing for timing in self.timings if (timing.what, timing.key) == (what, key)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine of the benchmark.  For a bundle of the cpu target `gpu` is "" and `driver`, the driver's CUDA version, is 0.
    `load`: the load average before the benchmark; `date`: UTC, ISO 8601."""

    processor: str
    cores: int
    gpu: str
    driver: int
    versions: tuple[tuple[str, str], ...]
    load: float
    date: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """Results of the bundle at `path` and its baselines.  `ways`: the bundle, then the baselines.

    `keys`: the measured int_keys; `names`: the keys as text; `recorded`: the number of int_keys in the bundle.  `notes`: (topic,
    text) that explain the numbers.  `interrupted`: whether Ctrl-C ended the benchmark early."""

    path: str
    name: str
    target: str
    machine: Machine
    keys: tuple[IntKey, ...]
    names: tuple[str, ...]
    recorded: int
    rounds: int
    ways: tuple[Way, ...]
    notes: tuple[tuple[str, str], ...]
    interrupted: bool

    @property
    def bundle(self) -> Way:
        """The row of the bundle."""
        return self.ways[0]

    def wrong(self) -> list[str]:
        """Returns a sentence for every int_key of the bundle or of a baseline whose outputs are wrong."""
        names = dict(zip(self.keys, self.names, strict=True))
        return [
            f"{way.name}: outputs at {names[deviation.key]} differ by {deviation.error:.1e}, "
            + (f"allowed {deviation.allowed:.1e}" if deviation.allowed else "expected the recorded bits")
            for way in self.ways
            for deviation in way.errors
            if deviation.wrong
        ]

    def kinds(self) -> tuple[str, ...]:
        """Returns the kinds of timings of this target."""
        return ("call",) if self.target == "cpu" else ("device", "dispatch")

    def plain(self) -> dict[str, Any]:
        """Returns all numbers, and ratios of medians to the bundle's, for JSON.  Infinities become text."""
        document = _finite(asdict(self))
        for way, row in zip(self.ways, document["ways"], strict=True):
            row["starts"] = [dict(zip(PHASES, start, strict=True)) for start in way.starts]
            row["ratio"] = ratio(way.firsts(), self.bundle.firsts())
            for timing, timing_row in zip(way.timings, row["timings"], strict=True):
                base = self.bundle.timing(timing.what, timing.key)
                timing_row["ratio"] = ratio(timing.seconds, base.seconds if base else ())
        return {**document, "wrong": self.wrong()}


def this_machine(about: dict[str, Any], load: float) -> Machine:
    """Describes this machine.  `about`: the GPU facts of the bundle's worker; `load`: the load average before the benchmark."""
    versions = {"python": platform.python_version(), "cgcompile": VERSION}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Machine(
        processor=processor_name(),
        cores=len(os.sched_getaffinity(0)),
        gpu=about.get("gpu", ""),
        driver=about.get("driver", 0),
        versions=tuple(versions.items()),
        load=load,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float | None:
    """Returns the baseline's median divided by the bundle's, None if one of them was not measured."""
    return median(theirs) / median(ours) if theirs and ours and median(ours) > 0 else None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(element) for name, element in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(element) for element in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
