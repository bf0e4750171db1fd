"""Reads by threads of the C library (lanes): data, errors, and that no thread or file remains."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgbundle.cuda import lanes
from cgbundle.cuda.lanes import MOST, AsyncReads, available
from tests.helpers.raising import raises

DATA = os.urandom(100_003)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path = tmp_path_factory.mktemp("reads") / "weights"
    path.write_bytes(DATA)
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def all_of(reads: AsyncReads, lane: int, number: int) -> None:
    for _ in range(number):
        while not reads.take(lane):
            reads.wait()


PLACES = st.tuples(st.integers(0, len(DATA) - 1), st.integers(1, 5000)).map(lambda at: (at[0], min(at[1], len(DATA) - at[0])))


@settings(max_examples=60, deadline=None)
@given(places=st.lists(PLACES, max_size=40), lanes=st.integers(1, 6))
def test_every_lane_reads_what_it_was_asked_for(places: list[tuple[int, int]], lanes: int, file: int) -> None:
    room = ctypes.create_string_buffer(b"?" * (5001 * len(places) + 1))
    reads = AsyncReads(file, lanes)
    for number, (begin, size) in enumerate(places):
        reads.begin(number % lanes, ctypes.addressof(room) + 5001 * number, begin, size)
    for lane in range(lanes):
        all_of(reads, lane, len(range(lane, len(places), lanes)))
        assert not reads.take(lane)
    reads.close()
    for number, (begin, size) in enumerate(places):
        assert room.raw[5001 * number :][: size + 1] == DATA[begin : begin + size] + b"?"


def test_what_is_read_behind_the_end_is_an_error_by_name(file: int) -> None:
    room, reads = ctypes.create_string_buffer(100), AsyncReads(file, 1, "tables.safetensors")
    reads.begin(0, ctypes.addressof(room), len(DATA) - 10, 20)
    with raises("weights-invalid", match="tables.safetensors: the file ends too early"):
        all_of(reads, 0, 1)
    reads.close()


def test_a_read_that_fails_says_how(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    room, reads = ctypes.create_string_buffer(100), AsyncReads(folder, 1)
    reads.begin(0, ctypes.addressof(room), 0, 20)
    with pytest.raises(IsADirectoryError):
        all_of(reads, 0, 1)
    reads.close()
    os.close(folder)


def test_nothing_is_left_when_it_is_closed_in_the_middle(file: int) -> None:
    room, before = ctypes.create_string_buffer(len(DATA) * 8), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        reads = AsyncReads(file, 3)
        for number in range(24):
            reads.begin(number % 3, ctypes.addressof(room) + len(DATA) * (number % 8), 0, len(DATA))
        reads.close()
        reads.close()
        assert len(os.listdir("/proc/self/fd")) == before
        ctypes.memset(room, 0, len(room))
        assert not any(room.raw[:1000]), "nobody writes there any more"


def test_no_more_lanes_than_the_library_has_threads(file: int) -> None:
    reads = AsyncReads(file, 100)
    assert reads.lanes == MOST
    reads.close()


@pytest.mark.parametrize("said", [None, "musl 1.2"])
def test_another_c_library_has_none(said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert available()
    monkeypatch.setattr("os.confstr", lambda name: said)
    lanes._functions.cache_clear()
    assert not available()
    monkeypatch.undo()
    lanes._functions.cache_clear()
    assert available()
