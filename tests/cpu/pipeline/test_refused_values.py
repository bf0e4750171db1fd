"""Values that an operation rejects raise an error of the call; the program continues to work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import cgbundle
import cgcompile
from cgbundle.errors import CallError, OutOfMemory
from cgbundle.tensors.input_errors import WRITTEN
from tests.helpers.raising import raises

GOOD, BAD = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 7])


class Votes(nn.Module):
    """Operations that check values: labels whose range is unknown, and a matrix. `count` writes to state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(5, dtype=torch.int64))

    def forward(self, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(label.clamp(max=9), 5).float()

    def count(self, label: torch.Tensor) -> torch.Tensor:
        self.counts += nn.functional.one_hot(label.clamp(max=9), 5).sum(0)
        return self.counts + 0

    def solve(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x)


def labels(batch: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 5, (batch,)),)


@pytest.fixture(scope="module", params=[False, True], ids=["libtorch", "standalone"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    standalone: bool = request.param
    entries = {"forward": labels, "count": labels}
    if not standalone:
        entries["solve"] = lambda: (torch.eye(3),)
    out = tmp_path_factory.mktemp("votes") / "votes.cgb"
    sizes = ["forward:batch=4", "count:batch=4"]
    return cgcompile.build(Votes().eval(), entries, sizes=sizes, out=out, target="cpu", standalone=standalone).path


def test_the_value_is_blamed_and_not_the_installation(bundle: Path) -> None:
    with cgbundle.load(bundle) as program:
        for bad, said in ((BAD, "smaller than num_classes"), (-GOOD, "non-negative")):
            with raises("operation-refused", match=rf"^host/model\.so: one_hot: Class values must be {said}") as caught:
                program(bad)
            assert isinstance(caught.value, CallError)
            assert "eager PyTorch should fail" in caught.value.hint and WRITTEN not in caught.value.hint
            assert torch.equal(program(GOOD), nn.functional.one_hot(GOOD, 5).float()), "the next call is none the worse"
        if "solve" in program.entries:
            with raises("operation-refused", match="singular"):
                program.solve(torch.zeros(3, 3))
            assert torch.equal(program.solve(torch.eye(3) * 2), torch.eye(3) / 2)


def test_state_of_a_call_that_was_refused(bundle: Path) -> None:
    with cgbundle.load(bundle) as program:
        other = program.session()
        with raises("operation-refused") as caught:
            program.count(BAD)
        assert caught.value.hint.endswith(WRITTEN)
        assert torch.equal(other.count(GOOD), torch.tensor([1, 1, 1, 1, 0])), "another session's state is its own"
        program.reset()
        assert torch.equal(program.count(GOOD), torch.tensor([1, 1, 1, 1, 0]))


class Wide(nn.Module):
    """Allocates as much memory as its input says."""

    def forward(self, size: torch.Tensor) -> torch.Tensor:
        wide = size.item()
        torch._check(wide >= 2)
        return torch.sort(torch.ones(wide))[0][:1]  # type: ignore[call-overload]


def test_too_little_memory_is_no_fault_of_the_callers(tmp_path: Path) -> None:
    built = cgcompile.build(Wide().eval(), lambda: (torch.tensor(4),), out=tmp_path / "wide.cgb", target="cpu")
    with cgbundle.load(built.path) as program:
        with raises("out-of-memory", match=r"^host/model\.so: .*allocate") as caught:
            program(torch.tensor(1 << 50))
        assert isinstance(caught.value, OutOfMemory) and "this machine" in caught.value.hint
        assert torch.equal(program(torch.tensor(3)), torch.ones(1))
