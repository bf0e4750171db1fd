"""`cgcompile check` prints findings with their places and the partition as a tree, and sets the exit status."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import cgcompile
from cgbundle.format.schema import Finding
from cgcompile.pipeline.records import RegionReport, Report
from cgcompile_cli.commands.check import PER_SIZE, grouped
from cgcompile_cli.main import app
from tests.pure.cli.test_commands import without_torch

ITEM = Finding(
    rule="host-scalar", severity="host", message="the CPU reads a number", node="item", where="m.py:3", source="x.item()",
    effect="this operation runs on the host between two graphs", fix="keep it",
)  # fmt: skip
BUFFER = replace(ITEM, rule="mutated-buffer", severity="refuse", node="add_", where="m.py:9", source="self.seen += 1")
KEYS = replace(ITEM, rule="too-many-keys", severity="note", node="", where="", source="", message="128 int_keys")

REPORT = Report(
    name="tiny", entry="forward", others=(), target="cuda",
    sizes=(("batch", (1, 8)),), axes=(("batch", "axis 0 of x"),), assumed=(), findings=(ITEM,),
    regions=(
        RegionReport(name="graph-1", kind="graph", reason="", operations=(("linear", 6), ("max", 1)), reads=(("x", 4096),)),
        RegionReport(name="host-1", kind="host", reason="host-scalar", operations=(("item", 1),), reads=(("max", 4),)),
        RegionReport(name="graph-2", kind="graph", reason="", operations=(("linear", 6),), reads=()),
    ),
    returned=(("y", 1024),), unpartitioned="", per_size="",
)  # fmt: skip


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that runs the command with a given report. `call.options` holds the library's options."""

    def run(report: Report, *arguments: str) -> Result:
        def check(model: str, **options: Any) -> Report:
            assert callable(options.pop("progress"))
            run.options = {"model": model, **options}  # type: ignore[attr-defined]
            return report

        monkeypatch.setattr(cgcompile, "check", check, raising=False)
        return CliRunner().invoke(app, ["check", "m.py", *arguments], prog_name="cgcompile", env={"COLUMNS": "80"})

    return run


def test_a_report_says_that_sizes_are_exported_apart(call: Any) -> None:
    lines = call(replace(REPORT, per_size="m.py: the program is only valid from batch=2 to 8, not for 1")).stdout.splitlines()
    assert lines[3] == "exported  per size: m.py: the program is only valid from batch=2 to 8, not for 1"
    assert lines[4] == f"          {PER_SIZE}"


def test_buffers_that_one_line_writes_to_are_told_once_each() -> None:
    several = [replace(BUFFER, message=f"forward() writes to the buffer '{number}.seen'") for number in range(3)]
    assert [[finding.message for finding in group] for group in grouped(several)] == [[finding.message] for finding in several]
    assert len(grouped([BUFFER, BUFFER])) == 1


def test_the_one_way_through_a_branch_is_not_told_as_the_model(call: Any) -> None:
    heading = "2 graphs, 1 host region"
    for rule, behind in (
        ("mutated-buffer", ""),
        ("data-dependent-branch", " of the path that the example inputs took"),
    ):
        assert heading + behind in call(replace(REPORT, findings=(replace(BUFFER, rule=rule),))).stdout.splitlines()


def test_a_report_in_full(call: Any) -> None:
    result = call(REPORT)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "model     tiny, for cuda (the GPU of this machine)",
        "sizes     batch 1, 8",
        "          batch: axis 0 of x",
        "findings  1 host (runs on the host between graphs)",
        "",
        "host host-scalar  m.py:3",
        "          x.item()",
        "  what    the CPU reads a number",
        "  effect  this operation runs on the host between two graphs",
        "  fix     keep it",
        "",
        "2 graphs, 1 host region",
        "├── graph graph-1, 7 operations",
        "│   ├── reads 1 value, 4.0 KiB at batch=8: x",
        "│   └── linear x6, max",
        "├── host host-1, 1 operation: host-scalar",
        "│   ├── reads 1 value, 4 B at batch=8: max",
        "│   └── item",
        "├── graph graph-2, 6 operations",
        "│   ├── reads nothing",
        "│   └── linear x6",
        "└── returns 1 value, 1.0 KiB at batch=8: y",
    ]


