"""Conditional nodes on a GPU: handmade recordings, then cross-compiled bundles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import cgbundle
from cgbundle.cuda import driver
from cgbundle.cuda.driver import Context, check, cu
from cgbundle.errors import CgbundleError
from cgbundle.program.opening import MODES
from cgcompile.bundle.recordings import ConditionalNode, decode
from tests.gpu.helpers.counting import Counting
from tests.helpers.bundles.conditional_rows import WAYS, expected, several, switching
from tests.helpers.drivers.conditional_harness import CASES, RecordingHarness
from tests.helpers.drivers.fake_driver import install


def missing() -> str:
    """Returns why these tests cannot run here, or ""."""
    try:
        driver.require()
    except CgbundleError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(missing()), reason=f"no GPU: {missing()}")


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[RecordingHarness]:
    from cgcompile.targets.kernels.conditions import condition_image

    context = Context(0)
    image = condition_image(context.arch)
    with ExitStack() as cleanup:
        cleanup.callback(context.release)
        yield RecordingHarness(tmp_path / "harness.cgb", image, cleanup)


@pytest.mark.parametrize("mode", MODES)
def test_branches_and_loops_follow_the_data(harness: RecordingHarness, mode: str) -> None:
    executor = harness.executor(mode)
    for choices, flag in CASES:
        harness.fill_arena(choices, flag)
        executor.launch(harness.context.stream)
        assert harness.read_back() == expected(choices, flag)
    executor.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_switch_runs_the_body_of_its_number(tmp_path: Path, mode: str) -> None:
    from cgcompile.targets.kernels.conditions import condition_image

    context = Context(0)
    image = condition_image(context.arch)
    with ExitStack() as cleanup:
        cleanup.callback(context.release)
        harness = RecordingHarness(tmp_path / "harness.cgb", image, cleanup, switching)
        executor = harness.executor(mode)
        for flag in (1, 0, WAYS, 2, 255):
            harness.fill_arena((), flag)
            executor.launch(harness.context.stream)
            assert harness.read_back()[1] == (10 + flag if flag < WAYS else 9)
        executor.close()


def test_a_callers_capture_takes_them_node_by_node(harness: RecordingHarness) -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    executor, stream = harness.executor("graph"), harness.context.stream
    mode = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    check("cuStreamBeginCapture", bindings.cuStreamBeginCapture(stream, mode))
    executor.join(stream)
    graph = int(check("cuStreamEndCapture", bindings.cuStreamEndCapture(stream)))
    executable = check("cuGraphInstantiate", cu.cuGraphInstantiate(graph, 0))
    for choices, flag in CASES:
        harness.fill_arena(choices, flag)
        check("cuGraphLaunch", cu.cuGraphLaunch(executable, stream))
        assert harness.read_back() == expected(choices, flag)
    check("cuGraphExecDestroy", cu.cuGraphExecDestroy(executable))
    check("cuGraphDestroy", cu.cuGraphDestroy(graph))
    executor.close()


def test_time_of_a_loop_iteration(harness: RecordingHarness, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the time of one loop iteration with 4 copies, a branch and a fill; asserts nothing about it."""
    executor, stream = harness.executor("graph"), harness.context.stream
    begin, end = (check("cuEventCreate", cu.cuEventCreate(0)) for _ in range(2))
    times = {}
    for turns in (0, 20):
        for _ in range(3):
            harness.fill_arena((1,) * turns, 0)
            check("cuEventRecord", cu.cuEventRecord(begin, stream))
            executor.launch(stream)
            check("cuEventRecord", cu.cuEventRecord(end, stream))
            check("cuStreamSynchronize", cu.cuStreamSynchronize(stream))
            times[turns] = 1e3 * check("cuEventElapsedTime", cu.cuEventElapsedTime(begin, end))
    executor.close()
    with capsys.disabled():
        print(f"\na graph of no turn {times[0]:.1f} us, a turn of 8 nodes {(times[20] - times[0]) / 20:.1f} us")


