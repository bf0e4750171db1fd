"""What lowering processes read: programs without weights, and the weights of all in one file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from cgcompile.export.weights import weight_tensors
from cgcompile.offline.lower.jobs import LoweringJob, WorkerJob, _saved, read_program


class Tied(nn.Module):
    """Two names for one weight, a view, a buffer, a literal, and a cache with a view of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(512, 1024)
        self.down = nn.Parameter(self.up.weight.detach().t(), requires_grad=False)
        self.register_buffer("held", torch.arange(512.0))
        self.register_buffer("cache", torch.ones(512, 4096).t())
        self.register_buffer("last", self.cache[-1:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) @ self.down.t() + self.held + torch.tensor([2.0]) + self.cache[1] + self.last


def test_weights_are_written_once_and_come_back_but_for_what_calls_change(tmp_path: Path) -> None:
    model = Tied().eval()
    programs = [torch.export.export(model, (torch.ones(size, 512),)) for size in (2, 3)]
    weights, live = tmp_path / "weights.pt", ("cache", "last")
    jobs = [LoweringJob(program=program, tensors=(), layouts=(), writes=False, live=live) for program in programs]
    files = _saved([*jobs, jobs[0]], tmp_path, weights)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1.2 * model.up.weight.nbytes < model.cache.nbytes
    for program in programs:
        number, path = files[id(program)]
        job = WorkerJob(
            program=path, weights=weights, number=number, code="", tensors=(), layouts=(), writes=False, live=live, key=(),
            arch="sm_90", settings={}, table=None,
        )  # fmt: skip
        read = read_program(job)
        wanted, found = weight_tensors(program), weight_tensors(read)
        assert wanted.keys() == found.keys()
        for name, value in wanted.items():
            assert value.shape == found[name].shape and value.stride() == found[name].stride() and type(value) is type(found[name])
            assert name in live or torch.equal(value, found[name])
        assert found["last"].data_ptr() - found["cache"].data_ptr() == wanted["last"].data_ptr() - wanted["cache"].data_ptr()
        for name in live:
            found[name].copy_(wanted[name])
        x = torch.randn(number + 2, 512)
        assert torch.equal(read.module()(x), program.module()(x))
