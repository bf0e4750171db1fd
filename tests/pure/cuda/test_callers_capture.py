"""Calls inside a CUDA graph capture of the caller, and calls on many streams, on a fake driver: what is allowed, what is refused
before any work is enqueued, and which driver calls detect a capture."""

from __future__ import annotations

import ctypes
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cgbundle.format.schema import Manifest
from cgbundle.gpu import backend as backend_module
from cgbundle.gpu.backend import CudaBackend
from cgbundle.program import state
from cgbundle.tensors import library as detection
from cgbundle.tensors.tensor import from_bytes
from tests.helpers.bundles import cuda_bundles, state_bundles
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.cuda_bundles import KEYS, expected, inputs
from tests.helpers.drivers.fake_driver import FakeDriver, install
from tests.helpers.raising import raises
from tests.pure.cuda.fake_regions import Regions
from tests.pure.cuda.test_host_steps import bundle as hosted  # noqa: F401
from tests.pure.cuda.test_host_steps import regions  # noqa: F401
from tests.pure.session.test_sessions import batch, opened

STREAM, OTHER = 64, 65


@pytest.fixture
def bundle(tmp_path: Path) -> tuple[Manifest, Path]:
    return cuda_bundles.write(tmp_path / "tiny.cgb", b"an image"), tmp_path / "tiny.cgb"


def calls_on(bundle: tuple[Manifest, Path], mode: str = "graph", *, lazy: bool = False) -> CudaBackend:
    manifest, folder = bundle
    return CudaBackend(ArchiveOf(folder, manifest), 0, mode, lazy=lazy)


def run(calls: CudaBackend, number: int, x: array[float], stream: int | None) -> int:
    with calls.locked(stream) as stream:
        (address,) = calls.run(number, [x.buffer_info()[0]], 0, stream).addresses
    return int(address)


def read(address: int, count: int) -> list[float]:
    return array("f", ctypes.string_at(address, 4 * count)).tolist()


@pytest.mark.parametrize("mode", ["graph", "stream"])
def test_a_captured_call_runs_when_the_callers_graph_does(fake: FakeDriver, bundle: tuple[Manifest, Path], mode: str) -> None:
    calls = calls_on(bundle, mode)
    x = inputs(KEYS[0], 1)
    address = run(calls, 0, x, STREAM)
    assert read(address, len(x)) == expected(x).tolist()
    fake.capturing.add(STREAM)
    before = len(fake.calls)
    again = inputs(KEYS[0], 2)
    x[:] = again
    assert run(calls, 0, x, STREAM) == address
    called = fake.calls[before:]
    assert not [name for name in called if "Event" in name or "Synchronize" in name]
    assert called.count("cuStreamIsCapturing") <= 2
    fake.capturing.clear()
    assert read(address, len(x)) == expected(inputs(KEYS[0], 1)).tolist(), "nothing ran yet"
    for seed in (3, 4):
        x[:] = inputs(KEYS[0], seed)
        for piece in fake.captured:
            piece()
        assert read(address, len(x)) == expected(x).tolist(), "the copy of the input is part of the graph"
    calls.close()


@pytest.mark.parametrize("first", [None, 0, STREAM, OTHER])
def test_calls_after_a_capture_keep_their_order(fake: FakeDriver, bundle: tuple[Manifest, Path], first: int | None) -> None:
    """Later calls must not wait for an event of a captured call: such a wait would join the capture."""
    calls = calls_on(bundle)
    x = inputs(KEYS[0])
    run(calls, 0, x, first)
    fake.capturing.add(STREAM)
    run(calls, 0, x, STREAM)
    for stream in (OTHER, None, 0):
        before = len(fake.calls)
        run(calls, 0, x, stream)
        same = stream == first or first == STREAM
        assert ("cuStreamWaitEvent" in fake.calls[before:]) or same or stream == first
        first = stream
    run(calls, 0, x, STREAM)
    fake.capturing.clear()
    before = len(fake.calls)
    run(calls, 0, x, STREAM)
    assert [name for name in fake.calls[before:] if "Event" in name] == ["cuEventRecord", "cuStreamWaitEvent", "cuEventRecord"]
    calls.close()


