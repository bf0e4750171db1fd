"""Bundles of models that contain everything a bundle must store, compared with eager PyTorch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file

import cgbundle
import cgcompile
from cgbundle.cpu.machine import processor_flags
from cgbundle.format import archive, file_names
from cgbundle.format.safetensors_files import Mapped
from cgbundle.validate import bundle as verify
from cgcompile.bundle import manifest_text
from cgcompile.targets.cpu.compiler import included
from cgcompile.targets.instruction_sets import LEVELS
from cgcompile_cli import summary
from tests.cpu.models import Everything, Image, State, everything_inputs, image_inputs
from tests.helpers.bundles.tiny_bundle import HOST_FILE
from tests.helpers.raising import raises

LEVEL = LEVELS[1]
TARGET = LEVEL.name if set(LEVEL.features) <= processor_flags() else "cpu"
"""A bundle for many processors if this one can run it; other tests build for this processor."""

leveled = pytest.mark.skipif(LEVEL.name != TARGET, reason=f"this processor is below {LEVEL.name}")


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("everything") / "everything.cgb"
    return cgcompile.build(Everything().eval(), everything_inputs, sizes=[1, 4], out=out, target=TARGET).path


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("image") / "image.cgb"
    sizes = {"batch": [2], "side": [8, 12]}
    return cgcompile.build(Image(), image_inputs, sizes=sizes, out=out, target="cpu").path


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(
        got,
        expected,
        rtol=0.02 if expected.dtype in (torch.bfloat16, torch.float16) else 1e-5,
        atol=2e-2 if expected.dtype is torch.bfloat16 else 1e-3,
    )


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 9])
def test_nested_inputs_and_outputs_equal_eager_at_recorded_padded_and_cut_sizes(everything: Path, batch: int) -> None:
    ids, extra, state = everything_inputs(batch)
    with torch.no_grad():
        expected = Everything().eval()(ids, extra, state)
    with cgbundle.load(everything) as program:
        got = program(ids, extra, state)
        by_name = program(state=state, extra=extra, ids=ids, flag=2, nothing=None)
    for result in (got, by_name):
        assert list(result) == list(expected)
        assert result["constant"] == 7 and result["mask"][1] is None
        assert type(result["state"]).__name__ == "State" and result["state"]._fields == State._fields
        assert torch.equal(result["mask"][0], expected["mask"][0]) and torch.equal(result["state"].steps, expected["state"].steps)
        for mine, theirs in (
            (result["logits"], expected["logits"]),
            (result["half"], expected["half"]),
            (result["state"].hidden, expected["state"].hidden),
        ):
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape and mine.is_contiguous()
            close(mine, theirs)


@leveled
def test_code_for_a_level_of_processors_has_no_instruction_above_it(everything: Path) -> None:
    target = archive.read_manifest(str(everything)).target
    assert (target.level, target.kind) == ("x86-64-v3", "cpu")
    assert {"avx2", "fma", "f16c"} <= set(target.features) <= set(LEVEL.features)
    assert summary.target(target).startswith("cpu x86-64-v3, to run: torch 2.")
    objdump = shutil.which("objdump")
    if objdump:
        code = subprocess.run([objdump, "-d", everything / HOST_FILE], capture_output=True, text=True, check=True).stdout
        assert "%ymm" in code and "%zmm" not in code and "%k1" not in code


OUT_OF_RANGE = """
import sys, array, cgbundle
from cgbundle.tensors.tensor import empty, from_bytes
program = cgbundle.load(sys.argv[1])
given = [empty(each.dtype, [3 if size == "batch" else size for size in each.shape]) for each in program.inputs]
for last in (32, 31):
    given[0] = from_bytes(array.array("q", [0, 1, last]).tobytes(), "int64", (3,))
    try:
        print(len(program.replay(given)))  # padded to 4 rows
    except cgbundle.CallError as error:
        print(error.code, error)
