"""Files that lowering processes read: programs without weights, and the weights of all programs in one file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from cgcompile.bundle.single_region import WHOLE
from cgcompile.export.export import export
from cgcompile.export.weights import weight_tensors
from cgcompile.model.load import load_source
from cgcompile.offline.lower import worker
from cgcompile.offline.lower.jobs import LoweringJob, _saved, lower_all
from cgcompile.offline.lower.worker_job import WorkerJob, program_of, read_program
from cgcompile.offline.lowered import Lowered
from cgcompile.targets.cuda.recorded import RegionKey
from tests.helpers.raising import raises


class Tied(nn.Module):
    """Two names for one weight, a view, a buffer, a literal, and a cache with a view of itself."""

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
    files, saved = _saved([*jobs, jobs[0]], tmp_path)
    torch.save(saved, weights)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1.2 * model.up.weight.nbytes < model.cache.nbytes
    for program in programs:
        number, path = files[id(program)]
        job = WorkerJob(
            program=path, weights=weights, number=number, code="", tensors=(), layouts=(), writes=False, live=live, key=(),
            arch="sm_90", settings={}, table=None,
        )  # fmt: skip
        read = read_program(job)
        wanted, state = weight_tensors(program), weight_tensors(read)
        assert wanted.keys() == state.keys()
        for name, value in wanted.items():
            assert value.shape == state[name].shape and value.stride() == state[name].stride() and type(value) is type(state[name])
            assert name in live or torch.equal(value, state[name])
        assert state["last"].data_ptr() - state["cache"].data_ptr() == wanted["last"].data_ptr() - wanted["cache"].data_ptr()
        for name in live:
            state[name].copy_(wanted[name])
        x = torch.randn(number + 2, 512)
        assert torch.equal(read.module()(x), program.module()(x))


def linear() -> LoweringJob:
    x = torch.ones(2, 8)
    program = torch.export.export(nn.Linear(8, 8).eval(), (x,))
    return LoweringJob(program=program, tensors=(x,), layouts=(), writes=False, live=())


def lowered(job: LoweringJob, folder: Path, messages: list[str]) -> dict[RegionKey, Lowered]:
    folder.mkdir()
    return lower_all({(WHOLE, (2,)): job}, "sm_90", folder, code="", cache=folder / "cache", table=None, tell=messages.append)


def test_forked_processes_lower_what_others_do_and_need_no_file_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    job = linear()
    forked = lowered(job, tmp_path / "forked", messages)
    assert not (tmp_path / "forked/weights.pt").exists()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # a process that sees a GPU does not fork
    assert lowered(job, tmp_path / "apart", messages) == forked
    assert (tmp_path / "apart/weights.pt").exists()
    assert messages[0] == messages[1]
    assert messages[0].startswith("1 of 1 programs: lowered model for int_key (2,): ")


def test_what_ends_a_forked_process_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "lower_key", None)
    with raises("lowering-broken", match=r"^lowering model for int_key \(2,\): TypeError: 'NoneType' object is not callable"):
        lowered(linear(), tmp_path / "forked", [])


class OwnParameter(nn.Parameter):
    """detach() returns a plain tensor, as in geoopt."""


class Halved(nn.Module):
    """A branch over pairs of columns, whose number must be even."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = OwnParameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + nn.functional.interpolate(nn.functional.avg_pool1d(x, 2), scale_factor=2)
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,)) * self.weight


def test_a_program_of_an_even_size_and_a_parameter_of_its_own_class_is_read(tmp_path: Path) -> None:
    source = load_source(Halved().eval(), lambda side: (torch.randn(1, 1, side),))
    program = export(source, {"side": (32, 48)}).programs.first
    files, _ = _saved([LoweringJob(program=program, tensors=(), layouts=(), writes=False, live=())], tmp_path)
    number, path = files[id(program)]
    job = WorkerJob(
        program=path, weights=tmp_path, number=number, code="", tensors=(), layouts=(), writes=False, live=(), key=(), arch="sm_90",
        settings={}, table=None,
    )  # fmt: skip
    read = program_of(job, weight_tensors(program))
    assert [type(value) for value in read.state_dict.values()] == [nn.Parameter]
    x = torch.randn(1, 1, 6)
    torch.testing.assert_close(read.run_decompositions({}).module()(x)[0], Halved()(x))
