"""One bundle for a GPU and two processor levels: weights and self-test are stored once, and the variant for this machine runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import cgbundle
import cgcompile
from cgbundle import self_test
from cgbundle.errors import CgbundleError
from cgbundle.format import file_names
from cgbundle.format.archive import Archive
from cgbundle.format.variants import variant_name
from cgbundle.validate import bundle as validate
from cgcompile.targets.instruction_sets import LEVELS, common_level
from cgcompile.tools.diff.bundle_files import open_bundle
from cgcompile.tools.diff.compare import compare
from cgcompile_cli import main
from tests.helpers.raising import raises

MODEL = '''
import torch
from torch import nn


class Counted(nn.Module):
    """State, random numbers, and tables of the positions."""

    def __init__(self):
        super().__init__()
        self.mixed, self.read = nn.Linear(8, 8), nn.Linear(8, 8)
        self.places = nn.Parameter(torch.randn(16, 8))
        self.register_buffer("zeros", torch.zeros(1))
        self.register_buffer("calls", torch.ones(4))

    def forward(self, x):
        self.calls.add_(x.sum())
        noise = torch.rand_like(x) * 1e-9
        return self.read(x) + self.mixed(self.places[: x.shape[0]]).tanh() + noise, self.calls.clone() + self.zeros


def model():
    return Counted()


def inputs(rows):
    return (torch.randn(rows, 8),)
'''
TARGETS = ("sm_90", "x86-64-v2", "x86-64-v3")


on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's variant would be taken")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if common_level("x86_64", {name for level in LEVELS for name in level.features}) is None:
        pytest.skip("for x86_64")
    folder = tmp_path_factory.mktemp("variants")
    (folder / "counted.py").write_text(MODEL)
    built = cgcompile.build(
        str(folder / "counted.py"), sizes=[2, 4], out=folder / "counted.cgb", target=",".join(TARGETS), prove_budget=300
    )
    assert built.variants == TARGETS and "sm_90, x86-64-v2, x86-64-v3" in str(built)
    return built.path


def test_weights_and_self_test_stand_once(bundle: Path) -> None:
    opened = Archive(str(bundle))
    validate.check_bundle(opened, "full")
    assert validate.examine(Archive(str(bundle))) == []
    names = [file.path for file in opened.manifest.files]
    assert [name for name in names if name.endswith((".safetensors", ".pt2"))] == [
        file_names.SELF_TEST, file_names.PROGRAM, file_names.TABLES, file_names.WEIGHTS,
    ]  # fmt: skip
    for name in TARGETS[:1]:
        assert f"graphs/{name}/model-2.bin" in names
    assert {f"host/{name}/model.so" for name in TARGETS[1:]} <= set(names)
    for number, name in enumerate(TARGETS):
        opened.choose(number)
        proofs = opened.manifest.entries[0].self_test.proofs
        assert variant_name(opened.manifest.target) == name and len(opened.manifest.entries[0].programs) == 2
        assert {proof.method for proof in proofs} == {"interpret" if name.startswith("sm_") else "replay"}


@on_the_cpu
def test_a_machine_without_a_gpu_takes_the_highest_level(bundle: Path) -> None:
    with cgbundle.load(bundle) as program:
        level = program.manifest.target.level
        assert level in TARGETS[1:]
        assert all(result.passed("tolerance") for result in self_test.replay_self_test(program))
    with cgbundle.load(bundle, variant="x86-64-v2") as other, cgbundle.load(bundle, variant=level) as one:
        x = torch.randn(4, 8)
        for actual, expected in zip(other(x), one(x), strict=True):
            torch.testing.assert_close(actual, expected)
    with raises("option-refused", match="the bundle has the variants sm_90, x86-64-v2"):
        cgbundle.load(bundle, variant="sm_120")
    with pytest.raises(ValueError, match="variant"):
        cgbundle.load(bundle, variant=3)  # type: ignore[arg-type]
    with pytest.raises(CgbundleError):  # this machine has no such GPU
        cgbundle.load(bundle, variant="sm_90")


@on_the_cpu
def test_verify_says_which_variant_it_replayed(bundle: Path) -> None:
    result = CliRunner().invoke(main.app, ["verify", str(bundle), "--run"], prog_name="cgcompile", env={"COLUMNS": "120"})
    with cgbundle.load(bundle) as program:
        assert result.exit_code == 0 and f"replayed the variant {program.manifest.target.level}" in result.output, result.output


@on_the_cpu
def test_a_damaged_variant_is_told_by_its_name(bundle: Path, tmp_path: Path) -> None:
    """`load` checks the variant that it uses, `verify` checks all."""
    import shutil

    other = Path(shutil.copytree(bundle, tmp_path / "other.cgb"))
    (other / "graphs/sm_90/model-2.bin").write_bytes(b"")
    with cgbundle.load(other) as program:
        assert program.manifest.target.level in TARGETS[1:]
    result = CliRunner().invoke(main.app, ["verify", str(other)], prog_name="cgcompile", env={"COLUMNS": "120"})
    assert result.exit_code == 1 and "graphs/sm_90/model-2.bin" in result.output


def test_inspect_shows_one_and_names_all(bundle: Path) -> None:
    def call(*arguments: str) -> str:
        result = CliRunner().invoke(main.app, [*arguments], prog_name="cgcompile", env={"COLUMNS": "120"})
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "sm_90, x86-64-v2, x86-64-v3; shown is x86-64-v3" in call("inspect", str(bundle), "--variant", "x86-64-v3")
    assert "shown is sm_90" in call("inspect", str(bundle)) and "triton" in call("inspect", str(bundle), "--kernels")


def test_diff_compares_variants_of_one_name(bundle: Path, tmp_path: Path) -> None:
    assert compare(open_bundle(str(bundle)), open_bundle(str(bundle))) == ()


def test_a_model_that_is_another_one_for_every_target_is_refused(tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(
        "import os, torch\n"
        "def model():\n"
        "    made = torch.nn.Linear(2, 2)\n"
        "    made.weight.data.fill_(int.from_bytes(os.urandom(3), 'big') / 2**24)\n"
        "    return made\n"
        "def inputs():\n"
        "    return (torch.ones(1, 2),)\n"
    )
    with raises("variants-differ", match="weight 'weight' has other values for x86-64-v3 than for x86-64-v2"):
        cgcompile.build(str(tmp_path / "drawn.py"), out=tmp_path / "d.cgb", target="x86-64-v2,x86-64-v3")


@pytest.mark.parametrize(
    ("target", "message"),
    [("sm_80,sm_80", "sm_80 is named twice"), ("auto,cpu", "auto does not name one target"), ("sm_80,", "an empty name does not")],
)
def test_targets_that_are_no_variants(target: str, message: str, tmp_path: Path) -> None:
    with raises("target-unavailable", match=message):
        cgcompile.build(nn.Linear(2, 2), lambda: (torch.ones(1, 2),), out=tmp_path / "x.cgb", target=target)
