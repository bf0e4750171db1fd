"""A bundle of many int_keys answers before all of its graphs are built, on a fake driver. The other graphs are built once, by a
background thread or by the first call that needs them."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cgbundle import process
from cgbundle.errors import CgbundleError
from cgbundle.format.schema import Manifest
from cgbundle.gpu import backend as cuda_backend
from cgbundle.gpu.backend import CudaBackend
from cgbundle.process import Background
from tests.helpers.bundles import cuda_bundles
from tests.helpers.bundles.cuda_bundles import KEYS, expected, inputs
from tests.helpers.drivers.cuda_calls import call, opened
from tests.helpers.drivers.fake_driver import FakeDriver
from tests.helpers.places import ROOT
from tests.helpers.raising import raises

BUILT = "cuGraphInstantiate"


@pytest.fixture
def bundle(tmp_path: Path) -> tuple[Manifest, Path]:
    return cuda_bundles.write(tmp_path / "tiny.cgb", b"an image"), tmp_path / "tiny.cgb"


class Waiting:
    """Replaces the background thread: the test runs its steps."""

    def __init__(self, steps: Iterator[float]) -> None:
        self.step: Callable[[], object] = lambda: next(steps, "done")
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_backend, "Background", Waiting)


def answers(backend: CudaBackend, number: int) -> bool:
    values = inputs(KEYS[number])
    return call(backend, number, values) == expected(values)


@pytest.mark.parametrize(("lazy", "built"), [(None, 1), (False, 2), (True, 0)])
@pytest.mark.usefixtures("by_hand")
def test_how_many_are_built_at_load(fake: FakeDriver, bundle: tuple[Manifest, Path], lazy: bool | None, built: int) -> None:
    backend = opened(*bundle, lazy=lazy)
    assert fake.calls.count(BUILT) == built
    assert (backend._background is not None) == (lazy is None)
    backend.close()


@pytest.mark.usefixtures("by_hand")
def test_a_call_that_comes_before_builds_its_key_and_no_one_again(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    backend = opened(*bundle, lazy=None)
    assert answers(backend, 1) and fake.calls.count(BUILT) == 2
    assert [backend._background.step() for _ in range(3)] == [process.PAUSE, process.PAUSE, "done"]  # type: ignore[union-attr]
    assert answers(backend, 0) and answers(backend, 1) and fake.calls.count(BUILT) == 2
    backend.close()


@pytest.mark.usefixtures("by_hand")
def test_a_step_after_the_close_builds_nothing(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    backend = opened(*bundle, lazy=None)
    background = backend._background
    backend.close()
    assert isinstance(background, Waiting) and background.stopped
    assert background.step() == "done" and fake.calls.count(BUILT) == 1


@pytest.mark.usefixtures("by_hand")
def test_warming_up_waits_for_all(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    backend = opened(*bundle, lazy=None)
    backend.populate()
    assert fake.calls.count(BUILT) == 2
    backend.close()


@pytest.mark.usefixtures("by_hand")
def test_a_session_builds_all_of_its_own(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    backend = opened(*bundle, lazy=None)
    session = backend.session()
    assert fake.calls.count(BUILT) == 1 + 2 and session._background is None
    session.close()
    backend.close()


@pytest.mark.usefixtures("by_hand")
def test_a_call_inside_a_capture_builds_its_key(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    """Such a call works whether the background thread has built the graph or not."""
    backend, values = opened(*bundle, lazy=None), inputs(KEYS[1])
    fake.capturing.add(64)
    with backend.locked(64) as stream:
        (output,) = backend.run(1, [values.buffer_info()[0]], 0, stream).addresses
    fake.capturing.clear()
    for run in fake.captured:
        run()
    assert array("f", ctypes.string_at(output, 4 * len(values))) == expected(values)
    backend.close()


def test_the_first_call_does_not_wait_for_the_thread(
    fake: FakeDriver, bundle: tuple[Manifest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "FIRST", 3600)
    backend = opened(*bundle, lazy=None)
    assert answers(backend, 0) and fake.calls.count(BUILT) == 1
    backend.close()  # close does not wait for the thread either
    assert fake.calls.count(BUILT) == 1


def test_the_thread_builds_the_rest(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    backend = opened(*bundle, lazy=None)
    assert isinstance(backend._background, Background)
    backend._background._thread.join(60)
    assert fake.calls.count(BUILT) == 2
    assert answers(backend, 0) and answers(backend, 1)
    backend.close()


def test_close_waits_for_the_thread(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    for _ in range(20):
        backend = opened(*bundle, lazy=None)
        backend.close()
        assert not backend._background._thread.is_alive()  # type: ignore[union-attr]


@pytest.mark.usefixtures("by_hand")
def test_what_fails_in_the_background_is_met_by_the_call(fake: FakeDriver, bundle: tuple[Manifest, Path]) -> None:
    backend = opened(*bundle, lazy=None)
    fake.fail_at, fake.error = len(fake.calls) + 6, 2
    with pytest.raises(CgbundleError):
        for _ in range(2):
            backend._background.step()  # type: ignore[union-attr]
    fake.fail_at = len(fake.calls) + 6
    with raises("out-of-memory"):
        answers(backend, 1)
    fake.fail_at = -1
    assert answers(backend, 1)
    backend.close()


def test_an_error_ends_the_background_without_a_word() -> None:
    taken: list[int] = []

    def steps() -> Iterator[None]:
        taken.append(1)
        yield
        raise CgbundleError("out-of-memory", "no more")

    background = Background(steps())
    background._thread.join(60)
    background.stop()
    background.stop()
    assert taken == [1]


def test_a_step_may_stop_it() -> None:
    backgrounds: list[Background] = []
    ready = threading.Event()

    def steps() -> Iterator[None]:
        ready.wait(60)
        backgrounds[0].stop()
        yield
        pytest.fail("after the end")

    backgrounds.append(Background(steps()))
    ready.set()
    backgrounds[0]._thread.join(60)
    assert not backgrounds[0]._thread.is_alive()


def test_a_process_that_ends_does_not_wait_for_the_remaining_steps() -> None:
    """An engine that was busy until its end has graphs that nobody needs any more."""
    program = (
        "import itertools, time\n"
        "from cgbundle.process import Background\n"
        "Background(itertools.repeat(0.01))\n"
        "time.sleep(0.1)\n"
    )  # fmt: skip
    environment = {"PYTHONPATH": str(ROOT / "bundles")}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=60, check=False).returncode == 0
