"""Calls on the fast path (cgbundle/gpu/fast_path.py) give the results of a first call: in all modes of torch, on other streams and
threads, and in a capture."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import cgbundle
from cgbundle.cuda import driver
from cgbundle.errors import CgbundleError
from tests.helpers.places import GOLDEN
from tests.helpers.raising import raises

torch = pytest.importorskip("torch")

BUNDLE = GOLDEN / "v1/mlp.cgb"


@pytest.fixture(params=["view", "copy"])
def program(request: pytest.FixtureRequest) -> Iterator[Any]:
    try:
        driver.require()
        loaded = cgbundle.load(BUNDLE, outputs=request.param)
    except CgbundleError as error:
        pytest.skip(str(error))
    with loaded:
        yield loaded


def random_input(program: Any, key: tuple[int, ...], seed: int) -> Any:
    spec = program.inputs[0]
    shape = [size if isinstance(size, int) else key[0] for size in spec.shape]
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, spec.dtype)).cuda()


def kept(output: Any) -> Any:
    return output.clone()


def wanted(program: Any, value: Any) -> Any:
    """Returns the result of a first call, from another program."""
    with cgbundle.load(BUNDLE) as other:
        return other(value.cpu()).cuda()


def test_every_way_to_call_answers_alike(program: Any) -> None:
    key = program.int_keys[-1]
    values = [random_input(program, key, seed) for seed in range(3)]
    expected = [wanted(program, value) for value in values]
    program(values[0])
    direct = len(program._known)
    assert direct == 1

    def check(seed: int, value: Any) -> None:
        assert torch.equal(kept(program(value)), expected[seed])

    side = torch.cuda.Stream()
    for _ in range(3):
        for seed, value in enumerate(values):
            check(seed, value)
            with torch.no_grad():
                check(seed, value)
            with torch.inference_mode():
                check(seed, value)
                check(seed, value.clone())
            check(seed, value.clone().requires_grad_())
            check(seed, torch.nn.Parameter(value.clone()))
            check(seed, torch._neg_view(-value))
            check(seed, value.t().contiguous().t())
            assert torch.equal(kept(program(value.cpu())), expected[seed].cpu())
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                check(seed, value)
                check(seed, value)
            torch.cuda.current_stream().wait_stream(side)
    assert 1 < len(program._known) <= 8


def test_copies_are_part_of_the_launch(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs stay unchanged during hundreds of later calls of this key and other keys; every seventh call is not on the fast
    path."""
    aimed: list[int] = []
    call = driver.cu.cuGraphExecMemcpyNodeSetParams
    monkeypatch.setattr(driver.cu, "cuGraphExecMemcpyNodeSetParams", lambda *arguments: aimed.append(1) or call(*arguments))
    keys = program.int_keys
    values = {(key, seed): random_input(program, key, seed) for key in keys for seed in range(3)}
    expected = {pair: wanted(program, value) for pair, value in values.items()}
    results = []
    for turn in range(300):
        pair = keys[turn % len(keys)], turn % 3
        result = program(values[pair].cpu() if turn % 7 == 6 else values[pair])
        results.append((pair, kept(result) if program._views else result))
    for pair, result in results:
        assert torch.equal(result.cuda(), expected[pair])
    assert len(aimed) == 0 if program._views else len(aimed) > 200


OTHER_MEMORY = """
import sys
import torch
import cgbundle
program = cgbundle.load(sys.argv[1])
key, spec = program.int_keys[0], program.inputs[0]
shape = [size if isinstance(size, int) else key[0] for size in spec.shape]
values = [torch.rand(shape, device="cuda").to(getattr(torch, spec.dtype)) for _ in range(3)]
wanted = [program(value.cpu()) for value in values]
made = [program(values[turn % 3]) for turn in range(60)]
torch.cuda.synchronize()
assert all(torch.equal(each.cpu(), wanted[turn % 3]) for turn, each in enumerate(made))
print("right")
"""


@pytest.mark.parametrize("settings", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_copies_go_to_whatever_memory_torch_takes(settings: str) -> None:
    try:
        driver.require()
    except CgbundleError as error:
        pytest.skip(str(error))
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
    line = [sys.executable, "-c", OTHER_MEMORY, str(BUNDLE)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("right"), done.stderr


def test_a_capture_after_direct_calls_holds_the_replay(program: Any) -> None:
    key = program.int_keys[0]
    value, other = random_input(program, key, 0), random_input(program, key, 1)
    expected = [wanted(program, tensor) for tensor in (value, other)]
    for _ in range(3):
        program(value)
    static, graph = value.clone(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = kept(program(static))
    for tensor, result in zip((value, other, value), (*expected, expected[0]), strict=True):
        static.copy_(tensor)
        graph.replay()
        assert torch.equal(captured, result)
        assert torch.equal(kept(program(tensor)), result)


def test_threads_take_turns(program: Any) -> None:
    key = program.int_keys[-1]
    values = [random_input(program, key, seed) for seed in range(4)]
    expected = [wanted(program, value) for value in values]
    wrong: list[int] = []

    def calls(seed: int) -> None:
        for _ in range(200):
            try:
                if not torch.equal(kept(program(values[seed])), expected[seed]):
                    wrong.append(seed)
            except cgbundle.CallError as error:
                if error.code != "stale-view":  # expected if another thread called in between
                    raise

    threads = [threading.Thread(target=calls, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong or program._views  # the next call of another thread may overwrite a view before it is read


def test_a_profile_times_the_steps_of_direct_calls(program: Any) -> None:
    value = random_input(program, program.int_keys[0], 0)
    program(value)
    with program.profile() as profile:
        program(value)
        program(value)
    assert sum(row.times for row in profile.rows() if row.track == profile.GPU) >= 2
    program(value)
    view = program(value)
    program.close()
    with raises("program-closed"):
        program(value)
    if type(view) is cgbundle.View:
        with raises("stale-view"):
            view.tensor  # noqa: B018
