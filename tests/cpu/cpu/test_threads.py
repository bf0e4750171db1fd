"""`threads` sets the number of threads of a run, independent of the rest of the process."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import cgbundle
from cgbundle.cpu import libtorch
from cgbundle.cpu.machine import with_threads
from tests.helpers.places import ROOT
from tests.helpers.raising import raises

torch = pytest.importorskip("torch")
GPU_BUNDLE = ROOT / "tests/golden/v1/mlp.cgb"


@pytest.fixture(scope="module")
def library() -> Any:
    return libtorch.load("2.11")._library


def test_a_run_uses_that_many_and_leaves_the_callers_number(library: Any) -> None:
    before = torch.get_num_threads()
    for number in (1, 3):
        assert with_threads(torch.get_num_threads, library, number)() == number
        assert with_threads(library.omp_get_max_threads, library, number)() == number
        assert torch.get_num_threads() == before


def test_a_run_that_fails_leaves_the_callers_number_too(library: Any) -> None:
    before = torch.get_num_threads()

    def fail() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        with_threads(fail, library, before + 1)()
    assert torch.get_num_threads() == before


def test_the_first_run_of_a_thread_uses_that_many(library: Any) -> None:
    """torch sets its own number at its first use in a thread."""
    seen: list[int] = []
    thread = Thread(target=lambda: seen.append(with_threads(torch.get_num_threads, library, 3)()))
    thread.start()
    thread.join()
    assert seen == [3]


def test_a_program_gives_the_same_on_any_number(bundle: Path) -> None:
    x = torch.randn(4, 6)
    with cgbundle.load(bundle) as plain, cgbundle.load(bundle, threads=1) as one, cgbundle.load(bundle, threads=3) as three:
        session = three.session()
        assert all(torch.allclose(program(x)[0], plain(x)[0]) for program in (one, three, session))


def test_a_quota_holds_where_no_number_is_given(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libtorch, "threads_of_quota", lambda: 1)
    limited, configured = libtorch.load("2.11"), libtorch.load("2.11", threads=3)
    assert (limited.threaded(torch.get_num_threads)(), configured.threaded(torch.get_num_threads)()) == (1, 3)


@pytest.mark.parametrize("number", [0, -1, 1.0, True, "2", 1025])
def test_what_is_no_number_of_threads_is_refused(bundle: Path, number: Any) -> None:
    with pytest.raises(ValueError, match="expected an integer from 1 to 1024, or None"):
        cgbundle.load(bundle, threads=number)


def test_a_bundle_of_which_nothing_runs_on_the_cpu_has_none() -> None:
    with raises("option-refused", match="threads=2: the bundle is for sm_90, and nothing of it runs on the CPU"):
        cgbundle.load(GPU_BUNDLE, threads=2)
