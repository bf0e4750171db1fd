"""A model that is built for this machine's GPU runs on it from the start; the host has the model only until the build moves it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgcompile.model.devices.tracking import track_devices  # noqa: E402
from cgcompile.model.side_effects import SideEffects  # noqa: E402
from tests.corpus.judge import _on_device  # noqa: E402
from tests.gpu.helpers import peak_memory  # noqa: E402
from tests.helpers.raising import raises  # noqa: E402


class Counted(torch.nn.Module):
    """`histc` of integers has no CPU kernel, as in transformers' mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 8)
        self.kept = torch.arange(8.0)  # neither parameter nor buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) + self.kept + torch.arange(8) + torch.tensor([1.0] * 8)
        counts = torch.histc(y.argmax(-1).int(), bins=8, min=0, max=7)
        return y + counts.to(y.dtype)


class Moving(torch.nn.Module):
    """The code computes one part on the host, with a weight that it moves there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 8)
        self.scale = torch.nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).cpu()
        y = y * self.scale.cpu() + torch.arange(8, device="cpu")
        return self.layer.weight.sum(1) + y.to(x.device).relu()


class Drawing(torch.nn.Module):
    """Random numbers, counted state, and autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = self.layer(x + torch.rand(x.shape[0], 16))
        return y.float() + self.calls


class Recurrent(torch.nn.Module):
    """An LSTM whose last state is used."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(4, 8, batch_first=True)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.view(x.shape[0], 4, 4))[1][0][-1])


class Literals(torch.nn.Module):
    """Constants that torch creates on the CPU and moves to the input's device, as in pytorch-tabnet."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) * torch.sqrt(torch.FloatTensor([0.5]).to(x.device))
        y = y + torch.Tensor([1, 2, 3, 4]).to(x) + torch.DoubleTensor([1, 2, 3, 4]).to(x)
        return y[:, torch.LongTensor([0, 2, 1, 3]).to(x.device)]


class DrawnOnce(torch.nn.Module):
    """The first call draws a parameter, as gpytorch's variational strategies do."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.nn.Parameter(torch.zeros(16))
        self.drawn = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.drawn:
            self.mean.data.copy_(torch.randn_like(self.mean))
            self.drawn = True
        return x + self.mean


def inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 16),)


@pytest.mark.parametrize("model_class", [Counted, Moving, Recurrent, Literals], ids=lambda kind: kind.__name__.lower())
def test_a_model_runs_on_the_gpu_alone_and_is_the_callers_again(model_class: Any, tmp_path: Path) -> None:
    model = model_class().eval()
    before = {name: (value.data_ptr(), value.device) for name, value in model.state_dict().items()}
    built = cgcompile.build(model, inputs, sizes=[1, 4], out=tmp_path / "x.cgb", target="cuda", lower="eager")
    assert {name: (value.data_ptr(), value.device) for name, value in model.state_dict().items()} == before
    there = model_class().eval()
    there.load_state_dict(model.state_dict())
    there.cuda()
    if isinstance(there, Counted):
        there.kept = there.kept.cuda()
    with cgbundle.load(built.path) as program, torch.no_grad(), torch.device("cuda"):
        x = torch.randn(4, 16)
        got = program(x)
        if isinstance(there, Moving):
            y = there.layer(x) * there.scale + torch.arange(8)
            want = there.layer.weight.sum(1) + y.relu()
        else:
            want = there(x)
        assert torch.allclose(got, want, rtol=2e-3, atol=2e-3)
    if isinstance(there, Counted):
        read_where_no_gpu_is(built.path)


def test_numbers_that_the_first_call_draws_are_refused(tmp_path: Path) -> None:
    """They are noticed although torch.manual_seed(0), before inputs(), seeds the GPU's generator too."""
    with raises("check-refused", match="earlier-calls: forward.. sets 'drawn' at its first call"):
        cgcompile.build(DrawnOnce().eval(), inputs, sizes=[1, 4], out=tmp_path / "x.cgb", target="cuda")


