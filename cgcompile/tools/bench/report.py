"""What a benchmark found: values, their medians, ratios to the bundle's, and where it ran."""

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
"""Those whose versions matter, where they are installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of one call at an int_key, a value per round.

    `what`: "call" is the whole call on the CPU; "dispatch" the CPU's part of it on a GPU; "device" its time by the GPU's clock."""

    what: str
    key: IntKey
    seconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes that a worker takes when every int_key is ready.

    `resident`: in main memory; `own`: those of it that no other process shares and no file backs; `device`: on the GPU beside the
    CUDA context (-1: no GPU, or not known)."""

    resident: int
    own: int
    device: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Error:
    """How far a way's outputs are from the self-test's: of the one nearest to its bound the error, and what is allowed.
    `exact`: all bits were the same."""

    key: IntKey
    error: float
    allowed: float
    exact: bool

    @property
    def wrong(self) -> bool:
        """Whether the outputs are not the model's."""
        return not (self.exact or (self.error <= self.allowed and self.allowed > 0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to serve the model.  `starts`: seconds of each phase (`protocol.PHASES`), a row per fresh process.  `why` says in one
    line why there is nothing, or nothing more, about it ("" where all was measured)."""

    name: str
    starts: tuple[tuple[float, ...], ...]
    timings: tuple[Timing, ...]
    memory: Memory | None
    errors: tuple[Error, ...]
    why: str

    def firsts(self) -> list[float]:
        """Seconds from process start to the first output, per start."""
        return [sum(start[: len(FIRST)]) for start in self.starts]

    def readies(self) -> list[float]:
        """Seconds from process start until every measured int_key is ready, per start."""
        return [sum(start) for start in self.starts]

    def phase(self, index: int) -> float:
        """The median of one phase, seconds."""
        return median([start[index] for start in self.starts])

    def timing(self, what: str, key: IntKey) -> Timing | None:
        """The calls of one kind at an int_key, where they were measured."""
        return next((timing for timing in self.timings if (timing.what, timing.key) == (what, key)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where it was measured.  `gpu` and `driver`, its CUDA version, are "" and 0 for a bundle of the cpu target.
    `load`: the load average before measuring; `date`: UTC, ISO 8601."""

    processor: str
    cores: int
    gpu: str
    driver: int
    versions: tuple[tuple[str, str], ...]
    load: float
    date: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """The bundle at `path` beside its baselines; the first of `ways` is the bundle.

    `keys`: the int_keys that were measured, named in `names`, of `recorded` in all.  `notes` (topic, text): what one must know to
    read it.  `interrupted`: not everything was measured."""

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
        """The bundle's own row."""
        return self.ways[0]

    def wrong(self) -> list[str]:
        """A sentence for every way and int_key whose outputs are not the model's."""
        names = dict(zip(self.keys, self.names, strict=True))
        return [
            f"{way.name}: outputs at {names[deviation.key]} differ by {deviation.error:.1e}, "
            + (f"allowed {deviation.allowed:.1e}" if deviation.allowed else "expected the recorded bits")
            for way in self.ways
            for deviation in way.errors
            if deviation.wrong
        ]

    def kinds(self) -> tuple[str, ...]:
        """The kinds of timings that this target has."""
        return ("call",) if self.target == "cpu" else ("device", "dispatch")

    def plain(self) -> dict[str, Any]:
        """All numbers and ratios of medians to the bundle's, for JSON: infinities are text."""
        document = _finite(asdict(self))
        for way, row in zip(self.ways, document["ways"], strict=True):
            row["starts"] = [dict(zip(PHASES, start, strict=True)) for start in way.starts]
            row["ratio"] = ratio(way.firsts(), self.bundle.firsts())
            for timing, timing_row in zip(way.timings, row["timings"], strict=True):
                base = self.bundle.timing(timing.what, timing.key)
                timing_row["ratio"] = ratio(timing.seconds, base.seconds if base else ())
        return {**document, "wrong": self.wrong()}


def this_machine(about: dict[str, Any], load: float) -> Machine:
    """This machine, now; `about` is what the bundle's worker said of the GPU, `load` the load average before."""
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
    """How many times as long as the bundle a baseline takes, by medians; None where one of them was not measured."""
    return median(theirs) / median(ours) if theirs and ours and median(ours) > 0 else None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(element) for name, element in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(element) for element in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
