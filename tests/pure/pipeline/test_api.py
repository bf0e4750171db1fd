"""The Python interface of cgcompile: its names, the errors for wrong arguments, progress, and the result."""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cgcompile
from cgbundle.format.schema import Finding
from cgcompile.pipeline.records import Built, Report
from cgcompile.util.garbage_collection import collect_seldom, quick_imports, seldom_collected
from cgcompile.util.progress import Event, Lines, Stages, silent, watcher
from tests.helpers.bundles.tiny_bundle import manifest
from tests.helpers.raising import raises


class Net:
    def forward(self, x: object) -> object:
        return x


class Tensor:
    pass


def test_the_names_of_the_package_are_the_public_ones() -> None:
    assert dir(cgcompile) == sorted(cgcompile.__all__)
    assert all(getattr(cgcompile, name) is not None for name in dir(cgcompile))


ARGUMENTS: list[tuple[str, Callable[[], object]]] = [
    ("inputs is a tuple of 1 Tensor, expected a function", lambda: cgcompile.build(Net(), (Tensor(),), sizes=[1])),  # type: ignore[arg-type]
    ("inputs is a list of 2 Tensors, expected a function", lambda: cgcompile.check(Net(), [Tensor(), Tensor()])),  # type: ignore[arg-type]
    ("inputs is a Tensor, expected a function", lambda: cgcompile.build(Net(), Tensor())),  # type: ignore[arg-type]
    ("inputs is missing: a function from the sizes", lambda: cgcompile.build(Net(), sizes=[1])),
    ("model is the class Net, expected a torch.nn.Module", lambda: cgcompile.build(Net, lambda batch: (batch,))),
    ("model is an int, expected a torch.nn.Module", lambda: cgcompile.check(3, lambda batch: (batch,))),
    ("inputs is given, but model.py has its own", lambda: cgcompile.build(Path("model.py"), lambda batch: (batch,))),
]


@pytest.mark.parametrize(("said", "call"), ARGUMENTS, ids=[said[:30] for said, _ in ARGUMENTS])
def test_wrong_arguments_are_told_what_was_expected(said: str, call: Callable[[], object]) -> None:
    with raises("source-invalid", match=said):
        call()


@pytest.mark.parametrize("budget", [0, -1, float("nan")])
def test_a_budget_that_proves_nothing(tmp_path: Path, budget: float) -> None:
    (tmp_path / "model.py").write_text("def model(): ...\ndef inputs(): ...\n")
    with raises("limit-invalid", match="expected more than 0 seconds"):
        cgcompile.build(tmp_path / "model.py", out=tmp_path / "x.cgb", target="sm_90", prove_budget=budget)


# --- progress ---------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(progress: Any, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with watcher(progress) as tell, Stages(tell)("lower") as say:
        say("3 of 4 kernels")
        say.result("4 kernels")
    return stream.getvalue()


def test_progress_is_shown_where_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace())
    assert shown(None, io.StringIO(), monkeypatch) == ""
    assert "lower" in shown(None, Terminal(), monkeypatch) and "lower" in shown("bar", io.StringIO(), monkeypatch)
    assert shown("silent", Terminal(), monkeypatch) == ""
    monkeypatch.setitem(sys.modules, "IPython", shell)  # type: ignore[arg-type]
    assert shown(None, io.StringIO(), monkeypatch) == ""
    monkeypatch.setitem(sys.modules, "IPython", notebook)  # type: ignore[arg-type]
    assert "lower" in shown(None, io.StringIO(), monkeypatch)


def test_a_finished_stage_is_a_line_and_the_running_one_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown("bar", io.StringIO(), monkeypatch)
    assert text.endswith("\n") and text.count("\n") == 1
    *over, last = text.rstrip("\n").split("\r")
    assert last.startswith("lower ") and last.endswith("4 kernels") and "3 of 4 kernels" in "".join(over)
    assert all(not line.strip() or "lower" in line for line in over)


