"""Branches and loops as nodes of a graph, on a GPU: rows made by hand first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cgbundle.cuda import driver
from cgbundle.cuda.driver import Context, check, cu
from cgbundle.errors import CgbundleError
from cgbundle.loader import MODES
from tests.helpers.conditional_bench import CASES, Bench
from tests.helpers.conditional_rows import expected


def missing() -> str:
    """Why these tests cannot run here, or ""."""
    try:
        driver.require()
    except CgbundleError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(missing()), reason=f"no GPU: {missing()}")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    from cgcompile.targets.cuda.conditions import condition_image

    context = Context(0)
    image = condition_image(context.arch)
    with ExitStack() as cleanup:
        cleanup.callback(context.release)
        yield Bench(tmp_path / "bench.cgb", image, cleanup)


@pytest.mark.parametrize("mode", MODES)
def test_branches_and_loops_follow_the_data(bench: Bench, mode: str) -> None:
    executor = bench.executor(mode)
    for choices, flag in CASES:
        bench.give(choices, flag)
        executor.launch(bench.context.stream)
        assert bench.found() == expected(choices, flag)
    executor.close()


def test_a_callers_capture_takes_them_node_by_node(bench: Bench) -> None:
    executor, stream = bench.executor("graph"), bench.context.stream
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    check("cuStreamBeginCapture", cu.cuStreamBeginCapture(stream, mode))
    executor.join(stream)
    graph = check("cuStreamEndCapture", cu.cuStreamEndCapture(stream))
    made = check("cuGraphInstantiate", cu.cuGraphInstantiate(graph, 0))
    for choices, flag in CASES:
        bench.give(choices, flag)
        check("cuGraphLaunch", cu.cuGraphLaunch(made, stream))
        assert bench.found() == expected(choices, flag)
    check("cuGraphExecDestroy", cu.cuGraphExecDestroy(made))
    check("cuGraphDestroy", cu.cuGraphDestroy(graph))
    executor.close()


def test_how_long_a_turn_takes(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what a turn of the loop costs, of which 4 nodes are copies, one a branch and one a fill; asserts nothing of it."""
    executor, stream = bench.executor("graph"), bench.context.stream
    begin, end = (check("cuEventCreate", cu.cuEventCreate(0)) for _ in range(2))
    times = {}
    for turns in (0, 20):
        for _ in range(3):
            bench.give((1,) * turns, 0)
            check("cuEventRecord", cu.cuEventRecord(begin, stream))
            executor.launch(stream)
            check("cuEventRecord", cu.cuEventRecord(end, stream))
            check("cuStreamSynchronize", cu.cuStreamSynchronize(stream))
            times[turns] = 1e3 * check("cuEventElapsedTime", cu.cuEventElapsedTime(begin, end))
    executor.close()
    with capsys.disabled():
        print(f"\na graph of no turn {times[0]:.1f} us, a turn of 8 nodes {(times[20] - times[0]) / 20:.1f} us")
