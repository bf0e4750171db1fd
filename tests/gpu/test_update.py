"""`program.update` on a GPU: with new weights, also during calls, results equal eager PyTorch, for every lowering; and adapters."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cgbundle.format import safetensors_files
from tests.helpers.raising import raises

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgcompile.targets.weights import row_major, stored_dtype  # noqa: E402

if TYPE_CHECKING:
    from tests.gpu.helpers.built import Case

SPIN = 300
"""Calls of every thread."""


def other(network: Any, seed: int) -> Any:
    """Returns a copy of the network with other weights of the same kind."""
    clone = copy.deepcopy(network)
    generator = torch.Generator(device="cuda").manual_seed(seed)
    with torch.no_grad():
        for value in clone.parameters():
            value.copy_(value + value.abs().mean() * torch.randn(value.shape, device="cuda", generator=generator).to(value.dtype))
    return clone


def weights_of(network: Any, device: str = "cpu") -> dict[str, Any]:
    return {name: value.detach().to(device) for name, value in network.state_dict().items()}


def as_file(weights: dict[str, Any], path: Path) -> Path:
    def contents(value: Any) -> Callable[[], bytes]:
        return lambda: row_major(value)

    stored = {name: (stored_dtype(value), tuple(value.shape), contents(value)) for name, value in weights.items()}
    with open(path, "wb") as file:
        safetensors_files.write(file, stored)
    return path


GIVEN: dict[str, Callable[[Any, Path], Any]] = {
    "gpu": lambda network, folder: weights_of(network, "cuda"),
    "cpu": lambda network, folder: weights_of(network),
    "pinned": lambda network, folder: {name: value.pin_memory() for name, value in weights_of(network).items()},
    "strided": lambda network, folder: {
        name: value.t().contiguous().t() if value.dim() == 2 else value for name, value in weights_of(network, "cuda").items()
    },
    "file": lambda network, folder: as_file(weights_of(network), folder / "new.safetensors"),
}


@pytest.mark.parametrize("mode", ["graph", "stream"])
@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_weights_come_from_files_and_from_either_side(cases: dict[str, Case], tmp_path: Path, name: str, mode: str) -> None:
    case = cases[name]
    value = case.draw(4)
    with cgbundle.load(case.path, mode=mode) as program:
        session = program.session()
        for seed, give in enumerate(GIVEN.values(), 1):
            network = other(case.network, seed)
            program.update(give(network, tmp_path))
            for caller in (program, session):
                with torch.no_grad():
                    check(caller(value), network(value), case.tolerance)
        program.update(case.path)
        case.check(session(value), value)


def check(got: Any, want: Any, tolerance: float) -> None:
    assert (got.double() - want.double()).abs().max() / want.double().abs().max() <= tolerance


def test_what_does_not_fit_changes_nothing(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["mlp"]
    value, network = case.draw(4), other(case.network, 1)
    path = as_file(weights_of(network), tmp_path / "new.safetensors")
    first = next(iter(network.state_dict()))
    with cgbundle.load(case.path) as program:
        before = program(value)
        os.truncate(path, path.stat().st_size - 4)
        for source in (path, {**weights_of(network), first: torch.ones(3)}, {**weights_of(network, "cuda"), "none": torch.ones(3)}):
            with raises("update-invalid"):
                program.update(source)
        assert torch.equal(program(value), before) and not program.updated


@pytest.mark.parametrize("level", ["eager", "inductor", "max-autotune"])
def test_no_recording_holds_what_a_weight_was(tmp_path: Path, level: str) -> None:
    """The model has a scale of one element, a normalization, a convolution whose weights a library may pack, a GRU, and a tied
    embedding."""

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = torch.nn.Conv2d(3, 16, 3, padding=1)
            self.norm = torch.nn.BatchNorm2d(16)
            self.scale = torch.nn.Parameter(torch.tensor(1.25))
            self.recurrence = torch.nn.GRU(16, 32, batch_first=True)
            self.head = torch.nn.Linear(32, 50)
            self.embedding = torch.nn.Embedding(50, 32)
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.norm(self.convolution(x)) * self.scale).mean(2).transpose(1, 2)
            output, _ = self.recurrence(x)
            return self.head(output[:, -1] + self.embedding(ids))

    torch.manual_seed(0)
    network = Mixed().eval()
    draw = lambda batch: (torch.randn(batch, 3, 16, 16), torch.randint(0, 50, (batch,)))  # noqa: E731
    built = cgcompile.build(network, draw, sizes=[4], out=tmp_path / "mixed.cgb", target="cuda", record="capture", lower=level)
    assert not [row for row in built.manifest.frozen if row.reason == "folded"]
    inputs = [value.cuda() for value in draw(4)]
    network = network.cuda()
    with cgbundle.load(built.path) as program:
        for seed in range(1, 4):
            changed = other(network, seed)
            with torch.no_grad():
                changed.norm.running_mean.normal_()
                changed.norm.running_var.uniform_(0.5, 2)
                program.update(weights_of(changed, "cuda"))
                check(program(*inputs), changed(*inputs), 5e-3)


@pytest.mark.parametrize("alone", [False, True], ids=["program", "sessions"])
def test_every_answer_is_by_the_old_weights_or_the_new_ones_entirely(cases: dict[str, Case], alone: bool) -> None:
    """Four threads call while the weights are replaced."""
    case = cases["gpt"]
    value = case.draw(4)
    networks = [case.network, *[other(case.network, seed) for seed in range(1, 9)]]
    weight_sets = [weights_of(network, ("cuda", "cpu")[number % 2]) for number, network in enumerate(networks)]
    with cgbundle.load(case.path) as program:
        expected = []
        for weights in weight_sets:
            program.update(weights)
            expected.append(program(value).clone())
        program.update(weight_sets[0])
        callers = [program.session() if alone else program for _ in range(4)]
        seen: list[list[int]] = [[] for _ in callers]
        failures: list[BaseException] = []
        begun, done = threading.Barrier(len(callers) + 1), threading.Event()

        def call(place: int) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    begun.wait()
                    last = False
                    while not last:
                        last = done.is_set() and len(seen[place]) >= SPIN  # a call that starts after the last update
                        got = callers[place](value)
                        matches = [number for number, want in enumerate(expected) if torch.equal(got, want)]
                        assert len(matches) == 1, "an answer by neither"
                        seen[place].append(matches[0])
            except BaseException as error:
                failures.append(error)
                done.set()
                raise

        threads = [threading.Thread(target=call, args=(place,)) for place in range(len(callers))]
        for thread in threads:
            thread.start()
        begun.wait()
        for number in range(1, len(networks)):
            program.update(weight_sets[number])
            got = program.session()(value)
            assert torch.equal(got, expected[number])
            time.sleep(0.01)
        done.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert all(order == sorted(order) and order[-1] == len(networks) - 1 for order in seen), [sorted(set(order)) for order in seen]


@pytest.mark.parametrize("record", ["capture", "cross-compile"])
def test_adapters_by_row_and_merged(tmp_path: Path, record: str) -> None:
    from examples import lora

    network = lora.model()
    options: dict[str, Any] = {"target": "cuda", "record": record} | ({"prove": "none"} if record == "cross-compile" else {})
    built = cgcompile.build(network, lora.entries(), sizes=[1, 8], out=tmp_path / "lora.cgb", **options)
    torch.manual_seed(1)
    adapters = [lora.adapter() for _ in range(lora.SLOTS - 1)]
    x, slot = lora.rows(8)
    with cgbundle.load(built.path) as program, torch.no_grad():
        for number, (down, up) in enumerate(adapters, 1):
            program.load(torch.tensor([number]).cuda(), down.cuda(), up.cuda())
            network.load(torch.tensor([number]), down, up)
        want = network(x, slot)
        check(program(x.cuda(), slot.cuda()).cpu(), want, 5e-3)
        program.update(lora.merged(network.state_dict(), *adapters[2]), partial=True)
        none = torch.zeros(8, dtype=torch.int64)
        check(program(x.cuda(), none.cuda()).cpu(), network(x, torch.full((8,), 3)), 5e-3)
