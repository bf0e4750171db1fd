"""Large outputs are returned without a copy: writes by the caller change neither the next call, its inputs, the weights nor other
outputs."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn

import cgbundle
import cgcompile
from cgbundle.call import outputs

SIZE = 40_000
"""Elements of a row: 160 KB, more than `outputs.LARGE`."""


class Large(nn.Module):
    """A compiler may put these outputs into memory of another output, a weight, a constant or the input."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(SIZE))
        self.register_buffer("steps", torch.arange(SIZE) * 2.0, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        both = torch.cat([y, y + 1])
        constant = torch.arange(SIZE, dtype=torch.float32) * 3
        return y, both, constant, self.table * 1, self.steps + 0, x * 1, x + 0, x.flip(1), y.sum(1)


def inputs(batch: int) -> tuple[Tensor]:
    return (torch.randn(batch, SIZE),)


@pytest.fixture(scope="module")
def model() -> Large:
    torch.manual_seed(0)
    return Large().eval()


@pytest.fixture(scope="module", params=[True, False], ids=["own functions", "libtorch"])
def bundle(request: pytest.FixtureRequest, model: Large, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("large") / "large.cgb"
    return cgcompile.build(model, inputs, sizes=[1, 4], out=out, target="cpu", standalone=None if request.param else False).path


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_what_the_caller_writes_there_changes_nothing_else(model: Large, bundle: Path, library: str) -> None:
    with cgbundle.load(bundle) as program:
        for batch in (4, 1, 4):
            (x,) = inputs(batch)
            with torch.no_grad():
                wanted = [output.clone() for output in model(x)]
            argument = x.numpy() if library == "numpy" else x
            before = x.clone()
            for _ in range(3):
                answers = list(program(argument))
                for place, answer in enumerate(answers):
                    torch.testing.assert_close(torch.as_tensor(answer), wanted[place], rtol=1e-4, atol=1e-3)
                    answer[...] = -7 - place
                assert [float(answer.flatten()[-1]) for answer in answers] == [-7.0 - place for place in range(len(answers))]
                assert torch.equal(x, before)


def test_outputs_outlive_a_closed_program(model: Large, bundle: Path) -> None:
    program = cgbundle.load(bundle)
    (x,) = inputs(4)
    (first, *_), (second, *_) = program(x.numpy()), program(x.numpy() * 2)
    program.close()
    del program
    gc.collect()
    numpy.testing.assert_allclose(first, numpy.sin(x.numpy()), rtol=1e-5, atol=1e-5)
    numpy.testing.assert_allclose(second, numpy.sin(2 * x.numpy()), rtol=1e-5, atol=1e-5)
    assert not first.flags.owndata and first.flags.c_contiguous and first.flags.writeable


def test_the_answers_are_those_of_copies(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (x,) = inputs(4)
    with cgbundle.load(bundle) as program:
        answers = program(x.numpy())
    monkeypatch.setattr(outputs, "LARGE", 1 << 62)
    with cgbundle.load(bundle) as program:
        copied = program(x.numpy())
    assert copied[0].flags.owndata
    for one, other in zip(answers, copied, strict=True):
        numpy.testing.assert_array_equal(one, other)
