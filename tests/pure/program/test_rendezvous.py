"""Processes of ranks (here threads) find each other by a socket, and record their calls in shared memory."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cgbundle
from cgbundle.errors import CgbundleError
from cgbundle.program.exchanging import CallLog, Connected, call_log_bytes, connect_ranks
from cgbundle.tensors.tensor import Tensor, from_bytes
from tests.helpers.bundles.rank_bundles import FLOATS, expected, inputs
from tests.helpers.drivers.fake_driver import install
from tests.helpers.drivers.ranks_driver import RanksDriver
from tests.helpers.places import GOLDEN
from tests.helpers.raising import raises
from tests.pure.program.test_ranks import check_nothing_is_left, flat, path  # noqa: F401  a fixture


def part(content: bytes) -> int:
    """Returns a file descriptor, which replaces one for memory of a GPU."""
    descriptor = os.memfd_create("part")
    os.write(descriptor, content)
    return descriptor


def connect_all(where: Path, ranks: Sequence[tuple[int, str]], size: int, timeout: float = 60.0) -> list[Connected | CgbundleError]:
    """Runs `ranks`, (number, bundle) of each process, and returns their results."""

    def one(rank: int, bundle: str) -> Connected:
        memory = part(b"part of %d" % rank)
        try:
            return connect_ranks(str(where), rank, size, bundle, memory, timeout)
        finally:
            os.close(memory)

    with ThreadPoolExecutor(len(ranks)) as pool:
        waiting: list[Future[Connected]] = [pool.submit(one, *rank) for rank in ranks]
    outcomes: list[Connected | CgbundleError] = []
    for future in waiting:
        error = future.exception()
        assert error is None or isinstance(error, CgbundleError), error
        outcomes.append(error or future.result())
    return outcomes


def done(connected: Connected) -> None:
    connected.call_log.close()
    for descriptor in connected.parts:
        os.close(descriptor)


def test_every_rank_gets_the_memory_of_all(tmp_path: Path) -> None:
    gc.collect()  # closes files of earlier tests in reference cycles
    descriptors = len(os.listdir("/proc/self/fd"))
    outcomes = connect_all(tmp_path / "meeting", [(2, "b"), (0, "b"), (1, "b")], 3)
    for connected in outcomes:
        assert isinstance(connected, Connected)
        assert [os.pread(descriptor, 20, 0) for descriptor in connected.parts] == [b"part of 0", b"part of 1", b"part of 2"]
    assert len({connected.seed for connected in outcomes if isinstance(connected, Connected)}) == 1
    assert not (tmp_path / "meeting").exists()
    for connected in outcomes:
        assert isinstance(connected, Connected)
        done(connected)
    assert len(os.listdir("/proc/self/fd")) == descriptors, "every descriptor was closed"


def test_a_missing_process_is_named(tmp_path: Path) -> None:
    for error in connect_all(tmp_path / "meeting", [(0, "b"), (1, "b")], 3, timeout=0.3):
        assert isinstance(error, CgbundleError) and error.code == "rank-timeout"
    (error,) = connect_all(tmp_path / "meeting", [(0, "b")], 2, timeout=0.1)
    assert str(error) == "rank 1 did not connect within 0.1 s, or has disconnected"
    (error,) = connect_all(tmp_path / "meeting", [(1, "b")], 2, timeout=0.1)
    assert str(error).startswith("rank 0 did not connect")


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([(0, "b"), (1, "other")], "rank 1 loaded a different bundle than rank 0"),
        ([(0, "b"), (1, "b"), (1, "b")], "two processes connected as rank 1"),
        ([(0, "b"), (5, "b")], "a process connected as rank 5 of 3, but the model has 3 ranks"),
    ],
)
def test_processes_that_do_not_fit(tmp_path: Path, ranks: list[tuple[int, str]], reason: str) -> None:
    outcomes = connect_all(tmp_path / "meeting", ranks, 3)
    errors = [outcome for outcome in outcomes if isinstance(outcome, CgbundleError) and outcome.code == "ranks-unlike"]
    assert errors and all(reason in str(error) for error in errors)
    assert isinstance(outcomes[0], CgbundleError), "rank 0 gives up"


def test_a_socket_that_was_left_is_replaced_and_one_that_is_used_is_not(tmp_path: Path) -> None:
    where = tmp_path / "meeting"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(where))
    for connected in connect_all(where, [(0, "b"), (1, "b")], 2):
        assert isinstance(connected, Connected)
        done(connected)
    with socket.socket(socket.AF_UNIX) as used:
        used.bind(str(where))
        used.listen()
        (error,) = connect_all(where, [(0, "b")], 2, timeout=0.2)
    assert isinstance(error, CgbundleError) and "another process already listens there" in str(error)
    with pytest.raises(ValueError, match="cannot create a socket there"):
        connect_ranks(str(tmp_path / "nowhere" / "meeting"), 0, 2, "b", 0, 0.1)


@settings(deadline=None)
@given(calls=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=30))
def test_calls_of_other_programs_are_found_and_no_others(calls: list[tuple[int, int]]) -> None:
    """The comparison finds the first call in which two ranks differ. A rank may be any number of calls ahead of the others."""
    page = os.memfd_create("call_log")
    os.truncate(page, call_log_bytes(3))
    logs = [CallLog(page, rank, 3) for rank in range(3)]
    os.close(page)
    called: list[list[int]] = [[], [], []]
    for rank, program in calls:
        logs[rank].record(program)
        called[rank].append(program)
        common = [[programs[at] for programs in called if at < len(programs)] for at in range(max(map(len, called)))]
        for log in logs:
            whole = min(map(len, called))
            wrong = next((at for at, programs in enumerate(common) if len(set(programs)) > 1), None)
            try:
                log.compare()
            except CgbundleError as error:
                assert wrong is not None and error.code == "ranks-unlike"
            else:
                assert wrong is None or wrong >= whole, "a call that all have made"


def test_two_processes_call_alike(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Two ranks are loaded separately, here over one fake driver."""
    fake = RanksDriver()
    install(monkeypatch, fake)

    def loaded(rank: int) -> cgbundle.Program:
        return cgbundle.load(path, rank=rank, rendezvous=tmp_path / "meeting", device=rank, timeout=60.0, outputs="view")

    with ThreadPoolExecutor(2) as pool:
        programs = list(pool.map(loaded, range(2)))
    held = []
    for seed, key in enumerate((4, 8, 4)):
        views = []
        for rank, program in enumerate(programs):
            x = from_bytes(inputs(key, seed).tobytes(), "float32", (key, FLOATS))
            held.append(Tensor(x.address, x.dtype, x.shape, x.strides, x, rank))
            views.append(program(held[-1]))
        fake.settle()
        assert [flat(view.tensor) for view in views] == [expected(inputs(key, seed)).tolist()] * 2
    for rank, (program, key) in enumerate(zip(programs, (4, 8), strict=True)):
        x = from_bytes(inputs(key).tobytes(), "float32", (key, FLOATS))
        held.append(Tensor(x.address, x.dtype, x.shape, x.strides, x, rank))
        program(held[-1])
    fake.settle()  # both wait until the time limit
    for program, last in zip(programs, held[-2:], strict=True):
        for _ in range(2):
            with raises("ranks-unlike", match=r"call 4: rank \d calls program \d, and rank \d program \d"):
                program(last)
    for program in programs:
        program.close()
    check_nothing_is_left(fake)


def test_options_that_do_not_go_together(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    fake = RanksDriver()
    install(monkeypatch, fake)
    for options in ({"rank": 0}, {"rendezvous": "x"}, {"rank": 0, "rendezvous": "x", "devices": [0, 1]}):
        with pytest.raises(ValueError, match="rank="):
            cgbundle.load(path, **options)
    with raises("option-refused", match="rank=0: the bundle is for one device"):
        cgbundle.load(GOLDEN / "v1/gpt_two.cgb", rank=0, rendezvous=tmp_path / "meeting")
    with raises("ranks-refused", match="rank=2: the model has 2 ranks"):
        cgbundle.load(path, rank=2, rendezvous=tmp_path / "meeting")
    with raises("rank-timeout", match="rank 1 did not connect"):
        cgbundle.load(path, rank=0, rendezvous=tmp_path / "meeting", timeout=0.1)
    check_nothing_is_left(fake)
