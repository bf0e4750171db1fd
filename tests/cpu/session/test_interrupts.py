"""An interrupt, such as Ctrl-C, at any point of a CPU call, a load or a close is raised in the caller. Later calls are right, and
no lock or file stays taken."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cgbundle
from cgbundle import process
from cgbundle.call import outputs
from cgbundle.cpu.host_region import INSTANCES
from cgbundle.errors import ProgramClosed
from tests.helpers.interrupts import Interrupt, at_every_point, interrupted_at
from tests.helpers.places import GOLDEN, skip_older_torch

numpy = pytest.importorskip("numpy")
pytest.importorskip("torch")  # its libraries run the code

SHARED, STATE = "v1/cpu_mlp", "v1/cpu_state"
"""A bundle whose replays run concurrently, and one whose replays share memory."""

PATIENCE = 60


@pytest.fixture(autouse=True)
def lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Collects exceptions that could not be raised: in `__del__`, or in a callback."""
    skip_older_torch()
    errors: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    yield errors
    assert not errors


def called(program: Any) -> Any:
    """Returns the result of a call; resets the state of a program first."""
    if len(program.state):
        program.reset()
        program.seed(0)
    answer = program(numpy.ones((1, 16), numpy.float32))
    return [numpy.asarray(tensor).tolist() for tensor in (answer if isinstance(answer, list | tuple) else [answer])]


def elsewhere(act: Callable[[], Any]) -> Any:
    """Returns the result of `act` in another thread: it would wait forever for a lock that was not released."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(act()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert answers, "locked"
    return answers[0]


@pytest.mark.parametrize("large", [1, 128 << 10])
@pytest.mark.parametrize(("golden", "alone"), [(SHARED, False), (SHARED, True), (STATE, False)])
def test_a_call(golden: str, alone: bool, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "LARGE", large)
    root = cgbundle.load(GOLDEN / f"{golden}.cgb")
    program = root.session() if alone else root
    expected = called(program)
    waiting = len(process._WAITING)

    def check(point: str) -> None:
        assert elsewhere(lambda: called(program)) == expected, point

    assert not at_every_point(lambda: called(program), check)
    assert len(process._WAITING) <= waiting + INSTANCES, "outputs that nobody freed"
    assert elsewhere(lambda: (program.close(), root.close()))


@pytest.mark.parametrize("alone", [False, True])
def test_an_interrupted_close(alone: bool) -> None:
    """The next close continues after an interrupted one."""
    programs: list[Any] = []

    def close() -> None:
        for program in programs:
            program.close()

    def check(point: str) -> None:
        close()
        for program in programs:
            assert program._backend._bound is None and program._backend._shared is None, point
            with pytest.raises(ProgramClosed):
                called(program)

    number = 0
    while True:
        root = cgbundle.load(GOLDEN / f"{SHARED}.cgb")
        programs[:] = [root.session(), root] if alone else [root]
        called(programs[0])
        met: list[str] = []
        try:
            with interrupted_at(number) as met:
                close()
        except Interrupt:
            pass
        else:
            assert not met, f"lost at {met}"
        check(str(met))
        if not met:
            return
        number += 1


def test_an_interrupted_load_leaks_nothing() -> None:
    """An interrupted load releases its descriptors and code."""
    before = dict(process._WAITING)
    number = 0
    while True:
        met: list[str] = []
        try:
            with interrupted_at(number) as met:
                cgbundle.load(GOLDEN / f"{SHARED}.cgb").close()
        except Interrupt:
            number += 29  # not every point, because a load has thousands
            continue
        assert not met, f"lost at {met}"
        break
    assert len(process._WAITING) <= len(before)


@pytest.mark.parametrize("golden", [SHARED, STATE])
def test_the_handler_of_a_signal_closes_the_program_that_it_interrupts(golden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers that end the process may close programs. Resources of the interrupted call stay valid until the call ends."""
    program = cgbundle.load(GOLDEN / f"{golden}.cgb")
    called(program)
    backend = program._backend
    run, replies = type(backend).run, []

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return run(backend, *arguments)

    before = signal.signal(signal.SIGUSR1, lambda number, frame: program.close())
    try:
        monkeypatch.setattr(backend, "run", interrupted, raising=False)
        monkeypatch.setattr(program, "_backend", backend)
        replies.append(program(numpy.ones((1, 16), numpy.float32)))
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(ProgramClosed):
        called(program)
    program.close()


def test_a_thread_that_waits_for_its_turn() -> None:
    """An interrupt of a waiting thread does not affect later threads."""
    with cgbundle.load(GOLDEN / f"{STATE}.cgb") as program:
        expected = called(program)
        held, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            with program._backend.turn:
                held.set()
                assert go_on.wait(PATIENCE)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(PATIENCE)
        before = signal.signal(signal.SIGALRM, _raise)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Interrupt):
                called(program)
        finally:
            signal.signal(signal.SIGALRM, before)
        go_on.set()
        holder.join(PATIENCE)
        assert called(program) == expected


def _raise(number: int, frame: object) -> None:
    raise Interrupt
