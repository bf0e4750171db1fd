"""`cgcompile bench --generate` with a tiny Llama: a process without torch, beside transformers' generate."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")

from cgbundle.validate.bundle import checked_manifest
from cgcompile.tools.generation.layout import Layout, read_layout
from cgcompile.tools.generation.measure import lengths
from cgcompile_cli import main
from tests.helpers.bundles.llama_bundle import llama_bundle
from tests.helpers.raising import raises


def test_a_bundle_beside_eager_generate() -> None:
    folder = llama_bundle()
    arguments = ["bench", str(folder / "llama.cgb"), "--generate", "--against", "eager", "--rounds", "1", "--quiet"]
    result = CliRunner().invoke(main.app, [*arguments, "--model", str(folder / "llama"), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    ours, eager = report["ways"]
    assert (report["prompt"], report["tokens"], report["batches"]) == (32, 31, [1]) and len(ours["made"]) == 32
    assert ours["made"] == eager["made"] and ours["firsts"][0] < eager["firsts"][0] and not ours["why"] + eager["why"]
    assert all(way["rates"][0][1] > 0 and way["seconds"] > way["firsts"] for way in report["ways"])
    table = CliRunner().invoke(main.app, arguments)
    assert table.exit_code == 0 and "skipped: it needs --model FOLDER" in " ".join(table.stdout.split())


def test_what_a_bundle_has_room_for() -> None:
    layout = read_layout(checked_manifest(str(llama_bundle() / "llama.cgb")), 16)
    assert (layout.prefill, layout.decode, layout.page, layout.pages, layout.slots) == ((2, 16, 4), ((2, 4),), 16, 65, 9)
    assert layout.longest(2) == 64 and lengths(layout) == (32, 31, (1,))
    large = Layout(
        prefill=(1, 128, 520), decode=((1, 520), (8, 520), (32, 520)), page=16, pages=4200, slots=33, sampling=(), vocabulary=9,
        dtype="bfloat16", several=True, adapters=False,
    )  # fmt: skip
    assert lengths(large) == (128, 64, (1, 8, 32)) and lengths(replace(large, slots=9)) == (128, 64, (1, 8))
    assert lengths(replace(large, pages=32 * 6 + 1)) == (48, 47, (1, 8, 32))


def test_a_bundle_of_another_kind_and_what_does_not_fit() -> None:
    manifest = checked_manifest(str(llama_bundle() / "llama.cgb"))
    with raises("bench-failed", match="no entries prefill and decode with a paged cache"):
        read_layout(replace(manifest, entries=(replace(manifest.entries[0], name="forward"),)), 16)
    path = str(llama_bundle() / "llama.cgb")
    for options, text in (
        (["--against", "manual"], "no baseline 'manual' of generation: there are eager, compile"),
        (["--model", "/none"], "/none: no folder with config.json"),
        (["--size", "8"], "--generate takes no --plot, --size or --entry"),
    ):
        result = CliRunner().invoke(main.app, ["bench", path, "--generate", "--quiet", *options])
        assert result.exit_code and text in " ".join(result.stderr.split()), result.stderr
