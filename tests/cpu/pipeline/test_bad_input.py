"""Bad input gives the right exit code, one error line and at most one hint, and leaves no files."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cgbundle.format import safetensors_files
from cgcompile.bundle import manifest_text

pytest.importorskip("torch")

import cgbundle
from cgbundle import errors
from cgbundle.format import archive, file_names
from cgcompile_cli.main import app
from tests.cpu.conftest import MODEL
from tests.helpers.bundles.edits import edited

BY_NAME = MODEL.replace("batch: int", "batch: int, seq: int").replace("(batch, 6)", "(batch * seq, 6)")


def call(*arguments: object) -> Result:
    """Runs a command as the shell would."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="cgcompile", env={"COLUMNS": "80"})


def refused(result: Result, code: int) -> str:
    """Checks the exit code and the streams. Returns the error line and its hint."""
    assert result.exit_code == code, (result.output, result.exception)
    assert result.stdout == ""
    first, *rest = result.stderr.splitlines()
    assert first.startswith("error: ") and len(first) < 300
    assert len(rest) <= 1 and all(line.startswith("hint: ") for line in rest), result.stderr
    return result.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Changes to an empty folder and returns it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def build(*arguments: object) -> Result:
    """Runs a quiet CPU build: stderr has only the error."""
    return call("build", *arguments, "--target", "cpu", "--quiet")


# --- the model file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (MODEL.replace("def model", "def modell"), 1, "model.py: it has no model()"),
        (MODEL.replace("def inputs", "def input"), 1, "model.py: it has no inputs()"),
        (MODEL.replace("import torch\n", "import torch; def\n", 1), 1, "model.py:2: invalid syntax"),
        ("import nonsense_that_is_not_there\n" + MODEL, 1, "model.py:1: importing it failed: ModuleNotFoundError"),
        (MODEL.replace("nn.Linear(6, 16)", "nn.Linear(6, 'x')"), 1, "model.py:9: model() failed: TypeError"),
        (MODEL.replace("return (torch.randn", "return 7, (torch.randn"), 1, "does not fit forward("),
        (MODEL.replace("(batch, 6)", "(batch, 7)"), 1, "mat1 and mat2"),
        (MODEL.replace("(batch, 6)", "(5, 6)"), 1, "'batch'"),
        (MODEL.replace("return nn.Sequential", "return list"), 1, "model.py"),
        (MODEL + "\nimport sys\nsys.exit('bye')\n", 1, "importing it ended the program: SystemExit: bye"),
        (MODEL.replace("(batch, 6)", "(batch, 6, device='meta')"), 1, "inputs() gives input on the meta device, without values"),
        (MODEL.replace("(batch, 6)", "(batch, 6, device='cuda')"), 1, "make tensors on the CPU"),
        (MODEL.replace("nn.Linear(6, 16)", "nn.Linear({}[6], 16)"), 1, "import the file in Python and call it there"),
        ("import nonsense.inner\n" + MODEL, 1, "hint: install 'nonsense' in this environment"),
    ],
)  # fmt: skip
def test_model_file(folder: Path, text: str, code: int, said: str) -> None:
    (folder / "model.py").write_text(text)
    message = refused(build("model.py", "--sizes", "1,4"), code)
    assert said in message and message.startswith("error: model.py")
    assert set(os.listdir(folder)) <= {"model.py", "__pycache__"}


BRANCH = """
import torch
from torch import nn


class Branch(nn.Module):
    def forward(self, x):
        while x.sum() < 10:
            x = x + 1
        return x


def model() -> nn.Module:
    return Branch()


def inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 6),)
"""


def test_a_branch_on_data(folder: Path) -> None:
    (folder / "model.py").write_text(BRANCH)
    message = refused(build("model.py", "--sizes", "1,4"), 1)
    assert (
        message.startswith("error: model.py:8: data-dependent-branch: ")
        and "while x.sum() < 10:" in message
        and "torch.while_loop" in message
    )
    result = call("check", "model.py", "--sizes", "1,4")
    assert (result.exit_code, result.stderr) == (1, "") and "refuse data-dependent-branch  model.py:8" in result.stdout


def test_a_part_on_the_host_is_refused_by_strict(folder: Path) -> None:
    (folder / "model.py").write_text(BRANCH.replace("while x.sum() < 10:", "if True:").replace("x + 1", "x * x.max().item()"))
    message = refused(call("build", "model.py", "--sizes", "1,4", "--target", "sm_90", "--quiet", "--strict"), 1)
    assert message.startswith("error: model.py:9: host-scalar: ")
    assert os.listdir(folder) == ["model.py"] or set(os.listdir(folder)) == {"model.py", "__pycache__"}


def test_an_operator_to_keep_on_the_host_that_is_not_there(folder: Path, model_file: Path) -> None:
    options = (model_file, "--sizes", "1,4", "--fallback-op", "aten.linar")
    for result in (build(*options), call("check", *options)):
        said = refused(result, 2)
        assert "'aten.linar'" in said and "aten.linear" in said


