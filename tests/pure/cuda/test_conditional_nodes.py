"""Branches and loops on a fake driver: as graph nodes, by decisions of the host in mode "stream", and in a caller's capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cgbundle.program.opening import MODES
from tests.helpers.bundles.conditional_rows import WAYS, expected, switching
from tests.helpers.drivers.conditional_harness import CASES, RecordingHarness
from tests.helpers.drivers.fake_driver import FakeDriver
from tests.helpers.raising import raises

STREAM = 64


@pytest.fixture
def harness(fake: FakeDriver, tmp_path: Path) -> Iterator[RecordingHarness]:
    with ExitStack() as cleanup:
        yield RecordingHarness(tmp_path / "harness.cgb", b"an image", cleanup)


@pytest.mark.parametrize("mode", MODES)
def test_branches_and_loops_follow_the_data(fake: FakeDriver, harness: RecordingHarness, mode: str) -> None:
    executor = harness.executor(mode)
    for choices, flag in CASES:
        harness.fill_arena(choices, flag)
        before = len(fake.calls)
        executor.launch(harness.context.stream)
        if mode == "graph":
            assert fake.calls[before:] == ["cuGraphLaunch"], "the host is not asked"
        assert harness.read_back() == expected(choices, flag)
    executor.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_switch_runs_the_body_of_its_number(fake: FakeDriver, tmp_path: Path, mode: str) -> None:
    with ExitStack() as cleanup:
        harness = RecordingHarness(tmp_path / "harness.cgb", b"an image", cleanup, switching)
        executor = harness.executor(mode)
        for flag in (1, 0, WAYS, 2, 255):
            harness.fill_arena((), flag)
            executor.launch(harness.context.stream)
            assert harness.read_back()[1] == (10 + flag if flag < WAYS else 9)
        executor.close()


def test_a_callers_capture_takes_them_node_by_node(fake: FakeDriver, harness: RecordingHarness) -> None:
    executor = harness.executor("graph")
    callers = fake.do_cuGraphCreate(0)
    fake.captures[STREAM] = callers
    for _ in range(2):
        executor.join(STREAM)
    assert "cuGraphAddChildGraphNode" not in fake.calls
    for choices, flag in CASES:
        harness.fill_arena(choices, flag)
        for run in fake._in_order(callers):
            run()
        output, result = expected((), flag)
        assert harness.read_back() == (output, result), "the second run had no turn left, and began with an empty output"
    fake.do_cuGraphDestroy(callers)
    executor.close()


def test_a_capture_cannot_ask_the_device(harness: RecordingHarness) -> None:
    executor = harness.executor("stream")
    with raises("capture-refused", match="recording: mode 'stream' reads the branch from the device"):
        executor.join(STREAM)
    executor.close()
