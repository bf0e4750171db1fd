"""CPU bundles whose manifest does not match the compiled code are refused, or give right results.

The tests change the manifest of a golden bundle, and write hashes and the other files to match, so that no earlier check fails.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cgbundle
from cgbundle import self_test
from cgbundle.format import archive, file_names, safetensors, safetensors_files
from cgbundle.format.schema import Manifest
from cgbundle.tensors.tensor import empty
from cgbundle.validate import host_code
from cgcompile.bundle import manifest_text
from tests.helpers.bundles import tiny_bundle
from tests.helpers.bundles.edits import edited
from tests.helpers.places import GOLDEN, skip_older_torch
from tests.helpers.raising import raises

pytest.importorskip("torch")  # its libraries run the code

Change = Callable[[Manifest], Manifest]


def altered(golden: str, folder: Path, change: Change) -> Path:
    """Returns a copy of a golden bundle with a changed manifest."""
    skip_older_torch()
    bundle = Path(shutil.copytree(GOLDEN / f"{golden}.cgb", folder / "altered.cgb"))
    write_manifest(bundle, change(archive.read_manifest(str(bundle))))
    return bundle


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest.  Also updates the rows after the ELF data of each shared object, which describe inputs and outputs of
    its code.  So only the code itself differs from the manifest."""
    for region in manifest.regions:
        data = (folder / region.file).read_bytes()
        rows = host_code.read(data) or b""
        (folder / region.file).write_bytes(data[: len(data) - len(rows) - 8 - len(host_code.MAGIC)])
    tiny_bundle.finish(folder, manifest)


def put_values(index: int, **changes: Callable[[Any], Any]) -> Change:
    """Returns a function that changes fields of value `index` in every program of a manifest."""

    def change(manifest: Manifest) -> Manifest:
        programs = []
        for program in manifest.entries[0].programs:
            values = list(program.values)
            values[index] = replace(values[index], **{name: to(getattr(values[index], name)) for name, to in changes.items()})
            programs.append(replace(program, values=tuple(values)))
        return edited(manifest, programs=tuple(programs))

    return change


def bind(*constants: tuple[str, int]) -> Change:
    return lambda manifest: replace(manifest, regions=(replace(manifest.regions[0], constants=constants),))


