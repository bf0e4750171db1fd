"""Weights of a program on a GPU are updated completely or not at all, on a fake driver, and no object of the driver remains."""

from __future__ import annotations

import ctypes
import threading
from array import array
from pathlib import Path

import pytest

from cgbundle.call.update import update
from cgbundle.cuda import memory, upload
from cgbundle.errors import CgbundleError
from cgbundle.format import safetensors_files
from cgbundle.format.schema import Manifest
from cgbundle.gpu import update as of_the_gpu
from cgbundle.gpu.backend import CudaBackend
from cgbundle.tensors.tensor import Tensor, from_bytes
from tests.helpers.bundles import cuda_bundles
from tests.helpers.bundles.cuda_bundles import FLOATS, KEYS, inputs
from tests.helpers.drivers.cuda_calls import allocate, call, opened
from tests.helpers.drivers.fake_driver import FakeDriver, install
from tests.helpers.raising import raises

COUNT = KEYS[-1] * FLOATS


@pytest.fixture
def bundle(tmp_path: Path) -> tuple[Manifest, Path]:
    return cuda_bundles.write(tmp_path / "tiny.cgb", b"an image"), tmp_path / "tiny.cgb"


def offsets(first: float) -> array[float]:
    return array("f", [first + 2 * i for i in range(COUNT)])


def new_weights(first: float) -> dict[str, Tensor]:
    return {"offsets": from_bytes(offsets(first), "float32", (COUNT,)), "small": from_bytes(b"xyz", "uint8", (3,))}


def stored(folder: Path, first: float) -> Path:
    path = folder / "new.safetensors"
    with open(path, "wb") as file:
        safetensors_files.write(
            file, {"tied": ("float32", (COUNT,), lambda: offsets(first)), "small": ("uint8", (3,), lambda: b"xyz")}
        )
    return path


def answers(backend: CudaBackend, first: float | None, number: int = 0) -> bool:
    """Returns whether a program computes with weights that start with `first` (None: with those of the bundle)."""
    x = inputs(KEYS[number])
    weights = array("f", range(COUNT)) if first is None else offsets(first)
    return call(backend, number, x) == array("f", [3 * (1 + value) + 1 + 2.5 + weights[i] for i, value in enumerate(x)])


@pytest.mark.parametrize("kind", ["tensors", "file"])
@pytest.mark.parametrize("room", [True, False], ids=["staged on the GPU", "staged on the CPU"])
def test_every_session_has_the_new_weights(
    fake: FakeDriver, bundle: tuple[Manifest, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, room: bool
) -> None:
    if not room:
        real = memory.allocate
        taken = lambda size, what: real(1 << 62 if what == "new weights" else size, what)  # noqa: E731
        monkeypatch.setattr(memory, "allocate", taken)
        monkeypatch.setattr(fake, "do_cuMemAlloc", limited(fake.do_cuMemAlloc))
    backend = opened(*bundle)
    sessions = [backend, backend.session()]
    assert all(answers(session, None, number) for session in sessions for number in range(2))
    for first in (5.0, -40.0):
        before = len(fake.live)
        update(bundle[0], [sessions], new_weights(first) if kind == "tensors" else stored(tmp_path, first), partial=False)
        assert len(fake.live) == before and backend.updated
        assert all(answers(session, first, number) for session in sessions for number in range(2))
    later = backend.session()
    assert answers(later, -40.0) and ctypes.string_at(later.address(0), 3) == b"xyz"
    for open_session in (later, *reversed(sessions)):
        open_session.close()


def limited(allocate: object) -> object:
    def limited(size: int) -> object:
        return (2,) if size >= 1 << 62 else allocate(size)  # type: ignore[operator]

    return limited


def test_a_tensor_of_the_gpu_is_copied_where_it_lies(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    backend = opened(*bundle)
    output = allocate(backend, 4 * COUNT)
    ctypes.memmove(output.address, offsets(9.0).tobytes(), 4 * COUNT)
    before = fake.calls.count("cuMemAlloc")
    update(bundle[0], [[backend]], {"offsets": Tensor(output.address, "float32", (COUNT,), None, output, 0)}, partial=True)
    assert answers(backend, 9.0) and fake.calls.count("cuMemAlloc") == before
    output.free()
    weight = Tensor(backend.address(1), "float32", (COUNT,), None, backend, 0)
    update(bundle[0], [[backend]], {"tied": weight}, partial=True)
    assert answers(backend, 9.0) and fake.calls.count("cuMemAlloc") == before + 1, "what will be written over is copied first"
    with raises("update-invalid", match="expected a tensor on the CPU or CUDA device 0, got one on device 1"):
        update(bundle[0], [[backend]], {"tied": Tensor(1, "float32", (COUNT,), None, None, 1)}, partial=True)
    backend.close()


def test_a_session_that_is_held_for_a_moment_is_waited_for(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    """While an update holds a session, the thread of this session waits, and does not get the error that another thread uses the
    session."""
    backend = opened(*bundle)
    session = backend.session()
    stopped, going, verdicts = threading.Event(), threading.Event(), []
    replace = of_the_gpu._replace

    def slow(*arguments: object) -> None:
        stopped.set()
        assert going.wait(60)
        replace(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_the_gpu, "_replace", slow)
        updating = threading.Thread(target=lambda: update(bundle[0], [[backend, session]], new_weights(1.0), partial=False))
        updating.start()
        assert stopped.wait(60)
        calling = threading.Thread(target=lambda: verdicts.append(answers(session, 1.0)))
        calling.start()
        calling.join(0.05)
        assert calling.is_alive() and not verdicts
        going.set()
        for thread in (updating, calling):
            thread.join(60)
    assert verdicts == [True]
    session.close()
    backend.close()


def test_whichever_call_fails_nothing_is_left_and_nothing_changed(
    monkeypatch: pytest.MonkeyPatch, bundle: tuple[Manifest, Path], tmp_path: Path
) -> None:
    monkeypatch.setattr(upload, "way", lambda size: upload.Way(1, 2, True))
    path, mixed = stored(tmp_path, 7.0), {"small": new_weights(7.0)["small"]}

    def run(fail: int) -> tuple[list[str], bool]:
        """Returns the calls of the two updates, and whether the first one failed."""
        fake = FakeDriver()
        install(monkeypatch, fake)
        backend = opened(*bundle)
        sessions = [backend, backend.session()]
        begin, failed = len(fake.calls), False
        fake.fail_at = begin + fail
        try:
            update(bundle[0], [sessions], path, partial=False)
            update(bundle[0], [sessions], mixed, partial=True)
        except CgbundleError:
            failed = True
        calls = fake.calls[begin:]
        fake.fail_at = -1
        last = calls[fail] if fail >= 0 else ""
        if failed and "cuMemcpyDtoDAsync" not in calls:
            assert all(answers(session, None) for session in sessions)
        for open_session in reversed(sessions):
            open_session.close()
        left = [item for item in fake.live.values() if item not in ("stream", "event")]
        assert not left or last in ("cuMemFree", "cuMemFreeHost", "cuMemHostUnregister"), (last, left)
        return calls, failed

    whole, failed = run(-1000)
    assert not failed
    assert sum(run(number)[1] for number in range(len(whole))) > 5
