"""Times the graphs of several bundles on the GPU, in a subprocess that imports only the runtime."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cgbundle.format.file_names import FORWARD
from cgbundle.format.schema import IntKey

from ...errors import BuildError
from ...util.workers import Kind, Request, ask

GraphTimes = dict[tuple[str, IntKey], tuple[float, ...]]
"""(entry, int_key) -> times of its graphs, in microseconds."""

MARGIN = 1 << 30
"""Maximum bytes of GPU memory that a loaded bundle needs beside its memories: CUDA context, graphs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingJob:
    """Bundles of one program.  Their graphs are timed in turns, so that the GPU's clock is the same for all."""

    bundles: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Times by bundle name.  `failed`: errors of bundles that could not be timed."""

    times: Mapping[str, GraphTimes]
    failed: Mapping[str, BuildError]


def time_graphs(bundles: Mapping[str, Path], needs: Mapping[str, int], free: int, folder: Path) -> Timed:
    """Times all int_keys of every bundle.  `needs`: bytes of each bundle's memories; `free`: free bytes of the GPU.

    All bundles are loaded together if they fit, else one after the other.  A bundle that cannot be timed alone is in `failed`.
    """
    if sum(needs[name] + MARGIN for name in bundles) <= free:
        try:
            return Timed(times=_worker_times(list(bundles), bundles, folder), failed={})
        except BuildError:
            pass  # one bundle made the process fail, so each bundle is timed in its own process
    times: dict[str, GraphTimes] = {}
    failed: dict[str, BuildError] = {}
    for name in bundles:
        try:
            times |= _worker_times([name], bundles, folder)
        except BuildError as error:
            failed[name] = error
    return Timed(times=times, failed=failed)


def _worker_times(names: Sequence[str], bundles: Mapping[str, Path], folder: Path) -> dict[str, GraphTimes]:
    kind = Kind(
        module="cgcompile.pipeline.best.worker", folder=folder, died="worker-died", title="the process that times graphs",
        environment={"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")},  # by default a worker sees no GPU
    )  # fmt: skip
    job = TimingJob(bundles=tuple([bundles[name] for name in names]))
    requests = {FORWARD: Request(content=job, what=f"timing {', '.join(names)}")}
    [(_, answer)] = list(ask(kind, requests))
    return dict(zip(names, answer, strict=True))