def test_a_target_that_nobody_named_is_said_to_be_chosen(call: Any) -> None:
    assert call(replace(REPORT, target="cpu")).stdout.splitlines()[0] == (
        "model     tiny, for cpu (no GPU is here; for one: --target cuda)"
    )
    assert call.options["target"] == "auto"
    assert call(REPORT, "--target", "cuda").stdout.splitlines()[0] == "model     tiny, for cuda"


@pytest.mark.parametrize(("findings", "code"), [((), 0), ((ITEM, KEYS), 0), ((BUFFER,), 1), ((ITEM, BUFFER), 1)])
def test_only_a_refusal_is_a_failure(call: Any, findings: tuple[Finding, ...], code: int) -> None:
    report = replace(REPORT, findings=findings)
    assert call(report).exit_code == code
    result = call(report, "--json")
    assert result.exit_code == code
    answer = json.loads(result.stdout)
    assert answer["refused"] is bool(code)
    assert [(finding["rule"], finding["where"], finding["fix"], finding["node"]) for finding in answer["findings"]] == [
        (finding.rule, finding.where, finding.fix, finding.node) for finding in findings
    ]
    assert answer["regions"][0]["operations"] == [["linear", 6], ["max", 1]]


def test_options_reach_the_library(call: Any) -> None:
    kept = ("--fallback-op", "a::b", "--fallback-op", "c")
    call(REPORT, "--sizes", "batch=1,8", "--sizes", "seq=4", "--target", "sm_90", "--strict", *kept)
    assert call.options == {
        "model": "m.py", "sizes": ["batch=1,8", "seq=4"], "target": "sm_90", "strict": True, "fallback_ops": ("a::b", "c"),
        "train": False, "max_paths": 64, "context": None, "lanes": (), "chunk": (), "dtype": None, "weights": None, "adapters": 0,
            "adapter_rank": None,
    }  # fmt: skip


def test_one_line_that_is_run_twelve_times_is_told_once(call: Any) -> None:
    twelve = [replace(ITEM, node=f"item_{index}") for index in range(12)]
    assert [len(group) for group in grouped([*twelve, BUFFER, KEYS, KEYS])] == [12, 1, 2]
    shown = call(replace(REPORT, findings=tuple(twelve))).stdout
    assert "the CPU reads a number, 12 times" in shown and shown.count("host-scalar  m.py:3") == 1
    apart = [replace(ITEM, where="", node=f"item_{index}") for index in range(2)]
    assert len(grouped(apart)) == 2, "without a line nobody knows that they are one"


def test_reports_without_regions(call: Any) -> None:
    none = replace(REPORT, regions=(), returned=())
    assert "the target is the CPU, which has no CUDA graphs" in call(replace(none, target="cpu")).stdout
    assert "no regions: an output has no size" in call(replace(none, unpartitioned="an output has no size")).stdout


def test_assumed_sizes_are_said(call: Any) -> None:
    assert "batch 1, 8 (assumed: name yours with --sizes batch=...)" in call(replace(REPORT, assumed=("batch",))).stdout


def test_hostile_text_cannot_drive_the_terminal(call: Any) -> None:
    evil = "\x1b]0;owned\x07[red]\u202e\n"
    finding = replace(ITEM, message=evil, where=evil, source=evil, effect=evil, fix=evil)
    region = replace(REPORT.regions[1], reason=evil, operations=((evil, 2),), reads=((evil, 4),))
    report = replace(REPORT, name=evil, findings=(finding,), regions=(region,), returned=((evil, 4),))
    for arguments in ((), ("--json",)):
        assert all(letter == "\n" or letter.isprintable() for letter in call(report, *arguments).stdout)
    assert "[red]" in call(replace(report, regions=(), unpartitioned=evil)).stdout


def test_the_missing_extra_is_named(tmp_path: Any) -> None:
    done = without_torch("check", tmp_path / "model.py")
    assert done.returncode == 2 and done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.startswith("error: ") and second == "hint: pip install 'torch>=2.11,<2.14' 'triton>=3.6,<3.8' numpy"