NOWHERE = ("missing.py", "folder", "no_such_module:attribute", "json:no_such_attribute", "missing.pt2", "nonsense")


@pytest.mark.parametrize("name", NOWHERE)
def test_no_model(folder: Path, name: str) -> None:
    (folder / "folder").mkdir()
    assert name.partition(":")[0] in refused(build(name, "--sizes", "1"), 2)


def test_saved_program_that_is_none(folder: Path) -> None:
    (folder / "false.pt2").write_text("not a program")
    assert "false.pt2" in refused(build("false.pt2", "--sizes", "1"), 1)


# --- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (["0"], "batch=0 is not a positive whole number"),
        (["-1"], "batch=-1 is not a positive whole number"),
        (["8,8"], "batch=8 is given twice"),
        (["a"], "'a' is not a whole number"),
        (["1.5"], "'1.5' is not a whole number"),
        (["1,,2"], "'' is not a whole number"),
        ([""], "no size for dimension 'batch'"),
        (["batch="], "no size for dimension 'batch'"),
        ([], "no size for dimension 'batch'"),
        (["seq=1"], "there is no declared dimension 'seq' (declared: batch)"),
        (["1", "4"], "dimension 'batch' is given twice"),
        ([",".join(map(str, range(1, 66)))], "makes 65 int_keys"),
    ],
)
def test_sizes(folder: Path, model_file: Path, sizes: list[str], said: str) -> None:
    options = [word for size in sizes for word in ("--sizes", size)]
    assert said in refused(build(model_file, *options), 2)
    assert os.listdir(folder) == []


def test_sizes_of_several_dimensions(folder: Path) -> None:
    (folder / "model.py").write_text(BY_NAME)
    assert "name each" in refused(build("model.py", "--sizes", "1,2"), 2)
    assert "no size for dimension 'seq'" in refused(build("model.py", "--sizes", "batch=1,2"), 2)


def test_ten_thousand_keys(folder: Path) -> None:
    (folder / "model.py").write_text(BY_NAME)
    hundred = ",".join(map(str, range(1, 101)))
    said = refused(build("model.py", "--sizes", f"batch={hundred}", "--sizes", f"seq={hundred}"), 2)
    assert "10000 int_keys" in said and "--max-keys 10000" in said.splitlines()[1]


def test_sizes_without_a_dimension(folder: Path) -> None:
    (folder / "model.py").write_text(MODEL.replace("batch: int", "").replace("(batch, 6)", "(2, 6)"))
    assert "declares no dimension" in refused(build("model.py", "--sizes", "1"), 2)


# --- the destination and the target -------------------------------------------------------------------------------


def test_existing_output(folder: Path, model_file: Path, bundle: Path) -> None:
    shutil.copytree(bundle, folder / "tiny.cgb")
    before = (folder / "tiny.cgb" / file_names.MANIFEST).read_bytes()
    said = refused(build(model_file, "--sizes", "1"), 2)
    assert f"hint: to replace it: cgcompile build {model_file} --sizes 1 --target cpu --quiet --force" in said
    assert (folder / "tiny.cgb" / file_names.MANIFEST).read_bytes() == before


def test_existing_output_that_is_no_bundle(folder: Path, model_file: Path) -> None:
    (folder / "notes").write_text("mine")
    assert "choose another name" in refused(build(model_file, "--sizes", "1", "-o", "notes", "--force"), 2)
    assert (folder / "notes").read_text() == "mine"


