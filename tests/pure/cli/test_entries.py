"""The golden, cross-compiled bundle of several entries on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cgbundle.format import archive
from cgbundle.format.file_names import entry_named
from cgcompile_cli import main, summary
from tests.helpers.places import GOLDEN

BUNDLE = GOLDEN / "v1/traced_entries.cgb"


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main.app, [str(argument) for argument in arguments], prog_name="cgcompile", env={"COLUMNS": "120"})
    return result.exit_code, result.stdout


def test_inspect_shows_every_entry() -> None:
    code, text = call("inspect", BUNDLE)
    assert code == 0
    for words in (
        "entry              forward", "changes cache", "batch 1, 4: 2 int_keys", "rows 2: 1 int_key", "no dimensions: 1 int_key",
        "programs fill", "self-test empty", "result = program(x)", "result = program.fill(x, lane)", "result = program.empty(lane)",
    ):  # fmt: skip
        assert words in text, words


def test_json_says_the_same_of_every_entry() -> None:
    plain = json.loads(call("inspect", BUNDLE, "--json")[1])
    rows = {row["entry"]: row for row in plain["entries"]}
    assert list(rows) == ["forward", "fill", "empty"]
    assert rows["fill"]["int_keys"] == [[2]]
    assert rows["fill"]["mutated_buffers"] == ["cache"] and rows["forward"]["mutated_buffers"] == []
    assert plain["int_keys"] == rows["forward"]["int_keys"] == [[1], [4]]


def test_an_equal_assignment_is_printed_once() -> None:
    manifest = archive.Archive(str(GOLDEN / "v1/cpu_records.cgb")).manifest
    lines = summary.load_lines("x.cgb", manifest, manifest.entries * 2)
    call = "result = program(batch, shift=shift)"
    assert lines[2:] == ["batch = {'x': batch_x, 'scale': 2.0}", call, call]


@pytest.mark.parametrize(
    ("key", "label"), [("fill:2", "fill: rows=2"), ("empty:-", "empty"), ("4", "batch=4"), ("forward:4", "batch=4")]
)
def test_an_int_key_of_an_entry(key: str, label: str) -> None:
    code, text = call("inspect", BUNDLE, "--graph", key)
    assert code == 0 and f"int_key  {label}" in text


def test_an_entry_that_is_not_there() -> None:
    code, text = call("inspect", BUNDLE, "--graph", "encode:1", "--json")
    assert code == 2 and "no entry 'encode', but forward, fill, empty" in text
    code, text = call("run", BUNDLE, "--entry", "emty", "--json")
    assert code == 2 and "no entry 'emty' (did you mean empty?), but forward, fill, empty" in text


def test_memory_and_kernels_are_of_all_entries() -> None:
    text = call("inspect", BUNDLE, "--memory")[1]
    assert all(f"entry  {name}" in text for name in ("forward", "fill", "empty"))
    rows = json.loads(call("inspect", BUNDLE, "--memory", "--json")[1])["programs"]
    assert [(row["entry"], row["key"]) for row in rows] == [("forward", [1]), ("forward", [4]), ("fill", [2]), ("empty", [])]
    launches = sum(row["launches"] for row in json.loads(call("inspect", BUNDLE, "--kernels", "--json")[1]))
    assert launches == sum(len([node for node in row["nodes"] if "kernel" in str(node) or node]) for row in rows)


def test_the_page_has_sections_for_every_entry(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert call("inspect", BUNDLE, "--html", page)[0] == 0
    text = page.read_text()
    for name in ("forward", "fill", "empty"):
        assert f'id="signature-{name}"' in text and f"Memory of {name}" in text
        section = text.partition(f'id="signature-{name}"')[2].partition("</section>")[0]
        called = "program" if name == "forward" else f"program.{name}"
        assert section.count("result = ") == 1 and f"result = {called}(" in section, "each section has its own call"
    anchors = [part.split('"')[0] for part in text.split(' id="')[1:]]
    assert len(anchors) == len(set(anchors))


def test_a_bundle_does_not_differ_from_itself() -> None:
    code, text = call("diff", BUNDLE, BUNDLE)
    assert code == 0 and "no difference" in text


def test_verify_finds_nothing() -> None:
    assert call("verify", BUNDLE)[0] == 0


def test_attributes_of_a_program_are_reached_by_brackets() -> None:
    assert [summary.attribute(name) for name in ("decode", "reset", "inputs")] == [
        "program.decode", "program['reset']", "program['inputs']",
    ]  # fmt: skip
    assert entry_named(archive.read_manifest(str(BUNDLE)), "fill").name == "fill"


DONATED = GOLDEN / "v1/traced_chains.cgb"


def test_donations_and_what_is_reserved_for_them_are_shown(tmp_path: Path) -> None:
    code, text = call("inspect", DONATED)
    assert code == 0
    for words in ("encode.output -> step.hidden", "step.0 -> step.hidden", "reserved in the arena: encode 512 B, step 512 B"):
        assert words in text, words
    plain = json.loads(call("inspect", DONATED, "--json")[1])
    assert plain["donations"] == [["encode.output", "step.hidden"], ["step.0", "step.hidden"]]
    assert plain["donated"] == {"encode": 512, "step": 512}
    assert call("inspect", DONATED, "--html", tmp_path / "page.html")[0] == 0
    assert "<li>encode.output -&gt; step.hidden</li>" in (tmp_path / "page.html").read_text()
    assert "\ndonations  " in text and "\ndonations  " not in call("inspect", BUNDLE)[1]


def test_diff_knows_donations() -> None:
    code, text = call("diff", DONATED, BUNDLE)
    assert code == 1
    assert "only in A: encode.output -> step.hidden, step.0 -> step.hidden" in text and "donated by encode" in text