def test_what_a_stage_gave_is_told_once() -> None:
    events: list[Event] = []
    with Stages(events.append)("lower") as say:
        say.result("0 kernels")
        say("3 of 4 kernels")
        say.result("4 kernels")
    assert [(event.state, event.text) for event in events] == [("start", ""), ("detail", "3 of 4 kernels"), ("done", "4 kernels")]
    assert 0.0 == events[0].seconds < events[1].seconds <= events[2].seconds


def test_a_stage_that_fails_leaves_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with pytest.raises(KeyError), watcher("bar") as tell, Stages(tell)("lower"):
        raise KeyError
    assert stream.getvalue().endswith("\r")
    Lines().clear()
    assert stream.getvalue().count("\r") == 2


def test_a_function_is_told_and_nothing_else_is_known() -> None:
    events: list[Event] = []
    with watcher(events.append) as tell, Stages(tell)("export"):
        pass
    assert [(event.stage, event.state) for event in events] == [("export", "start"), ("export", "done")]
    with raises("progress-unknown", match="progress is 'loud', expected None, 'bar', 'silent'"), watcher("loud"):  # type: ignore[arg-type]
        pass
    with watcher("silent") as tell:
        assert tell is silent


# --- the result -------------------------------------------------------------------------------------------------------


def test_a_result_prints_as_three_lines() -> None:
    tiny = manifest()
    built = Built(path=Path("a<b.cgb"), manifest=tiny, seconds=(("export", 1.25), ("verify", 2.0)))
    first, second, third = str(built).splitlines()
    assert first.startswith("a<b.cgb, ") and first.endswith("built in 3.2 s") and tiny.target.kind in first
    assert f"{len(tiny.entries[0].programs)} int_key" in second and "proved" in second
    assert third == "program = cgbundle.load('a<b.cgb')"
    assert "\n" not in repr(built) and "a<b.cgb" in repr(built) and len(repr(built)) < 100
    assert built._repr_html_() == f"<pre>{str(built).replace('<', '&lt;').replace(chr(39), '&#x27;')}</pre>"


# --- imports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [True, False])
def test_garbage_is_collected_after_imports_as_before(on: bool) -> None:
    was = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        with pytest.raises(KeyError), quick_imports():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is on
    finally:
        gc.unfreeze()
        (gc.enable if was else gc.disable)()


def test_what_imports_made_is_looked_through_again_after_the_build() -> None:
    before = gc.get_freeze_count()
    with seldom_collected():
        with quick_imports():
            pass
        assert gc.get_freeze_count() > before == 0
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        with seldom_collected(), quick_imports():
            pass
        assert gc.get_freeze_count() > 0, "the caller's own stay apart"
    finally:
        gc.unfreeze()


def test_a_process_that_compiles_collects_seldom() -> None:
    before = gc.get_threshold()
    try:
        collect_seldom()
        assert gc.isenabled() and gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] == 100_000
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def test_a_report_prints_a_line_per_finding() -> None:
    def report(entry: str, *entry_findings: Finding, others: tuple[Report, ...] = ()) -> Report:
        return Report(
            name="gpt", entry=entry, target="cuda", sizes=(), axes=(), assumed=(), findings=entry_findings, regions=(), returned=(),
            unpartitioned="", per_size="", others=others,
        )  # fmt: skip

    def finding(severity: str) -> Finding:
        return Finding(
            rule="cpu-sync", severity=severity, message="the host reads a number", node="", where="gpt.py:3", source="", effect="",
            fix="leave it out",
        )  # fmt: skip

    assert str(report("forward")) == "gpt for cuda: can be built, 0 findings"
    gpt_report = report("prefill", finding("host"), others=(report("decode", finding("refuse")),))
    assert str(gpt_report).splitlines() == [
        "gpt for cuda: cannot be built, 1 of 2 findings",
        "  prefill: host cpu-sync: the host reads a number (gpt.py:3); leave it out",
        "  decode: refuse cpu-sync: the host reads a number (gpt.py:3); leave it out",
    ]
    assert repr(gpt_report) == "<Report of gpt for cuda: cannot be built, 1 of 2 findings>"
