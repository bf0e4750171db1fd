"""The progress of a build without a terminal: a log gets a line when a long stage begins, and while it continues."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from cgcompile.util.progress import Event
from cgcompile_cli.estimates import Estimate, Left
from cgcompile_cli.output import console, show
from cgcompile_cli.progress import LONG, OFTEN, watching


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report(events: list[tuple[str, str, str, float]], verbose: bool = False) -> None:
    with watching(quiet=False, verbose=verbose) as watch:
        assert watch is not None
        for stage, state, text, seconds in events:
            watch(Event(stage=stage, state=state, text=text, seconds=seconds))


@pytest.mark.parametrize("stage", LONG)
def test_a_long_stage_is_told_when_it_begins(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    report([("check", "start", "", 0.0), ("check", "done", "0 findings", 0.5), (stage, "start", "", 0.0)])
    assert capsys.readouterr().err.splitlines() == ["check          0.50 s  0 findings", f"{stage:<10}        ...  {LONG[stage]}"]


def test_a_long_stage_is_heard_of_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [("lower", "detail", f"{number} of 60", float(number)) for number in range(1, 25)]
    report([("lower", "start", "", 0.0), *steps, ("lower", "done", "60 kernels", 30.0), ("emit", "start", "", 0.0)])
    _, *lines = capsys.readouterr().err.splitlines()
    assert OFTEN == 10.0 and [line.split() for line in lines] == [
        ["+10.0", "s", "10", "of", "60"], ["+20.0", "s", "20", "of", "60"], ["lower", "30.0", "s", "60", "kernels"],
    ]  # fmt: skip


def test_every_stage_begins_its_own_wait(capsys: pytest.CaptureFixture[str]) -> None:
    early = [("lower", "start", "", 0.0), ("lower", "detail", "early", 50.0), ("lower", "done", "b", 51.0)]
    report([*early, ("host", "start", "", 0.0), ("host", "detail", "late", 9.0)])
    assert "early" in (err := capsys.readouterr().err) and "late" not in err


def test_verbose_says_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    report([("emit", "start", "", 0.0), ("emit", "detail", "a", 0.1), ("emit", "detail", "b", 0.2)], verbose=True)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_terminal_has_the_live_line_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    report([("lower", "start", "", 0.0), ("lower", "detail", "1 of 60", 50.0), ("lower", "done", "60 kernels", 51.0)])
    assert LONG["lower"] not in screen.getvalue() and "+50.0 s" not in screen.getvalue() and "60 kernels" in screen.getvalue()


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records an earlier build of `a` for the CPU that took 100 seconds."""
    monkeypatch.setenv("CGCOMPILE_CACHE", str(tmp_path / "cache"))
    first = Estimate("a", "cpu")
    assert first.left("lower", 5.0) is None, "nothing is known"
    for stage, seconds in (("export", 20.0), ("lower", 70.0), ("verify", 10.0)):
        first.done(stage, seconds)
    first.keep()


@pytest.mark.parametrize("program", ["a", "b"])
def test_an_earlier_build_says_what_is_left(known: None, program: str) -> None:
    again = Estimate(program, "cpu")
    assert again.left("export", 9.0) is None, "the first tenth"
    assert again.left("export", 10.0) == Left(part=0.1, seconds=90.0)
    again.done("export", 40.0)
    assert again.left("lower", 0.0) == Left(part=0.2, seconds=160.0), "twice as slow"
    assert again.left("lower", 500.0) == Left(part=0.9, seconds=pytest.approx(10 * 110 / 90))
    assert again.left("never seen", 1.0) is None and Estimate("a", "sm_90").left("lower", 5.0) is None


@pytest.mark.parametrize("program", ["a", "b"])
def test_a_build_from_the_cache_is_no_measure_for_the_next_one(known: None, program: str) -> None:
    """After it, a new model had `about 2 s left` while it compiled for 25 s."""
    cached = Estimate("a", "cpu")
    with watching(quiet=False, estimate=cached) as watch:
        assert watch is not None
        for stage, seconds, text in (("export", 20.0, "9 nodes"), ("lower", 0.1, "host/model.so, 9 KiB, from the cache")):
            watch(Event(stage=stage, state="done", text=text, seconds=seconds))
    cached.keep()
    again = Estimate(program, "cpu")
    again.done("export", 20.0)
    assert again.left("lower", 0.0) == Left(part=0.2, seconds=80.0)


def test_no_time_is_shown_where_nothing_of_the_earlier_build_is_left(known: None, capsys: pytest.CaptureFixture[str]) -> None:
    first = Estimate("short end", "cpu")
    for stage, seconds in (("export", 20.0), ("lower", 70.0), ("verify", 0.1)):
        first.done(stage, seconds)
    first.keep()
    with watching(quiet=False, estimate=Estimate("short end", "cpu")) as watch:
        assert watch is not None
        watch(Event(stage="export", state="done", text="9 nodes", seconds=20.0))
        watch(Event(stage="lower", state="detail", text="1 of 2 files", seconds=80.0))
    assert capsys.readouterr().err.splitlines()[-1].endswith("1 of 2 files")


def test_a_log_hears_what_is_left(known: None, capsys: pytest.CaptureFixture[str]) -> None:
    with watching(quiet=False, estimate=Estimate("a", "cpu")) as watch:
        assert watch is not None
        watch(Event(stage="export", state="done", text="9 nodes", seconds=20.0))
        watch(Event(stage="lower", state="start", text="", seconds=0.0))
        watch(Event(stage="lower", state="detail", text="1 of 2 files", seconds=45.0))
    assert [line.partition("about ")[2] for line in capsys.readouterr().err.splitlines()] == ["", "1 min 20 s left", "35 s left"]


def test_a_terminal_has_a_bar(known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    with watching(quiet=False, estimate=Estimate("a", "cpu")) as watch:
        assert watch is not None
        watch(Event(stage="export", state="done", text="9 nodes", seconds=20.0))
        watch(Event(stage="lower", state="detail", text="1 of 2 files", seconds=45.0))
        console(sys.stderr).print(watch.running())
    assert "1 of 2 files" in screen.getvalue() and "35 s left" in screen.getvalue() and "\u2501" in screen.getvalue()


def test_what_stages_spent_is_one_row_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    with watching(quiet=False, verbose=True) as watch:
        assert watch is not None
        watch(Event(stage="source", state="done", text="", seconds=0.5))
        subprocess.run([sys.executable, "-S", "-c", "sum(range(3_000_000))"], check=True)
        watch(Event(stage="lower", state="done", text="", seconds=2.0))
        show(watch.stages(), sys.stderr)
    heads, source, lower = capsys.readouterr().err.splitlines()[-3:]
    assert heads.split()[:3] == ["seconds", "processor", "in"] and source.split()[:3] == ["source", "0.50", "s"]
    assert lower.split()[:3] == ["lower", "2.00", "s"] and "iB" in lower
    assert (source.split()[5], lower.split()[5]) == ("0", lower.split()[5]) and float(lower.split()[5]) > 0, "it ended in `lower`"
