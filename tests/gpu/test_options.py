"""Options and tools of the runtime on a GPU, with golden bundles: casts, warmup, profiles, threads."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgbundle  # noqa: E402
from tests.helpers.places import GOLDEN  # noqa: E402
from tests.helpers.raising import raises  # noqa: E402

TOKENS, STATE, TRACED = GOLDEN / "v1/gpt_two.cgb", GOLDEN / "v1/state.cgb", GOLDEN / "v1/traced_state.cgb"


@pytest.fixture(autouse=True)
def _this_gpu_runs_them() -> None:
    try:
        cgbundle.load(TOKENS).close()
    except cgbundle.MachineError as error:
        pytest.skip(str(error))


def flat(result: Any) -> list[Any]:
    values = result.values() if isinstance(result, dict) else result if isinstance(result, tuple | list) else [result]
    return [value.clone() if isinstance(value, cgbundle.View) else value for value in values]


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(flat(one), flat(other), strict=True))


@pytest.mark.parametrize("place", ["cuda", "cpu"])
@pytest.mark.parametrize("batch", [4, 3, 6])
def test_tensors_of_a_gpu_and_of_the_cpu_are_cast(place: str, batch: int) -> None:
    ids = torch.arange(8 * batch, device=place).reshape(batch, 8) % 40
    with cgbundle.load(TOKENS) as plain, cgbundle.load(TOKENS, cast=True) as casting:
        for dtype in (torch.int32, torch.int16, torch.uint8):
            assert same(casting(ids.to(dtype)), plain(ids))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            output = casting(ids.int())
        stream.synchronize()
        assert same(output, plain(ids))
        with raises("input-dtype", match="expected dtype int64, got float32"):
            casting(ids.float())
        with raises("input-dtype", match="expected dtype int64, got int32"):
            plain(ids.int())


def test_a_tensor_on_a_gpu_without_a_library_is_not_cast() -> None:
    with cgbundle.load(TOKENS, cast=True) as program:
        ids = torch.zeros(4, 8, dtype=torch.int32, device="cuda")
        bare = cgbundle.Tensor(ids.data_ptr(), "int32", (4, 8), None, ids, 0)
        with raises("input-device", match="a DLPack tensor on a GPU is not cast"):
            program(bare)


@pytest.mark.parametrize("path", [STATE, TRACED], ids=lambda path: path.stem)
@pytest.mark.parametrize("lazy", [False, True])
def test_a_warm_program_answers_as_a_fresh_one_does(path: Path, lazy: bool) -> None:
    with cgbundle.load(path) as fresh, cgbundle.load(path, lazy=lazy) as warm:
        tensors = [torch.ones(4, 16, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")][: len(fresh.inputs)]
        for program in (fresh, warm):
            if program.manifest.random is not None:
                program.seed(3)
            program(*[tensor.clone() for tensor in tensors])
        before = {name: warm.state[name].tobytes() for name in warm.state}
        warm.warmup()
        assert {name: warm.state[name].tobytes() for name in warm.state} == before
        for _ in range(2):
            one, other = ([tensor.clone() for tensor in tensors] for _ in range(2))
            assert same(warm(*one), fresh(*other))


@pytest.mark.parametrize("mode", ["graph", "stream"])
@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_steps_are_timed_on_the_gpu(mode: str, place: str, tmp_path: Path) -> None:
    ids = torch.zeros(4, 8, dtype=torch.int64, device=place)
    with cgbundle.load(TOKENS, mode=mode) as program:
        before = program(ids)
        with program.profile() as profile:
            for _ in range(20):
                output = program(ids)
        assert same(output, before)
        call, step = profile.rows()
        assert (call.times, call.track, step.times, step.track) == (20, "CPU", 20, "GPU")
        assert 1e-6 < step.least <= step.most < 0.1
        spans = [span for span in profile.spans if span.track == "GPU"]
        assert all(one.end <= other.start + 5e-6 for one, other in pairwise(spans))
        calls = [span for span in profile.spans if span.track != "GPU"]
        assert calls[0].start - 0.005 < spans[0].start < calls[-1].end + 0.1, "the clocks are not those of one machine"
        profile.save(tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert sum(event["ph"] == "X" for event in events) == len(profile.spans)
        print(profile)


def test_a_captured_call_is_not_timed_and_works() -> None:
    ids = torch.zeros(4, 8, dtype=torch.int64, device="cuda")
    with cgbundle.load(TOKENS) as program:
        expected = program(ids)
        graph = torch.cuda.CUDAGraph()
        with program.profile() as profile, torch.cuda.graph(graph):
            output = program(ids)
        graph.replay()
        torch.cuda.synchronize()
        assert same(output, expected) and {span.track for span in profile.spans} != {"GPU"}


def test_a_bundle_without_operations_on_the_host_has_no_threads() -> None:
    with raises("option-refused", match="nothing of it runs on the CPU"):
        cgbundle.load(TOKENS, threads=2)
