"""A forked process cannot use its parent's program: it gets an error at once, even if a lock was held during the fork."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cgbundle.call.locks import ExclusiveLock
from cgbundle.cpu.backend import SharedLock
from cgbundle.cuda.driver import Context
from cgbundle.gpu.device_bundle import check_driver
from cgbundle.process import FORKS
from tests.helpers.bundles import cuda_bundles
from tests.helpers.drivers.cuda_calls import opened
from tests.helpers.drivers.fake_driver import FakeDriver, install
from tests.helpers.raising import raises


@pytest.fixture
def fork() -> Iterator[None]:
    """Restores what a fork changes. The tests only simulate a fork in this process."""
    before = {name: getattr(FORKS, name) for name in FORKS.__slots__}
    yield
    for name, value in before.items():
        setattr(FORKS, name, value)


@pytest.mark.parametrize("lock", [SharedLock("gpt"), ExclusiveLock("gpt", alone=False), ExclusiveLock("gpt", alone=True)])
def test_a_lock_that_another_thread_held_is_not_waited_for(lock: SharedLock | ExclusiveLock, fork: None) -> None:
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock.turn:
            held.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    FORKS.count()
    assert lock.inherited
    with raises("process-forked", match="program 'gpt' was loaded before this process was forked"), lock.turn:
        pass
    over.set()
    thread.join()


def test_a_program_for_a_gpu_is_its_parents_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork: None) -> None:
    fake = FakeDriver()
    install(monkeypatch, fake)
    backend = opened(cuda_bundles.write(tmp_path / "tiny.cgb", b"an image"), tmp_path / "tiny.cgb")
    with backend.locked(None):
        output = backend.copy_out(backend._memories.bases[0], 4, None)
    FORKS.count()
    seen = len(fake.calls)
    for act in (
        backend.session,
        lambda: backend.turn,
        lambda: backend.poison(0),
        lambda: backend.copy_out(0, 4, None),
    ):
        with raises("process-forked", match="program 'tiny' was loaded before this process was forked"):
            act()
    for begin in (lambda: Context(0), lambda: check_driver(backend._manifest.target)):
        with raises("process-forked", match="forked after its parent had used the GPU: CUDA does not work here"):
            begin()
    output.free()
    backend.close()
    assert len(fake.calls) == seen, "the driver is not asked in a forked process"


def test_code_for_the_cpu_lacks_its_threads_only_where_some_had_run(fork: None) -> None:
    FORKS.threads = False
    FORKS.count()
    FORKS.check_threads()
    FORKS.threads = True
    FORKS.count()
    with raises("process-forked", match="forked after its parent had run CPU code"):
        FORKS.check_threads()
    FORKS.count()
    with raises("process-forked", match="forked after its parent had run CPU code"):
        FORKS.check_threads()