def test_time_of_a_switch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the time of a launch that takes the last of eight branches, with a switch and with nested branches."""
    from cgcompile.targets.kernels.conditions import condition_image

    context, ways = Context(0), 8
    times = []
    with ExitStack() as cleanup:
        cleanup.callback(context.release)
        for nested in (False, True):
            rows = partial(several, ways=ways, nested=nested)
            harness = RecordingHarness(tmp_path / f"{nested}.cgb", condition_image(context.arch), cleanup, rows)
            executor, stream = harness.executor("graph"), harness.context.stream
            harness.fill_arena((0,) * ways, ways - 1)
            begin, end = (check("cuEventCreate", cu.cuEventCreate(0)) for _ in range(2))
            microseconds = []
            for _ in range(20):
                check("cuEventRecord", cu.cuEventRecord(begin, stream))
                executor.launch(stream)
                check("cuEventRecord", cu.cuEventRecord(end, stream))
                check("cuStreamSynchronize", cu.cuStreamSynchronize(stream))
                microseconds.append(1e3 * check("cuEventElapsedTime", cu.cuEventElapsedTime(begin, end)))
            assert harness.read_back()[1] == 9 + ways
            times.append(sorted(microseconds)[len(microseconds) // 2])
            executor.close()
    with capsys.disabled():
        print(f"\nthe last of {ways} ways: a switch {times[0]:.1f} us, branches inside of each other {times[1]:.1f} us")


# --- cross-compiled bundles ------------------------------------------------------------------------------------


def traced(name: str, folder: Path, recorder: str) -> tuple[Path, Any, list[Any]]:
    """Returns the bundle, the model on the GPU, and inputs."""
    torch = pytest.importorskip("torch")
    from tests.helpers.models.conditional_models import MODELS

    make, inputs, kinds = MODELS[name]
    torch.manual_seed(1)
    model, examples = make().eval(), inputs()
    path = folder / f"{name}.cgb"
    if recorder == "cross-compile":
        build(model, lambda: (examples[0],), path)
    else:
        from tests.gpu.helpers.hidden import built_without_gpu

        built_without_gpu("conditional", name, path)
    assert sorted(types(path)) == list(kinds)
    return path, model.cuda(), examples


def build(model: Any, inputs: Any, path: Path) -> Path:
    import cgcompile

    return cgcompile.build(model, inputs, out=path, target="cuda", record="cross-compile", prove="none").path


def types(path: Path) -> list[str]:
    nodes = [node for file in sorted((path / "graphs").iterdir()) for node in decode(file.read_bytes()).nodes]
    return [node.type for node in nodes if isinstance(node, ConditionalNode)]


@pytest.mark.parametrize(
    ("name", "recorder"),
    [*[(name, "cross-compile") for name in ("nested", "carried", "overlapping", "middle", "chosen")],
     *[(name, "without-gpu") for name in ("nested", "carried", "chosen")]],
)  # fmt: skip
def test_every_path_equals_eager_pytorch(tmp_path: Path, name: str, recorder: str) -> None:
    import torch

    path, model, examples = traced(name, tmp_path, recorder)
    for mode in MODES:
        with cgbundle.load(path, mode=mode) as program:
            assert len(program.manifest.entries[0].programs[0].steps) == 1, "one graph, one launch"
            for x in [*examples, *reversed(examples)]:
                with torch.no_grad():
                    wanted = model(x.cuda())
                output = program(x.cuda())
                both = [result if isinstance(result, tuple) else (result,) for result in (output, wanted)]
                for got, want in zip(*both, strict=True):
                    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def test_the_host_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    path, _, examples = traced("nested", tmp_path, "cross-compile")
    with cgbundle.load(path) as program:
        inputs = [x.cuda() for x in examples]
        torch.cuda.synchronize()
        program(inputs[0])
        counted = Counting(driver.cu)
        install(monkeypatch, counted)  # type: ignore[arg-type]
        for x in inputs:
            program(x)
        monkeypatch.undo()
        assert counted.calls["cuGraphLaunch"] == len(inputs)
        assert not [name for name in counted.calls if "Synchronize" in name or "DtoH" in name]


def test_random_numbers_and_state_in_a_loop(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tests.helpers.models.conditional_models import TURNS, WIDTH, Drawing

    path = build(Drawing(), lambda: (torch.zeros(WIDTH),), tmp_path / "drawing.cgb")
    runs = []
    for mode in MODES:
        with cgbundle.load(path, mode=mode) as program:
            program.seed(5)
            seen, calls = 0, []
            for _ in range(6):
                v, turns, state = program(torch.zeros(WIDTH, device="cuda"))
                assert int(turns) == TURNS or float(v.sum()) >= 30
                seen += 1 if int(turns) > 3 else -1
                assert float(state) == seen
                calls.append((v.cpu(), int(turns)))
            runs.append(calls)
            assert [turns for _, turns in calls] == sorted([turns for _, turns in calls], reverse=True), "the scale doubles"
            assert not torch.equal(calls[0][0], calls[1][0])
    for one, two in zip(*runs, strict=True):
        assert torch.equal(one[0], two[0]) and one[1] == two[1]


def test_a_part_of_the_callers_capture(tmp_path: Path) -> None:
    import torch

    path, model, examples = traced("nested", tmp_path, "cross-compile")
    with cgbundle.load(path, outputs="view") as program:
        x = examples[0].cuda()
        result = program(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = program(x)
        for example in examples:
            x.copy_(example)
            graph.replay()
            with torch.no_grad():
                wanted = model(x)
            for got, want in zip(result, wanted, strict=True):
                torch.testing.assert_close(torch.as_tensor(got), want, rtol=2e-3, atol=2e-3)
