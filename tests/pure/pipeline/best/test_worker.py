"""The process that times graphs, on a fake driver whose clock counts its own handles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cgbundle.errors import BundleError
from cgbundle.format.schema import Manifest
from cgbundle.gpu.backend import CudaBackend
from cgbundle.program import Program
from cgbundle.tensors.tensor import from_bytes
from cgcompile.pipeline.best import worker
from cgcompile.pipeline.best.timing import TimingJob
from tests.helpers.bundles import state_bundles
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.cuda_bundles import FLOATS, KEYS, RESULT, inputs
from tests.helpers.bundles.edits import edited
from tests.helpers.drivers.fake_driver import FakeDriver
from tests.helpers.raising import raises


@pytest.fixture
def fake(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Makes the worker use this driver, too."""
    monkeypatch.setattr(worker, "cu", fake)
    monkeypatch.setattr(worker, "inputs_of", lambda self_test, manifest, key: [batch(*key)])
    return fake


def batch(key: int) -> Any:
    return from_bytes(inputs(key).tobytes(), "float32", (key, FLOATS))


def alone(manifest: Manifest) -> Manifest:
    """Returns a manifest with one graph for each key and without state. The graph's result is the output."""

    def program(row: Any) -> Any:
        values = [replace(value, offset=RESULT) if index == 2 else value for index, value in enumerate(row.values[:3])]
        return replace(row, values=tuple(values), steps=row.steps[:1], outputs=(2,))

    return edited(
        manifest, mutated_buffers=(), random=None, aliases=(), outputs=manifest.entries[0].outputs[:1], result={"tensor": 0},
        programs=tuple(map(program, manifest.entries[0].programs)),
        weights=tuple([replace(row, memory="weights") for row in manifest.weights]),
    )  # fmt: skip


def timed(monkeypatch: pytest.MonkeyPatch, folder: Path, manifest: Manifest, count: int) -> list[Any]:
    def opened(path: Path) -> Program:
        program = Program(manifest, CudaBackend(ArchiveOf(folder, manifest), 0, "graph"), "error", "copy")
        monkeypatch.setattr(program, "open_self_test", lambda: SimpleNamespace(close=lambda: None), raising=False)
        return program

    monkeypatch.setattr(worker, "open_program", opened)
    return worker.work(TimingJob(bundles=(folder,) * count))


def test_calls_from_the_first_state_are_timed_graph_by_graph(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manifest = state_bundles.write(tmp_path)
    timings = timed(monkeypatch, tmp_path, manifest, 2)
    assert [sorted(times) for times in timings] == [[("forward", (key,)) for key in KEYS]] * 2
    assert all(len(time) == 1 and time[0] > 0 for times in timings for time in times.values()), "the copy is no graph"
    calls = worker.WARMUPS + worker.ROUNDS
    assert fake.calls.count("cuGraphLaunch") == 2 * len(KEYS) * calls


def test_a_graph_alone_is_launched_again_and_again(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    manifest = alone(state_bundles.write(tmp_path))
    times = iter(range(1, 10_000))
    monkeypatch.setattr(fake, "do_cuEventElapsedTime", lambda start, end: float(next(times)), raising=False)
    monkeypatch.setattr(worker, "BURST", 2_000_000.0)
    timings = timed(monkeypatch, tmp_path, manifest, 2)
    assert [len(time) for times in timings for time in times.values()] == [1] * 4
    assert fake.calls.count("cuGraphLaunch") > 2 * len(KEYS) * worker.ROUNDS * 10, "bursts, and not single launches"
    assert all(time[0] < 1e4 for times in timings for time in times.values()), "microseconds of one launch"


def test_a_bundle_that_cannot_be_loaded_says_so(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(path: Path) -> None:
        raise BundleError("table-invalid", "graphs/model-1.bin: cut short")

    monkeypatch.setattr(worker, "open_program", refused)
    with raises("worker-died", match=r"timing: graphs/model-1\.bin: cut short"):
        worker.work(TimingJob(bundles=(tmp_path,)))
