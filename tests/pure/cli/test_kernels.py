"""`inspect --kernels`: launches counted in the tables, images from the manifest, choices from kernels.json if it exists."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cgbundle.format import archive
from cgcompile.bundle import manifest_text
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import KernelNode
from cgcompile_cli import main
from cgcompile_cli.inspection.kernels import CHOICES, KernelLaunches, kernels
from tests.helpers.bundles import tiny_bundle
from tests.helpers.bundles.edits import edited
from tests.helpers.places import GOLDEN

HOME = GOLDEN / "v1"
HEADS = ["launches", "image", "sha256", "kernel"]


@pytest.fixture(params=["gpt_two", "mlp"])
def golden(request: pytest.FixtureRequest) -> Path:
    return HOME / f"{request.param}.cgb"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HOME / "mlp.cgb", tmp_path / "mlp.cgb"))


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main.app, [str(argument) for argument in arguments], prog_name="cgcompile", env={"COLUMNS": "80"})


def listed(path: Path) -> list[KernelLaunches]:
    return kernels(str(path), archive.read_manifest(str(path)))


def counted(path: Path) -> Counter[tuple[str, str]]:
    """Returns the number of launches of every (image, symbol) in the decoded recordings."""
    launches: Counter[tuple[str, str]] = Counter()
    for program in archive.read_manifest(str(path)).entries[0].programs:
        for step in program.steps:
            recording = tables.decode((path / step.file).read_bytes(), step.file)
            for node in recording.nodes:
                if isinstance(node, KernelNode):
                    function = recording.functions[node.function]
                    launches[function.image, function.symbol] += 1
    return launches


def sealed(path: Path) -> Path:
    """Returns the bundle with a manifest that describes its current files."""
    tiny_bundle.seal(path, replace(archive.read_manifest(str(path)), files=manifest_text.describe_files(str(path))))
    return path


def choices(path: Path, rows: object) -> Path:
    (path / CHOICES).write_text(rows if isinstance(rows, str) else json.dumps(rows))
    return sealed(path)


def test_every_launch_of_every_int_key_is_counted(golden: Path) -> None:
    rows = listed(golden)
    assert {(row.image, row.symbol): row.launches for row in rows} == counted(golden)
    assert {row.image for row in rows} == {path.name for path in (golden / "kernels").iterdir()}
    for row in rows:
        assert row.image_bytes == (golden / "kernels" / row.image).stat().st_size
        assert (row.configuration, row.chosen) == ("", ""), "captured kernels: nobody here chose them"


def test_the_most_launched_come_first_then_the_largest(golden: Path) -> None:
    order = [(-row.launches, -row.image_bytes) for row in listed(golden)]
    assert order == sorted(order) and len(set(order)) > 1


def test_a_kernel_that_several_int_keys_launch_is_one_row(copy: Path) -> None:
    manifest = archive.read_manifest(str(copy))
    before = {(row.image, row.symbol): row.launches for row in listed(copy)}
    first, second = manifest.entries[0].programs
    twice = replace(second, steps=first.steps)
    after = kernels(str(copy), edited(manifest, programs=(first, twice)))
    assert after and all(row.launches == 2 * before[row.image, row.symbol] for row in after)


def test_shown_as_a_table_and_as_json(golden: Path) -> None:
    rows = listed(golden)
    result = call("inspect", golden, "--kernels")
    assert (result.exit_code, result.stderr) == (0, "")
    head, *lines = result.stdout.splitlines()
    assert [head.find(heading) for heading in HEADS] == sorted(head.find(heading) for heading in HEADS) and head.find(HEADS[0]) >= 0
    assert all(len(line) <= 80 for line in (head, *lines)), "no line is wider than the terminal"
    names = head.index("kernel")
    firsts = [line for line in lines if line[:names].strip()]
    assert [line.split()[:1] + line.split()[3:4] for line in firsts] == [[str(row.launches), row.image[:12]] for row in rows]
    assert "".join([line[names:] for line in lines]) == "".join([row.symbol for row in rows]), "and no name is cut"
    answer = json.loads(call("inspect", golden, "--kernels", "--json").stdout)
    assert answer == [row._asdict() for row in rows]


def test_configurations_are_shown(copy: Path) -> None:
    row = listed(copy)[0]
    said = {"image": row.image, "symbol": row.symbol, "configuration": "BLOCK_M=16 warps=2", "chosen": "table"}
    unknown = {**said, "image": "0" * 64}
    choices(copy, [said, unknown])
    by_symbol = {(kernel.image, kernel.symbol): kernel for kernel in listed(copy)}
    assert by_symbol[row.image, row.symbol][-2:] == ("BLOCK_M=16 warps=2", "table")
    assert sum(bool(kernel.chosen) for kernel in by_symbol.values()) == 1 and len(by_symbol) == len(counted(copy))
    shown = call("inspect", copy, "--kernels").stdout
    assert "BLOCK_M=16 warps=2 (table)" in shown and "kernel, configuration (chosen by)" in shown
    assert call("verify", copy).exit_code == 0, "the file belongs to the bundle"


def test_hostile_text_cannot_drive_the_terminal(copy: Path) -> None:
    row = listed(copy)[0]
    choices(copy, [{"image": row.image, "symbol": row.symbol, "configuration": "\x1b]0;owned\x07\n", "chosen": "\u202e"}])
    for arguments in ((), ("--json",)):
        shown = call("inspect", copy, "--kernels", *arguments).output
        assert shown and all(letter == "\n" or letter.isprintable() for letter in shown)


@pytest.mark.parametrize(
    "rows", ["", "{", "nonsense", "1", "null", '"text"', [1], [{}], [{"image": "a", "symbol": "b"}], [[]], "[" * 100_000]
)  # fmt: skip
def test_choices_that_are_none_are_one_line(copy: Path, rows: object) -> None:
    choices(copy, rows)
    result = call("inspect", copy, "--kernels")
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert result.stderr.splitlines()[0].startswith(f"error: {CHOICES}: ")


@pytest.mark.parametrize("name", [CHOICES, "graphs"])
def test_a_changed_byte_is_found(copy: Path, name: str) -> None:
    choices(copy, [])
    path = copy / name if name == CHOICES else sorted((copy / name).iterdir())[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    result = call("inspect", copy, "--kernels")
    assert result.exit_code == 1 and result.stdout == "" and str(path.relative_to(copy)) in result.stderr


def test_a_table_that_names_an_image_which_is_not_there(copy: Path) -> None:
    image = sorted((copy / "kernels").iterdir())[0]
    image.unlink()
    result = call("inspect", sealed(copy), "--kernels")
    assert result.exit_code == 1 and image.name in result.stderr and len(result.stderr.splitlines()) <= 2


def test_a_bundle_without_kernels_has_none(tmp_path: Path) -> None:
    path = tiny_bundle.write_bundle(tmp_path / "cpu.cgb")
    assert listed(path) == []
    assert json.loads(call("inspect", path, "--kernels", "--json").stdout) == []