@pytest.mark.parametrize("out", ["missing/x.cgb", "file/x.cgb", "/proc/x.cgb"])
def test_unwritable_directory(folder: Path, model_file: Path, out: str) -> None:
    (folder / "file").write_text("")
    assert "x.cgb" in refused(build(model_file, "--sizes", "1", "-o", out), 2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_directory_without_permission(folder: Path, model_file: Path) -> None:
    (folder / "locked").mkdir(mode=0o500)
    assert "locked" in refused(build(model_file, "--sizes", "1", "-o", "locked/x.cgb"), 2)


@pytest.mark.parametrize("target", ["sm_1", "tpu", ""])
def test_unknown_target(folder: Path, model_file: Path, target: str) -> None:
    refused(call("build", model_file, "--sizes", "1", "--target", target, "--quiet"), 2)


def test_progress_goes_to_stderr(folder: Path, model_file: Path) -> None:
    (folder / "model.py").write_text(MODEL.replace("(batch, 6)", "(5, 6)"))
    result = call("build", "model.py", "--sizes", "1,4", "--target", "cpu")
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.splitlines()[0].split()[0] == "source" and "error: " in result.stderr and "\x1b" not in result.stderr


# --- the bundle ---------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    """Returns a copy of the bundle to damage."""
    return Path(shutil.copytree(bundle, tmp_path / "copy.cgb"))


@pytest.mark.parametrize("command", ["inspect", "verify", "run"])
def test_no_bundle(command: str, folder: Path, model_file: Path) -> None:
    assert "no such bundle" in refused(call(command, "missing.cgb"), 2)
    assert "a file, not a bundle directory" in refused(call(command, model_file), 2)


@pytest.mark.parametrize("command", ["inspect", "verify", "run"])
def test_newer_format(command: str, copy: Path) -> None:
    manifest = archive.read_manifest(str(copy))
    (copy / file_names.MANIFEST).write_bytes(manifest_text.encode(edited(manifest, version=manifest.version + 1)))
    assert "upgrade cgcompile" in refused(call(command, copy), 2)


def test_truncated_weights(copy: Path) -> None:
    path = copy / file_names.WEIGHTS
    os.truncate(path, path.stat().st_size - 1)
    assert "weights.safetensors: " in refused(call("run", copy), 1)
    result = call("verify", copy)
    assert result.exit_code == 1 and result.stdout.startswith("weights.safetensors: ") and len(result.stdout.splitlines()) == 1


def names(bundle: Path) -> list[str]:
    """Returns the bundle's files, including the manifest."""
    return manifest_text.list_files(str(bundle))


def test_a_flipped_byte_in_any_file(copy: Path) -> None:
    header = 8 + int.from_bytes((copy / file_names.WEIGHTS).read_bytes()[:8], "little")
    for name in names(copy):
        whole = (copy / name).read_bytes()
        for at in (0, len(whole) // 2, len(whole) - 1):
            data = bytearray(whole)
            data[at] ^= 0x10
            (copy / name).write_bytes(bytes(data))
            result = call("verify", copy)
            assert result.exit_code == 1 and len(result.stdout.splitlines()) == 1, (name, at, result.output)
            if name == file_names.WEIGHTS and at >= header:
                cgbundle.load(copy).close()  # the loader does not hash weights, which may be gigabytes
            else:
                with pytest.raises(errors.CgbundleError):
                    cgbundle.load(copy)
            with pytest.raises(errors.CgbundleError):
                cgbundle.load(copy, check="full")
        (copy / name).write_bytes(whole)
    assert call("verify", copy).exit_code == 0


def test_verify_finds_all_damage_at_once(copy: Path) -> None:
    damaged = [name for name in names(copy) if name != file_names.MANIFEST]
    for name in damaged:
        data = bytearray((copy / name).read_bytes())
        data[-1] ^= 1
        (copy / name).write_bytes(bytes(data))
    report = json.loads(call("verify", copy, "--json").stdout)
    assert [damage["message"].partition(":")[0] for damage in report["damage"]] == damaged


# --- results of a valid bundle ------------------------------------------------------------------------------------


def test_verify_run(bundle: Path) -> None:
    result = call("verify", bundle, "--run")
    assert result.exit_code == 0 and result.stderr == "", result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[2:]] == ["batch=1", "batch=4"]
    report = json.loads(call("verify", bundle, "--run", "--json").stdout)
    assert report["ok"] and [row["key"] for row in report["self_test"]["results"]] == [[1], [4]]


def test_verify_run_fails_where_the_promise_is_broken(copy: Path) -> None:
    manifest = archive.read_manifest(str(copy))
    (weight, *_) = [weight for weight in manifest.weights if weight.name.endswith("bias")]
    data = bytearray((copy / file_names.WEIGHTS).read_bytes())
    with open(copy / file_names.WEIGHTS, "rb") as file:
        entry = cgbundle.format.safetensors.read_header(file, "weights")[weight.tensor]
    data[entry.begin + 3] ^= 0x80  # the sign bit
    (copy / file_names.WEIGHTS).write_bytes(bytes(data))
    resealed = replace(manifest, files=manifest_text.describe_files(str(copy)))
    (copy / file_names.MANIFEST).write_bytes(manifest_text.encode(resealed))
    result = call("verify", copy, "--run")
    assert result.exit_code == 1 and "FAILED" in result.stdout and "the self-test failed for batch=1, batch=4" in result.stderr


def test_run(bundle: Path, folder: Path) -> None:
    result = call("run", bundle)
    assert result.exit_code == 0 and "[1, 3]" in result.stdout and result.stderr.startswith("loaded in ")
    report = json.loads(call("run", bundle, "--size", "batch=4", "--outputs", "out.safetensors", "--json").stdout)
    (output,) = report["outputs"]
    assert output["shape"] == [4, 3] and len(output["values"]) == 3
    held = safetensors_files.Mapped("out.safetensors", "out")
    assert held.entries[output["name"]].shape == (4, 3)
    held.close()


def test_run_pads_inputs_of_another_size(bundle: Path, folder: Path) -> None:
    from struct import pack

    (spec,) = archive.read_manifest(str(bundle)).entries[0].inputs
    with open("in.safetensors", "wb") as file:
        safetensors_files.write(file, {spec.name: ("float32", (3, 6), lambda: pack("18f", *range(18)))})
    report = json.loads(call("run", bundle, "--inputs", "in.safetensors", "--json").stdout)
    assert report["outputs"][0]["shape"] == [3, 3]
    with open("in.safetensors", "wb") as file:
        safetensors_files.write(file, {spec.name: ("float32", (3, 7), lambda: pack("21f", *range(21)))})
    assert "axis 1: expected 6, got 7" in refused(call("run", bundle, "--inputs", "in.safetensors"), 2)
