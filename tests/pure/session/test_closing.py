"""A thread that uses a session while it is being closed gets the error that it was closed, not that another thread uses it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cgbundle.call.locks import ExclusiveLock
from cgbundle.cpu.backend import SharedLock
from cgbundle.errors import ProgramClosed, SessionBusy
from cgbundle.gpu.backend import CudaBackend
from cgbundle.program import Program
from cgbundle.tensors.tensor import from_bytes
from tests.helpers.bundles import state_bundles
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.cuda_bundles import FLOATS, inputs
from tests.helpers.drivers.fake_driver import FakeDriver, install
from tests.helpers.raising import raises


def met(use: Callable[[], object]) -> list[type[Exception]]:
    """Calls `use` again and again until it raises ProgramClosed. Returns the types of its errors."""
    errors: list[type[Exception]] = []
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            use()
        except (SessionBusy, ProgramClosed) as error:
            errors.append(type(error))
            if isinstance(error, ProgramClosed):
                break
        time.sleep(0.001)
    return errors


def enter(lock: Any) -> None:
    with lock.turn:
        pass


def test_a_sessions_lock_that_is_waited_for_to_close_it() -> None:
    lock = ExclusiveLock("tiny", alone=True)
    errors: list[type[Exception]] = []
    with lock.turn:
        closer = threading.Thread(target=lock.close)
        other = threading.Thread(target=lambda: errors.extend(met(lambda: enter(lock))))
        closer.start()
        other.start()
        other.join(60)
        assert closer.is_alive(), "it waits for who holds the lock"
        enter(lock)  # the thread that holds the lock can continue
    closer.join(60)
    assert errors[-1] is ProgramClosed and not closer.is_alive()
    with raises(ProgramClosed, match="program 'tiny' was closed"):
        enter(lock)


@pytest.mark.parametrize(
    "make", [lambda: SharedLock("tiny"), lambda: ExclusiveLock("tiny", alone=False)], ids=["shared", "one-by-one"]
)
def test_a_programs_lock_that_is_waited_for(make: Callable[[], Any]) -> None:
    lock, order = make(), []
    with lock.turn:
        closer = threading.Thread(target=lambda: (lock.close(), order.append("closed")))
        closer.start()
        closer.join(0.02)
        order.append("left")
    closer.join(60)
    assert order == ["left", "closed"]
    assert met(lambda: enter(lock)) == [ProgramClosed]


def test_a_call_beside_the_close_of_its_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, FakeDriver())
    manifest = state_bundles.write(tmp_path)
    program = Program(manifest, CudaBackend(ArchiveOf(tmp_path, manifest), 0, "graph", lazy=False), "pad", "copy")
    session = program.session()
    x = from_bytes(inputs(4, 0).tobytes(), "float32", (4, FLOATS))
    session(x)
    giving, go_on = threading.Event(), threading.Event()
    give_back = CudaBackend._give_back

    def slow(backend: CudaBackend) -> None:
        giving.set()
        assert go_on.wait(60)
        give_back(backend)

    monkeypatch.setattr(CudaBackend, "_give_back", slow)
    closer = threading.Thread(target=program.close)
    closer.start()
    assert giving.wait(60)
    for use in (lambda: session(x), session.reset, lambda: session.state["total"]):
        with raises("program-closed"):
            use()
    go_on.set()
    closer.join(60)
    with raises("program-closed"):
        session(x)