"""


def test_an_index_out_of_range_is_one_line_that_names_the_input(everything: Path) -> None:
    assert [spec.range for spec in archive.read_manifest(str(everything)).entries[0].inputs] == [(0, 32), None, None, None]
    done = subprocess.run([sys.executable, "-c", OUT_OF_RANGE, everything], capture_output=True, text=True, check=False)
    if included(wrapper=False):
        assert done.stderr == "", "no stack, and nothing that a library prints on its own"
    else:  # torch 2.11 cannot report the error in another way
        assert done.stderr.startswith("Error: index out of bounds")
    assert done.stdout.splitlines() == ["input-value input 'ids': value 32 at [2] is outside 0..31", "5"]


def test_constant_inputs_are_guarded(everything: Path) -> None:
    with cgbundle.load(everything) as program, pytest.raises(cgbundle.CallError, match="built for the constant 2, got 3"):
        program(*everything_inputs(1), flag=3)


def test_weights_are_stored_under_the_models_names_and_tied_ones_once(everything: Path) -> None:
    stored = load_file(everything / file_names.WEIGHTS)
    state = Everything().state_dict()
    assert "embed.weight" in stored and "head.weight" not in stored
    manifest = archive.read_manifest(str(everything))
    by_name = {weight.name: weight for weight in manifest.weights}
    assert by_name["head.weight"].tensor == "embed.weight"
    for name, value in state.items():
        assert torch.equal(stored[by_name[name].tensor], value), name
    assert "hidden_table" in by_name, "non-persistent buffers travel too"


def test_every_tensor_whose_size_allows_it_is_aligned(everything: Path) -> None:
    mapped = Mapped(str(everything / file_names.WEIGHTS), file_names.WEIGHTS)
    for name, entry in mapped.entries.items():
        if (entry.end - entry.begin) % 256 == 0:
            assert mapped.address(name) % 256 == 0, name
    mapped.close()


@pytest.mark.parametrize(("batch", "side"), [(2, 8), (2, 12), (1, 8), (3, 12)])
def test_channels_last_inputs_weights_and_outputs(image: Path, batch: int, side: int) -> None:
    pixels = image_inputs(batch, side)
    with torch.no_grad():
        expected = Image()(pixels)
    with cgbundle.load(image) as program:
        for argument in (pixels, pixels.contiguous()):
            for mine, theirs in zip(program(argument), expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        from_numpy = program(pixels.numpy())
        assert all(isinstance(value, numpy.ndarray) and value.flags.c_contiguous for value in from_numpy)
        numpy.testing.assert_allclose(from_numpy[0], expected[0].numpy(), rtol=1e-4, atol=1e-5)


def test_a_convolution_refuses_to_pad_its_spatial_size_and_says_why(image: Path) -> None:
    with cgbundle.load(image) as program, pytest.raises(cgbundle.CallError) as caught:
        program(image_inputs(2, 10))
    assert "input 'pixels', axis 2" in str(caught.value) and "side cannot be padded" in str(caught.value)


def test_shapes_that_follow_from_a_dimension_by_a_formula(image: Path) -> None:
    manifest = archive.read_manifest(str(image))
    first, second = manifest.entries[0].outputs
    assert first.shape[0] == "batch" and first.shape[2] == ("+", ("//", ("-", "side", 1), 2), 1)
    assert second.shape == ("batch", "side", 8, "side")


def test_verify_finds_every_flipped_byte_and_load_all_but_those_inside_the_weights(bundle: Path, tmp_path: Path) -> None:
    import shutil

    for file in manifest_text.list_files(str(bundle)):
        copy = tmp_path / file.replace("/", "-")
        shutil.copytree(bundle, copy)
        data = bytearray((copy / file).read_bytes())
        for place in sorted({0, 9, len(data) // 2, len(data) - 1}):
            data[place] ^= 0x10
            (copy / file).write_bytes(data)
            with pytest.raises(cgbundle.CgbundleError):
                verify.check_bundle(archive.Archive(str(copy)), "full")
            with pytest.raises(cgbundle.CgbundleError):
                cgbundle.load(copy, check="full").close()
            if file == file_names.WEIGHTS and place in (len(data) // 2, len(data) - 1):
                cgbundle.load(copy).close()
            else:
                with pytest.raises(cgbundle.CgbundleError):
                    cgbundle.load(copy).close()
            data[place] ^= 0x10
        (copy / file).write_bytes(data)
        verify.check_bundle(archive.Archive(str(copy)), "full")


SERVE = """
import sys
class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "triton", "typer", "rich", "cgcompile", "cgcompile_cli", "numpy", "safetensors"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Ban())
import cgbundle
from cgbundle.tensors.tensor import from_bytes
with cgbundle.load(sys.argv[1]) as program:
    for batch in (1, 3, 9):
        result = program(from_bytes(bytes(batch * 24), "float32", (batch, 6)))
        assert result.shape == (batch, 3) and result.tolist()
