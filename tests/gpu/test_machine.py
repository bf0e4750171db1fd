"""Forked processes, indices out of range, and sessions of kernels with module variables."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402

FORK = """
import os, sys, cgbundle, numpy
program = cgbundle.load(sys.argv[1])
ids = numpy.zeros((2, 4), "int64")
program(ids)
def said(act):
    try:
        act()
    except cgbundle.CallError as error:
        print(f"{error.code}: {error}", flush=True)
sys.stdout.flush()
child = os.fork()
if not child:
    said(lambda: program(ids))
    said(program.session)
    said(lambda: cgbundle.load(sys.argv[1]))
    program.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(program(ids).shape)
"""

OUT_OF_RANGE = """
import sys, cgbundle, numpy
program = cgbundle.load(sys.argv[1])
ids = numpy.zeros((2, 4), "int64")
program(ids)
ids[1, 2] = 100
try:
    program(ids)
except cgbundle.CgbundleError as error:
    print(f"{error.code}: {error}", flush=True)
"""


class Tokens(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(100, 64), torch.nn.Linear(64, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.head(self.table(ids)))


class Spectrum(torch.nn.Module):
    """A model with cuFFT, whose images have a variable that the library sets and variables that kernels can write."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * 2.0, n=x.shape[-1])


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randint(0, 100, (batch, 4)),)

    return cgcompile.build(Tokens(), inputs, sizes=[2], out=tmp_path_factory.mktemp("tokens") / "tokens.cgb").path


def run(script: str, bundle: Path) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script, bundle], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_forked_process_raises_and_the_parent_continues(tokens: Path) -> None:
    loaded = "process-forked: program 'tokens' was loaded before this process was forked, and works in the parent only"
    assert run(FORK, tokens) == [
        loaded, loaded, "process-forked: this process was forked after its parent had used the GPU: CUDA does not work here",
        "(2, 4, 64)",
    ]  # fmt: skip


def test_an_index_out_of_range_is_named_where_it_comes_from_the_cpu(tokens: Path) -> None:
    assert run(OUT_OF_RANGE, tokens) == ["input-value: input 'ids': value 100 at [1, 2] is outside 0..99"]


def test_sessions_whose_kernels_have_variables_give_the_same_bits_side_by_side(tmp_path: Path) -> None:
    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, 1000),)

    path = cgcompile.build(Spectrum(), inputs, sizes=[8], out=tmp_path / "fft.cgb", lower="eager").path
    tensors = [torch.randn(8, 1000, device="cuda") for _ in range(4)]
    wrong: list[int] = []
    with cgbundle.load(path) as program:
        assert program.manifest.module_state
        expected = [program(x) for x in tensors]
        torch.cuda.synchronize()

        def work(number: int) -> None:
            with program.session() as session:
                wrong.extend(number for _ in range(300) if not torch.equal(session(tensors[number]), expected[number]))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
