"""A model over two GPUs, driven by one process or by a process for each rank, with a small handmade bundle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2:
    pytest.skip("fewer than two GPUs", allow_module_level=True)
if not torch.cuda.can_device_access_peer(0, 1):
    pytest.skip("the GPUs cannot write to each other's memory", allow_module_level=True)
pytest.importorskip("triton")

import cgbundle  # noqa: E402
from cgbundle.self_test import replay_self_test  # noqa: E402
from cgcompile.targets.collectives.kernels import collective_image  # noqa: E402
from cgcompile.targets.kernels.ptxas import assemble  # noqa: E402
from tests.helpers.bundles import rank_bundles  # noqa: E402
from tests.helpers.bundles.rank_bundles import FLOATS, expected, inputs  # noqa: E402
from tests.helpers.raising import raises  # noqa: E402

ADD = """.version 7.0
.target sm_80
.address_size 64
.visible .entry add(.param .u64 out, .param .u64 a, .param .u64 b, .param .u32 n)
{
  .reg .pred %p;
  .reg .b32 %i, %n, %block, %threads, %thread;
  .reg .b64 %o, %x, %y, %at;
  .reg .f32 %u, %v;
  ld.param.u64 %o, [out];
  ld.param.u64 %x, [a];
  ld.param.u64 %y, [b];
  ld.param.u32 %n, [n];
  mov.u32 %block, %ctaid.x;
  mov.u32 %threads, %ntid.x;
  mov.u32 %thread, %tid.x;
  mad.lo.u32 %i, %block, %threads, %thread;
  setp.ge.u32 %p, %i, %n;
  @%p bra END;
  mul.wide.u32 %at, %i, 4;
  add.s64 %o, %o, %at;
  add.s64 %x, %x, %at;
  add.s64 %y, %y, %at;
  ld.global.f32 %u, [%x];
  ld.global.f32 %v, [%y];
  add.f32 %u, %u, %v;
  st.global.f32 [%o], %u;
END:
  ret;
}
"""
"""The kernel `add` of `cuda_bundles`."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    major, minor = torch.cuda.get_device_capability()
    memory = rank_bundles.kernels(2, 0, b"").memory
    folder = tmp_path_factory.mktemp("world") / "two.cgb"
    rank_bundles.write(
        folder, assemble(ADD, 10 * major + minor), 2, collective_image(f"sm_{major}{minor}", memory), f"sm_{major}{minor}"
    )
    return folder


@pytest.fixture(scope="module")
def program(path: Path) -> Iterator[cgbundle.Program]:
    with cgbundle.load(path, devices=[0, 1], timeout=5.0) as loaded:
        yield loaded


def input_tensor(key: int, seed: int) -> Any:
    return torch.tensor(inputs(key, seed)).reshape(key, FLOATS)


def wanted(key: int, seed: int) -> Any:
    return torch.tensor(expected(inputs(key, seed))).reshape(key, FLOATS)


def test_its_self_test(program: cgbundle.Program) -> None:
    assert [row.exact for row in replay_self_test(program)] == [True, True]


@pytest.mark.parametrize("devices", [[0, 1], [1, 0], [0, 0]])
@pytest.mark.parametrize("mode", ["graph", "stream"])
def test_calls_in_any_order(path: Path, devices: list[int], mode: str) -> None:
    random = Random(0)
    with cgbundle.load(path, devices=devices, mode=mode, timeout=5.0) as program:
        results = []
        for number in range(300):
            key = random.choice((4, 8))
            x = input_tensor(key, number)
            results.append((key, number, program(x.to(f"cuda:{devices[0]}") if random.random() < 0.7 else x)))
        for key, number, output in results:
            assert torch.equal(output.cpu(), wanted(key, number)), number


def test_streams_of_the_callers(program: cgbundle.Program) -> None:
    streams = [torch.cuda.Stream(0) for _ in range(3)]
    outputs = []
    for number in range(60):
        with torch.cuda.stream(streams[number % 3]):
            x = input_tensor(8, number).to("cuda:0", non_blocking=True)
            outputs.append(program(x))
    torch.cuda.synchronize(0)
    assert all(torch.equal(output.cpu(), wanted(8, number)) for number, output in enumerate(outputs))


def test_a_rank_that_does_not_come(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = cgbundle.load(path, devices=[0, 1], timeout=0.5)
    monkeypatch.setattr(program._backend, "_follow", lambda *_: None)
    with raises("rank-timeout", match="rank 0 on device 0 waited 0.5 s for rank 1, which did not respond"):
        program(input_tensor(4, 0))
    program.close()


# --- a process for each rank -----------------------------------------------------------------------------------------------


def started(path: Path, rank: int, meeting: Path, calls: int, key: int = 4) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.gpu.helpers.rank_process",
        str(path),
        str(rank),
        str(meeting),
        str(rank),
        str(calls),
        str(key),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_processes_that_call_alike(path: Path, tmp_path: Path) -> None:
    processes = [started(path, rank, tmp_path / "meeting", 500) for rank in range(2)]
    assert [process.communicate(timeout=60)[0].split() for process in processes] == [["ready", "right"]] * 2


def test_a_call_of_another_size_is_an_error(path: Path, tmp_path: Path) -> None:
    processes = [started(path, rank, tmp_path / "meeting", 3, key) for rank, key in enumerate((4, 8))]
    logs = [process.communicate(timeout=60)[0] for process in processes]
    assert all(log.startswith("ranks-unlike") for log in logs), logs


def kill(path: Path, meeting: Path, killed: int, pause: float) -> None:
    """Starts two ranks, kills one after `pause` seconds, and checks the output of the other."""
    processes = [started(path, rank, meeting, 1_000_000) for rank in range(2)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(pause)  # a call takes 0.1 to 0.3 ms, so the process dies after some hundred calls
    os.kill(processes[killed].pid, signal.SIGKILL)
    said, _ = processes[1 - killed].communicate(timeout=90)  # the driver may first clean up after the killed process
    processes[killed].wait()
    code, seconds, calls, text = said.split(" ", 3)
    print(f"killed: rank {killed}; the other one raised after {calls} calls, within {seconds} s")
    assert code == "rank-timeout" and int(calls) > 0 and f"for rank {killed}, which did not respond" in text


def test_a_rank_that_is_killed(path: Path, tmp_path: Path) -> None:
    """If a rank is killed in the middle of calls, the other one raises and ends, and both can load again."""
    for killed, pause in ((1, 0.02), (0, 0.05), (1, 0.1), (0, 0.2)):
        kill(path, tmp_path / f"meeting{pause}", killed, pause)
    processes = [started(path, rank, tmp_path / "again", 100) for rank in range(2)]
    assert [process.communicate(timeout=60)[0].split() for process in processes] == [["ready", "right"]] * 2


@pytest.mark.alone
def test_no_memory_stays_of_a_rank_that_is_killed(path: Path, tmp_path: Path) -> None:
    free = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
    for killed in (1, 0):
        kill(path, tmp_path / f"meeting{killed}", killed, 0.1)
    for _ in range(50):  # the driver needs time to free the memory of a killed process
        after = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
        left = [one - other for one, other in zip(free, after, strict=True)]
        if max(left) < 64 << 20:
            break
        time.sleep(0.2)
    print(f"killed: bytes that are no longer free: {left}")
    assert max(left) < 64 << 20