WEIGHT_0, BIAS_0, WEIGHT_2, BIAS_2 = ("model_0_weight", 1), ("model_0_bias", 0), ("model_2_weight", 3), ("model_2_bias", 2)
"""The constants of `v1/cpu_mlp`: each name in the code, and the index of its weight."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (bind(WEIGHT_0, BIAS_0, BIAS_2), "'model_2_weight' of the code is not bound"),
        (bind(WEIGHT_0, BIAS_0, WEIGHT_2, BIAS_2, ("model_4_bias", 2)), "'model_4_bias' is bound, but the code has no such"),
        (bind(WEIGHT_0, BIAS_0, BIAS_2, ("model_2_thgiew", 3)), "'model_2_thgiew' is bound, but the code has no such"),
        (
            bind(WEIGHT_0, BIAS_0, BIAS_2, ("model_2_weight", 1)),
            "'model_2_weight' is weight '2.weight' in the code, but '0.weight'",
        ),
        (bind(BIAS_0, WEIGHT_0, BIAS_2, ("model_2_weight", 2)), "'model_2_weight' is weight '2.weight' in the code, but '2.bias'"),
    ],
)
def test_bound_constants_that_differ_from_those_of_the_code(tmp_path: Path, change: Change, message: str) -> None:
    with raises("library-refused", match=rf"^host/model\.so: constant {message}"):
        cgbundle.load(altered("v1/cpu_mlp", tmp_path, change))


@pytest.mark.parametrize(("shape", "dtype"), [((32, 16), "int32"), ((33, 16), "float32")])
def test_a_weight_of_another_dtype_or_larger_than_the_code_reads(tmp_path: Path, shape: Any, dtype: str) -> None:
    """The file and the manifest agree with each other, but not with the code."""
    size = 4 * shape[0] * shape[1]

    def change(manifest: Manifest) -> Manifest:
        weight = replace(manifest.weights[1], shape=shape, strides=(shape[1], 1), dtype=dtype)
        weights = (manifest.weights[0], weight, *manifest.weights[2:])
        return replace(manifest, weights=weights, memories=(("weights", 2704 - 2048 + size),))

    folder = altered("v1/cpu_mlp", tmp_path, change)
    stored = {
        row.tensor: (row.dtype, row.shape, lambda row=row: bytes(safetensors.nbytes(row.dtype, row.shape)))
        for row in change(archive.read_manifest(str(GOLDEN / "v1/cpu_mlp.cgb"))).weights
    }
    with open(folder / file_names.WEIGHTS, "wb") as file:
        safetensors_files.write(file, stored)
    write_manifest(folder, archive.read_manifest(str(folder)))
    with raises("library-refused", match=r"constant 'model_0_weight' has another dtype or size in the code \(2048 bytes\)"):
        cgbundle.load(folder)


@pytest.mark.parametrize("strides", [(1, 10**9), (24, 1), (1, 4), (4, 2), (0, 0), (10**15, 1)])
def test_outputs_with_other_strides_than_in_the_manifest(tmp_path: Path, strides: tuple[int, int]) -> None:
    """Without the check of strides, the call would crash or access wrong memory."""
    with cgbundle.load(altered("v1/cpu_mlp", tmp_path, put_values(1, strides=lambda _: strides))) as program:
        for _ in range(2):
            with raises("library-refused", match=r"output 'output': expected float32 .*, got \[4, 4\] with strides \[4, 1\]$"):
                program(empty("float32", (4, 16)))


def test_strides_of_an_axis_of_one_element_are_not_compared(tmp_path: Path) -> None:
    def change(manifest: Manifest) -> Manifest:
        program = manifest.entries[0].programs[0]
        values = (program.values[0], replace(program.values[1], strides=(77, 1)))
        return edited(manifest, programs=(replace(program, values=values), manifest.entries[0].programs[1]))

    with cgbundle.load(altered("v1/cpu_mlp", tmp_path, change)) as program:
        assert [program(empty("float32", (1, 16))).shape for _ in range(2)] == [(1, 4), (1, 4)]


@pytest.mark.parametrize("golden", ["v1/cpu_mlp", "v1/cpu_cache", "v1/cpu_state"])
def test_goldens_pass_their_self_tests(golden: str) -> None:
    skip_older_torch()
    path = str(GOLDEN / f"{golden}.cgb")
    with cgbundle.load(path) as program:
        assert all(result.passed("tolerance") for result in self_test.replay_self_test(program))


def test_a_shared_object_of_another_manifest_is_refused(bundle: Path, tmp_path: Path) -> None:
    """The changed manifest has another shape of the input, and so has its self-test.  Only the rows that follow the ELF data of the
    shared object still have the old shape."""
    folder = Path(shutil.copytree(bundle, tmp_path / "other.cgb"))
    manifest = archive.read_manifest(str(folder))
    other = put_values(0, shape=lambda shape: (shape[0], 5), strides=lambda _: (5, 1))(manifest)
    other = edited(other, inputs=(replace(manifest.entries[0].inputs[0], shape=("batch", 5)),))
    self_test_file = safetensors_files.Mapped(str(folder / file_names.SELF_TEST), file_names.SELF_TEST)
    stored = {}
    for name, entry in self_test_file.entries.items():
        shape = (entry.shape[0], 5) if "/input/" in name else entry.shape
        stored[name] = entry.dtype, shape, lambda shape=shape: bytes(4 * shape[0] * shape[1])
    with open(tmp_path / "self-test", "wb") as file:
        safetensors_files.write(file, stored)
    self_test_file.close()
    (tmp_path / "self-test").rename(folder / file_names.SELF_TEST)
    tiny_bundle.seal(folder, replace(other, files=manifest_text.describe_files(str(folder))))
    with raises("manifest-invalid", match=r"host/model\.so was compiled for a manifest with other calls"):
        cgbundle.load(folder)