print(sorted({"torch", "numpy", "cgcompile"} & set(sys.modules)))
"""


def test_serving_works_with_every_other_package_absent(bundle: Path) -> None:
    runtime = str(Path(cgbundle.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(bundle)], capture_output=True, text=True, env={"PYTHONPATH": runtime}, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_missing_shared_libraries_are_a_clear_error(image: Path, tmp_path: Path) -> None:
    runtime = str(Path(cgbundle.__file__).parent.parent)
    code = (
        "import sys, cgbundle\ntry: cgbundle.load(sys.argv[1])\nexcept cgbundle.CgbundleError as e: print(e.code, e, '|', e.hint)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(image)], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": runtime, "CGBUNDLE_TORCH_LIB": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.startswith("library-missing CGBUNDLE_TORCH_LIB=") and "pip install 'torch>=" in done.stdout


def test_another_processor_is_refused_before_anything_runs(bundle: Path) -> None:
    from dataclasses import replace

    from cgbundle.cpu.backend import check_machine

    target = archive.read_manifest(str(bundle)).target
    check_machine(target)
    with raises("wrong-machine", match="lacks avx1024"):
        check_machine(replace(target, features=(*target.features, "avx1024")))
    with raises("wrong-machine", match="is for mips"):
        check_machine(replace(target, arch="mips"))


def test_two_builds_differ_in_nothing_but_the_time(bundle: Path, rebuilt: Path) -> None:
    first, second = ({**json.loads((path / file_names.MANIFEST).read_bytes())} for path in (bundle, rebuilt))
    for manifest in (first, second):
        del manifest["sha256"], manifest["provenance"]["created"]
    assert first == second, "the files' hashes are among what is compared"


NEWER = torch.__version__ >= "2.12"
"""torch 2.11 rounds what it knows of a float to integers and cannot export one that must be 0.5. Errors of its libraries only go to
stderr."""


class Asserting(torch.nn.Module):
    """A model without dimensions that uses every kind of assertion of PyTorch on its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        count, low, half, known, alone, named = asked.unbind()
        torch._check(count.long().item() == 20)
        torch._check(low.long().item() > 3)
        if NEWER:
            torch._check(half.item() == 0.5)
        if known.long() != 20:
            raise ValueError("expected 20")
        torch._assert_async(alone == 20)
        torch._assert_async(named == 20, "the last is 20")
        return self.linear(x)


def test_a_model_without_dimensions_and_what_it_asserts(tmp_path: Path) -> None:
    model, asked = Asserting().eval(), torch.tensor([20, 20, 0.5, 20, 20, 20])
    out = cgcompile.build(model, lambda: (torch.ones(1, 3), asked), out=tmp_path / "fixed.cgb", target="cpu").path
    with cgbundle.load(out) as program:
        assert program.int_keys == ((),)
        torch.testing.assert_close(program(torch.ones(1, 3), asked), model(torch.ones(1, 3), asked).detach())
        for place, line in enumerate(["count.long", "low.long().item() > 3", "half.item", "known.long", "alone == 20", "last"]):
            if "half" in line and not NEWER:
                continue
            wrong = asked.clone()
            wrong[place] = 3
            with pytest.raises((RuntimeError, ValueError)):
                model(torch.ones(1, 3), wrong)
            text = rf"test_build_cpu.py:\d+: an assertion of the model failed: .*{re.escape(line)}"
            with raises("assertion-failed", match=text):
                program(torch.ones(1, 3), wrong)