def test_what_the_detection_costs(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    """A call on a stream that cannot be captured, such as torch's default stream, asks the driver nothing. On other streams it asks
    once."""
    calls = calls_on(bundle)
    x = inputs(KEYS[0])
    for stream, wanted in (
        (None, []), (0, []), (1, []),
        (STREAM, ["cuStreamIsCapturing", "cuEventRecord"]), (2, ["cuStreamIsCapturing", "cuStreamWaitEvent", "cuEventRecord"]),
    ):  # fmt: skip
        run(calls, 0, x, stream)
        before = len(fake.calls)
        run(calls, 0, x, stream)
        driver_calls = [name for name in fake.calls[before:] if name.startswith(("cuStream", "cuEvent"))]
        assert driver_calls == wanted, "2 is another stream in every thread: calls there are put in order each time"
    calls.close()


def test_a_key_that_is_not_built_yet_is_refused(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    calls = calls_on(bundle, lazy=True)
    x = inputs(KEYS[1])
    fake.capturing.add(STREAM)
    before = len(fake.calls)
    with raises("capture-refused", match=r"int_key \(8,\) is not built yet") as caught:
        run(calls, 1, x, STREAM)
    assert "lazy=False" in caught.value.hint and not fake.captured
    assert not [name for name in fake.calls[before:] if "Graph" in name or "Memcpy" in name]
    run(calls, 1, x, OTHER)
    run(calls, 1, x, STREAM)
    assert len(fake.captured) == 3, "the copy in, the graph, the copy step"
    fake.capturing.clear()
    calls.close()


def test_operations_on_the_host_are_refused(
    fake: FakeDriver, hosted: tuple[Manifest, Path], regions: Regions  # noqa: F811
) -> None:  # fmt: skip
    manifest, folder = hosted
    calls = CudaBackend(ArchiveOf(folder, manifest), 0, "graph", lazy=False)
    fake.capturing.add(STREAM)
    with raises("capture-refused", match="operations on the host, which this bundle has, cannot become part of a CUDA graph"):
        calls.locked(STREAM).__enter__()
    assert not fake.captured
    fake.capturing.clear()
    with calls.locked(STREAM):
        pass
    calls.close()


def test_inputs_of_the_cpu_and_state_are_refused(
    fake: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    bundle = state_bundles.write(tmp_path / "tiny.cgb"), tmp_path / "tiny.cgb"
    with opened(bundle) as program:
        for module in (backend_module, state):
            monkeypatch.setattr(module, "caller_captures", lambda: True)
        before = len(fake.calls)
        with raises("capture-refused", match="inputs on the CPU cannot become part of the CUDA graph that is being captured"):
            program(batch(4))
        for use in (
            program.reset, lambda: program.seed(3), lambda: program.state["total"], lambda: program.state_bytes(3),
            lambda: program.state.__setitem__("marks", from_bytes(bytes(8), "uint8", (8,))),
        ):  # fmt: skip
            with raises("capture-refused", match="while a CUDA graph is captured"):
                use()
        assert not [name for name in fake.calls[before:] if "Mem" in name or "Graph" in name]
        monkeypatch.undo()
        install(monkeypatch, fake)
        program(batch(4))


def test_whether_the_caller_captures_is_asked_of_the_callers_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, answer: bool) -> None:
            self.answer = answer

        def is_capturing(self) -> bool:
            return self.answer

    def torch(initialized: bool, capturing: bool) -> Any:
        cuda = SimpleNamespace(is_initialized=lambda: initialized, is_current_stream_capturing=lambda: capturing)
        return SimpleNamespace(cuda=cuda)

    def cupy(answer: bool) -> Any:
        return SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: Stream(answer)))

    for modules, answer in (
        ({}, False), ({"torch": torch(False, True)}, False), ({"torch": torch(True, False)}, False),
        ({"torch": torch(True, True)}, True), ({"cupy": cupy(True)}, True),
        ({"cupy": cupy(False), "torch": torch(True, False)}, False),
    ):  # fmt: skip
        monkeypatch.setattr(detection, "sys", SimpleNamespace(modules=modules))
        assert detection.caller_captures() is answer


def test_allocating_and_freeing_does_not_disturb_a_capture_elsewhere(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    """The driver forbids some calls while another thread captures. The runtime makes these calls in relaxed mode."""
    unsafe = ("cuMemAlloc", "cuMemFree", "cuMemHostAlloc", "cuMemFreeHost", "cuModuleLoadData", "cuModuleUnload",
              "cuGraphInstantiate", "cuGraphExecDestroy", "cuEventDestroy")  # fmt: skip
    seen: set[str] = set()
    for name in unsafe:

        def watched(*arguments: Any, name: str = name, real: Any = getattr(fake, f"do_{name}")) -> Any:
            assert fake.mode() == 2, name
            seen.add(name)
            return real(*arguments)

        setattr(fake, f"do_{name}", watched)
    backend = calls_on(bundle)
    backend.session().close()
    backend.close()
    assert fake.mode() == 0 and {"cuMemAlloc", "cuMemFree", "cuModuleLoadData", "cuGraphInstantiate"} <= seen
