"""The actions of a thread of the soak test: random calls, sessions, loads, closes and reloads, with every answer compared.

A `Slot` holds a program that all threads use and any thread may replace. A call of a program that another thread has just closed
raises an error; the caller then uses the new program. Results that become invalid with their memory (views and shared outputs of a
GPU program) are used by one thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from random import Random
from threading import Lock
from typing import Any

import torch

import cgbundle
from cgbundle.call.outputs import View
from cgbundle.errors import CallError, ProgramClosed, SessionBusy

from .models import Answer, Case

HELD = 4
"""Largest number of sessions and programs that a thread holds at a time."""

KINDS = {"cpu": ("numpy", "torch"), "cuda": ("numpy", "torch", "cuda")}
"""Kinds of input tensors by target; all inputs of a call have one kind."""


class Wrong(Exception):
    """A wrong answer, or an expected error that did not occur."""


class Slot:
    """A program of a case that threads share, and a session of it, which only one thread can call at a time."""

    def __init__(self, case: Case, **options: Any) -> None:
        self.case, self.options, self._lock = case, options, Lock()
        self.program = cgbundle.load(case.path, **options)
        self.session = self.program.session()

    def replace(self) -> None:
        """Replaces the program by a new one; the old one is closed while others may use it."""
        loaded = cgbundle.load(self.case.path, **self.options)
        with self._lock:
            old, self.program, self.session = self.program, loaded, loaded.session()
        old.close()
        ends(old, self.case)


class Caller:
    """Makes the calls of one thread to one case's programs and compares the results; `device` is "cpu" or "cuda"."""

    def __init__(self, case: Case, random: Random, counts: Counter[str], device: str) -> None:
        self.case, self.counts, self._random, self._device = case, counts, random, device
        self._sequence: tuple[Answer, ...] = ()
        self._place = 0
        self._last: list[View] = []

    def call(self, program: Any) -> None:
        """Makes one call. For a case with sequences it is the next call of the sequence, which only this thread continues."""
        answer, kind = self._next(program), self._random.choice(KINDS[self._device])
        with _stream(self._random, self._device):
            arguments = [_input(tensor, kind) for tensor in answer.inputs]
            if self._random.random() < 0.02:
                self._refused(program, arguments, kind)
            returned = program(*arguments)
            outputs = returned if isinstance(returned, tuple) else (returned,)
            for view in self._last:
                self._stale(view)
            self._last = [output for output in outputs if isinstance(output, View)]
            for got, want in zip(outputs, answer.outputs, strict=True):
                near(got, want, self.case.name)
            for got, want in zip(arguments, answer.after, strict=True):
                near(got, want, f"{self.case.name}, an input after the call")
        if answer.state and self._random.random() < 0.2:
            for name, want in answer.state:
                near(program.state[name], want, f"{self.case.name}, state {name}")
        self.counts["calls"] += 1

    def after_close(self) -> None:
        """Checks that views of a closed program are stale or keep their values."""
        for view in self._last:
            try:
                view.clone()
            except CallError as error:
                expect(error, "stale-view", "program-closed")

    def _next(self, program: Any) -> Answer:
        if self.case.calls:
            return self._random.choice(self.case.calls)
        if self._place == len(self._sequence) or self._random.random() < 0.03:
            number = self._random.randrange(len(self.case.sequences))
            self._sequence, self._place = self.case.sequences[number], 0
            program.reset()
            if self.case.seeded:
                program.seed(number)
        self._place += 1
        return self._sequence[self._place - 1]

    def _refused(self, program: Any, arguments: list[Any], kind: str) -> None:
        """Checks that a call with wrong arguments raises an error and has no effect."""
        first = arguments[0]
        other = first.astype("float64") if kind == "numpy" else first.double()
        code, wrong = self._random.choice([("input-shape", first[..., :-1]), ("input-dtype", other), ("input-kind", "nothing")])
        try:
            program(wrong, *arguments[1:])
        except (ProgramClosed, SessionBusy):
            raise
        except CallError as error:
            expect(error, code)
            self.counts["refused"] += 1
        else:
            raise Wrong(f"{self.case.name}: a call with {code} was not refused")

    def _stale(self, view: Any) -> None:
        try:
            view.clone()
        except CallError as error:
            expect(error, "stale-view")
            self.counts["stale views"] += 1
        else:
            raise Wrong(f"{self.case.name}: a view of the call before could be read")


def near(got: Any, want: torch.Tensor, what: str) -> None:
    """Raises Wrong unless the values are equal; floats may differ as much as another order of summation allows."""
    value = got.tensor if isinstance(got, View) else got
    actual = (value if isinstance(value, torch.Tensor) else torch.from_dlpack(value)).cpu()
    if actual.dtype != want.dtype or actual.shape != want.shape:
        raise Wrong(f"{what}: got {actual.dtype} {list(actual.shape)}, expected {want.dtype} {list(want.shape)}")
    same = torch.allclose(actual, want, rtol=1e-3, atol=1e-3) if want.dtype.is_floating_point else torch.equal(actual, want)
    if not same:
        raise Wrong(f"{what}: got {actual.flatten()[:8].tolist()}, expected {want.flatten()[:8].tolist()}")


