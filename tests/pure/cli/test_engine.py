"""Commands over a bundle of an engine's graphs: what they show, and what they refuse in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cgbundle.format.schema import Manifest
from cgcompile_cli.main import app
from tests.helpers.bundles import engine_bundle


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return engine_bundle.write(tmp_path / "engine.cgb")


def call(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.output + (str(done.exception) if done.exit_code and not done.output else "")


def test_inspect_lists_graphs_and_tensors(path: Path) -> None:
    status, text = call("inspect", path)
    assert status == 0
    for words in (
        "'small'     5 nodes", "(8, 'rows')  5 nodes", "out    float32  [8, 16]", "result  float32  [4, 16]",
        "CUDA driver 13.0, no other", "by a fresh process, bit for bit", "cgbundle.attach(",
    ):  # fmt: skip
        assert " ".join(words.split()) in " ".join(text.split()), text


def test_inspect_as_json_has_the_keys(path: Path) -> None:
    status, text = call("inspect", path, "--json")
    answer = json.loads(text)
    assert status == 0 and [row["key"] for row in answer["graphs"]] == ["small", [8, "rows"]]
    assert answer["verified"] and answer["manifest"]["engine"]["tensors"][0]["name"] == "small"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("inspect", "--graph", "8"), "--graph shows programs"),
        (("run",), "the bundle holds graphs of an engine, not a program"),
        (("verify", "--run"), "holds graphs of an engine, not a program"),
    ],
)
def test_what_is_of_programs_is_refused(path: Path, arguments: tuple[str, ...], match: str) -> None:
    status, text = call(arguments[0], path, *arguments[1:])
    assert status == 2 and match in text and "Traceback" not in text, text


def test_verify_and_diff_take_it(path: Path, tmp_path: Path) -> None:
    assert call("verify", path)[0] == 0

    def smaller(manifest: Manifest) -> Manifest:
        assert manifest.engine is not None
        tensors = [replace(row, shape=(2, 16)) if row.name == "small" else row for row in manifest.engine.tensors]
        return replace(manifest, engine=replace(manifest.engine, tensors=tuple(tensors), graphs=manifest.engine.graphs[:1]))

    other = engine_bundle.write(tmp_path / "other.cgb", smaller)
    assert call("diff", path, path) == (0, "no difference\n")
    status, text = call("diff", path, other)
    assert status == 1 and "small" in text and '[8,"rows"]' in text, text
