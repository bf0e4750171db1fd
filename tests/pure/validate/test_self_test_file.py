"""The self-test's rows, and its file compared with the manifest's inputs, outputs, mutated inputs and state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cgbundle.format import file_names, manifest_json, safetensors, safetensors_files
from cgbundle.format.file_names import self_test_entry
from cgbundle.format.schema import Manifest, Weight
from cgbundle.validate.bundle import check_self_test
from cgbundle.validate.manifest import check_self_test_rows
from cgcompile.bundle import manifest_text
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.tiny_bundle import manifest
from tests.helpers.raising import raises

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def stateful() -> Manifest:
    """Returns the tiny manifest with a mutated input and two buffers."""
    tiny = manifest()
    rows = [
        Weight(name=name, tensor=name, dtype=dtype, shape=shape, strides=(1,), memory="state", offset=offset)
        for name, dtype, shape, offset in (("cache", "float32", (9,), 0), ("place", "int64", (1,), 256))
    ]
    return edited(tiny, mutated_inputs=(0,), weights=(*tiny.weights, *rows))


def sound() -> Shapes:
    """Returns the dtype and shape of every tensor in the self-test of `stateful`."""
    shapes: Shapes = {}
    for size in (1, 4):
        shapes[self_test_entry((size,), "input", 0)] = ("float32", (size, 3))
        shapes[self_test_entry((size,), "output", 0)] = ("float32", (size, 2))
        shapes[self_test_entry((size,), "mutated", 0)] = ("float32", (size, 3))
        for place, dtype in ((3, "float32"), (4, "int64")):
            shapes[self_test_entry((size,), "state", place)] = (dtype, (size,))
            shapes[self_test_entry((size,), "state-at", place)] = ("int64", (size, 2))
    return shapes


def check(folder: Path, shapes: Shapes) -> None:
    with open(folder / file_names.SELF_TEST, "wb") as file:
        safetensors_files.write(
            file,
            {
                name: (dtype, shape, lambda dtype=dtype, shape=shape: bytes(safetensors.nbytes(dtype, shape)))
                for name, (dtype, shape) in shapes.items()
            },
        )
    check_self_test(ArchiveOf(folder, stateful()))


def test_the_self_test_of_a_model_with_state_is_sound(tmp_path: Path) -> None:
    check(tmp_path, sound())
    changed = self_test_entry((4,), "state", 3), self_test_entry((4,), "state-at", 3)
    check(tmp_path, {**sound(), changed[0]: ("float32", (0,)), changed[1]: ("int64", (0, 2))})
    check(tmp_path, {**sound(), changed[0]: ("float32", (9,)), changed[1]: ("int64", (3, 2))})


@pytest.mark.parametrize("name", sorted(sound()))
def test_every_tensor_is_needed_with_its_dtype_and_rank(tmp_path: Path, name: str) -> None:
    shapes = sound()
    dtype, shape = shapes.pop(name)
    with raises("weights-invalid", match=f"tensor '{name}' is missing"):
        check(tmp_path, shapes)
    for wrong in (("int32", shape), (dtype, (*shape, 1)), (dtype, shape[1:])):
        with raises("weights-invalid", match=f"tensor '{name}' is {wrong[0]}"):
            check(tmp_path, {**shapes, name: wrong})
    if "state" not in name or "state-at" in name:
        with raises("weights-invalid", match=f"tensor '{name}' is"):
            check(tmp_path, {**shapes, name: (dtype, (*shape[:-1], shape[-1] + 1))})


def test_a_tensor_of_no_key_is_refused(tmp_path: Path) -> None:
    for name in (
        "another",
        self_test_entry((2,), "input", 0),
        self_test_entry((1,), "input", 1),
        self_test_entry((1,), "state", 0),
    ):
        with raises("weights-invalid", match=f"tensor '{name}' belongs to no int_key"):
            check(tmp_path, {**sound(), name: ("float32", (1,))})


def checked(manifest: Manifest) -> None:
    """Checks the self-test of a manifest as a reader of the file does."""
    read = manifest_json.decode(manifest_text.encode(manifest))
    check_self_test_rows(read, read.entries[0])


@pytest.mark.parametrize(("calls", "fits"), [(0, False), (1, True), (2, True), (16, True), (17, False)])
def test_a_self_test_has_1_to_16_calls(calls: int, fits: bool) -> None:
    tiny = manifest()
    tiny = edited(tiny, self_test=replace(tiny.entries[0].self_test, calls=calls))
    if fits:
        return check_self_test_rows(tiny, tiny.entries[0])
    with raises("manifest-invalid", match=f"self_test.calls: {calls} calls"):
        check_self_test_rows(tiny, tiny.entries[0])


@pytest.mark.parametrize("method", ["replay", "interpret", "none"])
@pytest.mark.parametrize("compare", ["bits", "tolerance"])
def test_what_a_self_test_may_be(method: str, compare: str) -> None:
    tiny = manifest()
    proofs = tuple([replace(proof, method=method, error=0.0, tolerance=0.0) for proof in tiny.entries[0].self_test.proofs])
    checked(edited(tiny, self_test=replace(tiny.entries[0].self_test, proofs=proofs, compare=compare)))


@pytest.mark.parametrize("place", [0, 1])
def test_every_key_has_its_proof(place: int) -> None:
    tiny = manifest()
    for field, value in (("method", "looks"), ("error", -1e-9), ("tolerance", -1e-9)):
        proofs = list(tiny.entries[0].self_test.proofs)
        proofs[place] = replace(proofs[place], **{field: value})
        with raises("manifest-invalid", match=rf"self_test\.proofs\[{place}\]\.{field}"):
            checked(edited(tiny, self_test=replace(tiny.entries[0].self_test, proofs=tuple(proofs))))
    for proofs in (
        tiny.entries[0].self_test.proofs[:1],
        tiny.entries[0].self_test.proofs[::-1],
        (*tiny.entries[0].self_test.proofs, tiny.entries[0].self_test.proofs[0]),
    ):
        with raises("manifest-invalid", match=r"self_test\.proofs: do not match the programs"):
            checked(edited(tiny, self_test=replace(tiny.entries[0].self_test, proofs=tuple(proofs))))