def expect(error: CallError, *codes: str) -> None:
    """Raises the error again unless it has one of the codes."""
    if error.code not in codes:
        raise error


def ends(program: Any, case: Case) -> None:
    """Raises Wrong unless a call of a closed program or session raises ProgramClosed."""
    answer = (case.calls or case.sequences[0])[0]
    try:
        program(*[tensor.numpy() for tensor in answer.inputs])
    except ProgramClosed:
        program.close()
    else:
        raise Wrong(f"{case.name}: a closed program could be called")


def _input(tensor: torch.Tensor, kind: str) -> Any:
    """Returns a copy of the input."""
    copy = tensor.clone()
    return copy.numpy() if kind == "numpy" else copy.to("cuda") if kind == "cuda" else copy


@contextmanager
def _stream(random: Random, device: str) -> Iterator[None]:
    """Sometimes uses a separate stream on a GPU."""
    on_stream = device == "cuda" and random.random() < 0.5
    with torch.cuda.stream(torch.cuda.Stream()) if on_stream else nullcontext():
        yield


class User:
    """The programs that one thread holds, and its actions."""

    def __init__(self, number: int, seed: int, slots: list[Slot], cases: list[Case], device: str) -> None:
        self.counts: Counter[str] = Counter()
        self._random = Random(f"{seed}-{number}")
        self._slots, self._cases, self._device = slots, cases, device
        self._held: list[tuple[Caller, Any, Slot | None]] = []

    def act(self) -> None:
        """Performs one random action. Raises Wrong or any unexpected error."""
        choices: list[tuple[Callable[[], None], int]] = [
            (self._call_shared, 30), (self._call_held, 60), (self._fight, 5), (self._open_session, 3), (self._load, 1),
            (self._drop, 3), (self._replace, 1),
        ]  # fmt: skip
        action, _ = self._random.choices(choices, [weight for _, weight in choices])[0]
        action()

    def drop_all(self) -> None:
        """Releases all programs and sessions of this thread."""
        while self._held:
            self._drop()

    def _call_shared(self) -> None:
        slot = self._random.choice([slot for slot in self._slots if slot.case.calls])
        program = slot.program
        try:
            for _ in range(self._random.randrange(1, 5)):
                self._caller(slot.case).call(program)
        except ProgramClosed:
            self._was_replaced(slot, program)

    def _fight(self) -> None:
        """Calls a session that other threads use too: it must give the right result or raise SessionBusy or ProgramClosed."""
        slot = self._random.choice([slot for slot in self._slots if slot.case.calls])
        session = slot.session
        try:
            self._caller(slot.case).call(session)
        except SessionBusy:
            self.counts["busy"] += 1
        except ProgramClosed:
            if slot.session is session:
                raise

    def _call_held(self) -> None:
        if not self._held:
            return
        caller, program, slot = held = self._random.choice(self._held)
        try:
            for _ in range(self._random.randrange(1, 9)):
                caller.call(program)
        except ProgramClosed:
            if slot is None:
                raise
            self._held.remove(held)
            self._was_replaced(slot, program._root)

    def _was_replaced(self, slot: Slot, program: Any) -> None:
        """Checks that a ProgramClosed error came from a replaced program."""
        if slot.program is program:
            raise Wrong(f"{slot.case.name}: ProgramClosed from a program that nobody closed")
        self.counts["closed under a call"] += 1

    def _open_session(self) -> None:
        if len(self._held) >= HELD:
            return
        slot = self._random.choice(self._slots)
        program = slot.program
        try:
            session = program.session()
        except ProgramClosed:
            return self._was_replaced(slot, program)
        self._held.append((self._caller(slot.case), session, slot))
        self.counts["sessions"] += 1

    def _load(self) -> None:
        """Loads a program and opens a session for this thread only."""
        if len(self._held) >= HELD:
            return
        case = self._random.choice(self._cases)
        options: dict[str, Any] = {
            "lazy": self._random.random() < 0.5, "outputs": self._random.choice(("copy", "view")),
            "mode": self._random.choice(("graph", "stream")), "on_miss": self._random.choice(("pad", "chunk")),
            "check": self._random.choice(("load", "load", "full")),
        }  # fmt: skip
        program = cgbundle.load(case.path, **options)
        self.counts["loads"] += 1
        self._held.append((self._caller(case), program, None))
        if self._random.random() < 0.5:
            self._held.append((self._caller(case), program.session(), None))
            self.counts["sessions"] += 1

    def _drop(self) -> None:
        """Closes a program or session, or drops its reference."""
        if not self._held:
            return
        caller, program, _ = self._held.pop(self._random.randrange(len(self._held)))
        if program._root is not None and self._random.random() < 0.3:
            self.counts["forgotten"] += 1
            return
        closed = [(caller, program), *[(user, held) for user, held, _ in self._held if held._root is program]]
        self._held = [held for held in self._held if held[1]._root is not program]
        program.close()
        for user, closed_program in closed:
            user.after_close()
            ends(closed_program, user.case)
        self.counts["closes"] += 1

    def _replace(self) -> None:
        self._random.choice(self._slots).replace()
        self.counts["reloads"] += 1

    def _caller(self, case: Case) -> Caller:
        return Caller(case, self._random, self.counts, self._device)
