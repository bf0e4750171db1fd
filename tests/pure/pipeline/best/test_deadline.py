"""When a search ends."""

from __future__ import annotations

import threading

import pytest

from cgcompile.errors import BuildError
from cgcompile.pipeline.best.deadline import Deadline, SearchEnded


def test_without_seconds_there_is_no_end() -> None:
    deadline = Deadline(None, clock=lambda: 1e9)
    assert deadline.left() is None and not deadline.passed()
    with deadline.ending(lambda: pytest.fail("ended")):
        deadline.telling(lambda text: None)("still there")


def test_what_is_told_ends_the_work_when_the_seconds_are_over() -> None:
    now, said = [0.0], []
    deadline = Deadline(10, clock=lambda: now[0])
    tell = deadline.telling(said.append)
    tell("one")
    now[0] = 10.0
    with pytest.raises(SearchEnded):
        tell("two")
    assert said == ["one"] and deadline.passed()


def test_work_that_is_ended_from_outside_is_left_out_and_an_error_of_its_own_is_not() -> None:
    ended = threading.Event()
    with pytest.raises(SearchEnded), Deadline(0.01).ending(ended.set):
        assert ended.wait(60)
        raise BuildError("recorder-failed", "it was killed")
    with pytest.raises(BuildError, match="by itself"), Deadline(60).ending(lambda: pytest.fail("ended")):
        raise BuildError("recorder-failed", "by itself")


def test_a_search_can_be_ended_at_once() -> None:
    deadline = Deadline(None)
    deadline.end()
    assert deadline.passed()
