"""Methods without inputs, common for state: on the CPU, and cross-compiled."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import cgbundle
import cgcompile
from cgbundle.self_test import replay_self_test
from cgcompile.util.progress import Event
from cgcompile_cli import main
from tests.helpers.lowered_here import lower_here
from tests.helpers.raising import raises

DONATIONS = [("tick", "add.x")]


class Counter(nn.Module):
    """State with methods that count, add and clear; only `add` takes an input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(4))

    def tick(self) -> torch.Tensor:
        self.n += 1
        return self.n * 2

    def add(self, x: torch.Tensor) -> torch.Tensor:
        self.n += x
        return self.n + 0

    def empty(self) -> None:
        self.n.zero_()


ENTRIES = {"tick": lambda: (), "add": lambda: (torch.ones(4),), "empty": lambda: {}}


class Constant(nn.Module):
    """A model without inputs and state."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(6.0).view(2, 3))

    def forward(self) -> torch.Tensor:
        return self.table.exp()


@pytest.fixture(scope="module")
def events() -> list[Event]:
    """Returns the progress events of the build of `counter`."""
    return []


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory, events: list[Event]) -> Path:
    out = tmp_path_factory.mktemp("counter") / "counter.cgb"
    return cgcompile.build(Counter().eval(), ENTRIES, donations=DONATIONS, out=out, target="cpu", progress=events.append).path


def test_progress_names_the_entry(counter: Path, events: list[Event]) -> None:
    names = [f"entry {name} ({at} of 3)" for at, name in enumerate(ENTRIES, 1)]
    for stage in ("export", "lower"):
        texts = [event.text for event in events if event.stage == stage and event.state == "detail"]
        assert list(dict.fromkeys(text.partition(": ")[0] for text in texts)) == names, stage


def test_calls_sessions_buffers_and_the_self_test(counter: Path) -> None:
    with cgbundle.load(counter) as program:
        program.warmup()
        assert all(result.passed("tolerance") for result in replay_self_test(program))
        assert numpy.asarray(program.tick()).tolist() == [2.0] * 4
        other = program.session()
        assert [numpy.asarray(other.tick())[0] for _ in range(3)] == [2.0, 4.0, 6.0]
        assert numpy.asarray(program.add(numpy.ones(4, numpy.float32))).tolist() == [2.0] * 4
        assert program.empty() is None
        assert numpy.asarray(program.tick())[0] == 2.0 and numpy.asarray(other.state["n"])[0] == 3.0
        program.reset()
        assert numpy.asarray(program.state["n"]).tolist() == [0.0] * 4
        assert program["tick"].buffers(()) == [] and program["tick"].int_keys == ((),)
        with raises("input-structure", match="^expected no input, got 1$"):
            program.tick(numpy.ones(4))
        with raises("input-structure", match="^no input is called 'x': the bundle takes none$"):
            program.tick(x=numpy.ones(4))


def test_a_view_and_a_chain(counter: Path) -> None:
    with cgbundle.load(counter, outputs="view") as program:
        view = program.tick()
        program.empty()
        assert numpy.asarray(program.add(view)).tolist() == [2.0] * 4, "an output in a donation stays"
        program.tick()
        with raises("stale-view"):
            numpy.asarray(view)


def test_inspect_and_run(counter: Path) -> None:
    shown = CliRunner().invoke(main.app, ["inspect", str(counter)])
    assert "in   none" in shown.output and "out  none" in shown.output and "result = program.tick()" in shown.output
    ran = CliRunner().invoke(main.app, ["run", str(counter), "--entry", "tick"])
    assert ran.exit_code == 0 and "2.0, 2.0, 2.0, 2.0" in ran.output


def test_for_a_gpu_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    lower_here(monkeypatch)
    built = cgcompile.build(Counter().eval(), ENTRIES, donations=DONATIONS, out=tmp_path / "counter.cgb", target="sm_90")
    for manifest_entry in built.manifest.entries:
        assert [proof.method for proof in manifest_entry.self_test.proofs] == ["interpret"], manifest_entry.entry
        assert [step.kind for step in manifest_entry.programs[0].steps] == ["graph"], manifest_entry.entry


def test_a_whole_model_and_a_saved_program(tmp_path: Path) -> None:
    model = Constant().eval()
    saved = tmp_path / "constant.pt2"
    torch.export.save(torch.export.export(model, ()), saved)
    for number, (source, inputs) in enumerate(((model, lambda: {}), (str(saved), None))):
        out = cgcompile.build(source, inputs, out=tmp_path / f"{number}.cgb", target="cpu").path
        with cgbundle.load(out) as program:
            numpy.testing.assert_allclose(numpy.asarray(program()), model().detach().numpy(), rtol=1e-6)


@torch.library.custom_op("cgcompile_tests::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Refused(nn.Module):
    """The second of two entries is one that torch.export cannot export."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def bad(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.cgcompile_tests.without_fake(x)


def test_what_cannot_be_exported_names_its_entry(tmp_path: Path) -> None:
    def one() -> tuple[torch.Tensor]:
        return (torch.ones(2),)

    with raises("export-failed", match=r"^\S+:\d+: bad\(\): torch\.export cannot export the model"):
        cgcompile.build(Refused().eval(), {"forward": one, "bad": one}, out=tmp_path / "no.cgb", target="cpu")
    with raises("export-failed", match=r"^\S+:\d+: torch\.export cannot export the model"):
        cgcompile.build(Refused().eval(), {"bad": one}, out=tmp_path / "no.cgb", target="cpu")
