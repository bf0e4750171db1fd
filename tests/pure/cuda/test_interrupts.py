"""After an interrupt anywhere in a GPU call, or after any driver function, the next call from any thread is right."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cgbundle.gpu.backend import CudaBackend
from cgbundle.program import Program
from cgbundle.tensors.tensor import Tensor, from_bytes
from tests.helpers.bundles import state_bundles
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.cuda_bundles import FLOATS, inputs
from tests.helpers.drivers.fake_driver import FakeDriver
from tests.helpers.interrupts import at_every_point

DRIVER = "FakeDriver.__getattr__.<locals>.call"

PATIENCE = 60


@pytest.mark.parametrize(("where", "alone"), [("cpu", False), ("gpu", True), ("gpu", False)])
def test_a_call(fake: FakeDriver, tmp_path: Path, alone: bool, where: str) -> None:
    manifest = state_bundles.write(tmp_path)
    root = Program(manifest, CudaBackend(ArchiveOf(tmp_path, manifest), 0, "graph", lazy=False), "pad", "view")
    program = root.session() if alone else root
    kept = from_bytes(inputs(4, 0).tobytes(), "float32", (4, FLOATS))
    value = kept if where == "cpu" else Tensor(kept.address, kept.dtype, kept.shape, kept.strides, kept, 0)

    def called() -> Any:
        program.reset()
        program(value)
        return program.state["total"].tolist()

    expected = called()
    called()  # a direct call
    with ThreadPoolExecutor(1) as others:

        def check(point: str) -> None:
            stack: list[Any] = getattr(fake._current, "stack", [])
            assert len(stack) <= 1, "one context at the most"
            stack.clear()
            assert others.submit(called).result(PATIENCE) == expected, point

        assert not at_every_point(called, check, DRIVER)
    program.close()
    root.close()
    assert not fake.live and not fake.retained


def test_work_of_a_stream_whose_end_was_not_marked(fake: FakeDriver, tmp_path: Path) -> None:
    """A call on another stream must then wait for all work."""
    manifest = state_bundles.write(tmp_path)
    with Program(manifest, CudaBackend(ArchiveOf(tmp_path, manifest), 0, "graph", lazy=False), "pad", "copy") as program:
        backend = program._backend
        with backend.turn:
            backend.begin(64)  # as if an interrupt had come before `end`
        before = len(fake.calls)
        with backend.locked(None):
            pass
        assert "cuCtxSynchronize" in fake.calls[before:]
        before = len(fake.calls)
        with backend.locked(64):
            pass
        with backend.locked(None):
            pass
        assert "cuCtxSynchronize" not in fake.calls[before:]