def test_random_numbers_state_and_autocast(tmp_path: Path) -> None:
    built = cgcompile.build(Drawing().eval(), inputs, sizes=[1, 4], out=tmp_path / "x.cgb", target="cuda", lower="eager")
    assert {proof.method for proof in built.manifest.entries[0].self_test.proofs} == {"replay"}
    program = torch.export.load(tmp_path / "x.cgb" / "program.pt2")  # for the CPU, on whatever device it was exported
    devices = {node.meta["val"].device.type for node in program.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)}
    assert devices == {"cpu"}


BIG = """
import torch

def model():
    torch.manual_seed(0)
    width = WIDTH
    return torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(8)]).eval()

def inputs(batch):
    return (torch.randn(batch, WIDTH),)
"""


def test_the_host_holds_the_weights_once(tmp_path: Path) -> None:
    """A build with small weights shows the memory of the processes. Only weights may take more in the other build."""
    took = {}
    for width in (64, 8192):  # 8 x 8192 x 8192 x 4 bytes: 2.1 GB
        (tmp_path / f"wide{width}.py").write_text(BIG.replace("WIDTH", str(width)))
        command = [
            sys.executable, "-m", "cgcompile_cli", "build", str(tmp_path / f"wide{width}.py"), "--sizes", "1,4", "--target", "cuda",
            "--lower", "eager", "-q", "-o", str(tmp_path / f"wide{width}.cgb"),
        ]  # fmt: skip
        status, _, took[width] = peak_memory.run(command)
        assert status == 0
    assert took[8192] - took[64] <= 1.3 * 8 * 8192 * 8192 * 4, took


def test_a_saved_program_for_the_cpu_is_built_for_the_gpu(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU()).eval()
    kept = torch.export.export(model, (torch.randn(3, 16),), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=9)},))
    torch.export.save(kept, tmp_path / "kept.pt2")
    built = cgcompile.build(str(tmp_path / "kept.pt2"), sizes=[1, 4], out=tmp_path / "x.cgb", target="cuda", lower="eager")
    x = torch.randn(4, 16)
    with cgbundle.load(built.path) as program:
        assert torch.allclose(torch.as_tensor(program(x)), model(x), rtol=2e-3, atol=2e-3)


def read_where_no_gpu_is(path: Path) -> None:
    """Raises an error unless a process without a GPU can read the program of a bundle."""
    code = (
        "import json, sys, torch; import cgcompile.model.devices.markers; program = torch.export.load(sys.argv[1]); "
        "print(json.dumps([torch.cuda.is_available(), len(program.graph.nodes) > 3]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path / "program.pt2")], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == [False, True]


class Cache:
    """Stores a buffer of the model and its device, as a cache of transformers does."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys, self.device = keys, keys.device


class Cached(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2))
        self.cache = Cache(self.keys)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.cache.keys + torch.zeros(2, device=self.cache.device)


def test_what_objects_hold_is_placed_for_a_comparison() -> None:
    device = torch.device("cuda", 0)
    with _on_device(Cached(), lambda: (torch.zeros(2),), device) as (module, _):
        assert module.cache.keys.device == module.cache.device == device
        assert copy.deepcopy(module)(torch.zeros(2, device=device)).device == device


@pytest.mark.parametrize("layer_class", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_packed_sequences_go_through_a_layer_and_back(layer_class: Any) -> None:
    device = torch.device("cuda", 0)
    layer, x, lengths = layer_class(4, 3, batch_first=True).to(device), torch.rand(2, 5, 4, device=device), torch.tensor([5, 3])
    packed = torch.nn.utils.rnn.pack_padded_sequence
    want = torch.nn.utils.rnn.pad_packed_sequence(layer(packed(x, lengths, batch_first=True))[0], batch_first=True)
    gpu_lengths = lengths.to(device)
    with torch.no_grad(), track_devices((x, gpu_lengths), SideEffects(), real=device) as effects:
        got = torch.nn.utils.rnn.pad_packed_sequence(layer(packed(x, gpu_lengths.cpu(), batch_first=True))[0], batch_first=True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1].cpu(), want[1]) and effects.obstacles == []
