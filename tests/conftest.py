"""What all tests share: a folder for what is built once per run, the cache in it, and a compiler that keeps its headers there.

All of it is told in the environment, which the workers of pytest-xdist and processes that tests start inherit.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator

import pytest

from tests.helpers import cxx


def pytest_configure(config: pytest.Config) -> None:
    """Before any worker starts.  A compiler that the user names stays.  A worker takes its share of the processors: the others use
    theirs, and each process that a build starts for one of them imports torch anew."""
    if worker_input := getattr(config, "workerinput", None):
        every = sorted(os.sched_getaffinity(0))
        share = set(every[int(worker_input["workerid"].removeprefix("gw")) % len(every) :: worker_input["workercount"]])
        os.sched_getaffinity = lambda pid: share
        return
    os.environ[cxx.SHARED] = tempfile.mkdtemp(prefix="cgcompile-tests-")
    os.environ["CGCOMPILE_CACHE"] = os.path.join(os.environ[cxx.SHARED], "cache")
    if "CXX" not in os.environ and shutil.which(cxx.COMPILER):
        os.environ["CXX"] = cxx.__file__
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a thread that waits leaves its core to the other workers


def pytest_collection_finish() -> None:
    """New garbage, of traces above all, is looked for less often.  A tenth of a run's time."""
    keep()
    gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """After each file.  Else a test that looks for garbage itself looks through what all files before left: two seconds each."""
    done = yield
    if nextitem is None or nextitem.path != item.path:
        keep()
    return done


@pytest.fixture(scope="module", autouse=True)
def threads_stay() -> Iterator[None]:
    """A file that leaves torch another number of threads changes the last bits of products in the files behind it.

    Other threads of the process keep the old number (torch 2.13), so that two threads of one test differ.
    """
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else None
    yield
    assert before is None or sys.modules["torch"].get_num_threads() == before, "torch.set_num_threads: set it back"


def keep() -> None:
    """What is there now, such as modules and their caches, stays, and is not looked through for garbage again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """When all workers have ended."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[cxx.SHARED], ignore_errors=True)
