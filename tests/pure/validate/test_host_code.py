"""The rows of a shared object, and the error for a manifest with other rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cgbundle.format import archive
from cgbundle.format.archive import Archive
from cgbundle.format.schema import Manifest
from cgbundle.validate import bundle as validate
from cgbundle.validate import contents, host_code
from tests.helpers.bundles import tiny_bundle
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.edits import edited
from tests.helpers.raising import raises

Change = Callable[[Manifest], Manifest]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return tiny_bundle.write_bundle(tmp_path / "tiny.cgb")


def put_value(index: int, **changes: Any) -> Change:
    def change(manifest: Manifest) -> Manifest:
        last = manifest.entries[0].programs[-1]
        values = list(last.values)
        values[index] = replace(values[index], **changes)
        return edited(manifest, programs=(*manifest.entries[0].programs[:-1], replace(last, values=tuple(values))))

    return change


def test_what_is_attached_is_read_again(bundle: Path) -> None:
    manifest = archive.read_manifest(str(bundle))
    data = (bundle / tiny_bundle.HOST_FILE).read_bytes()
    assert host_code.read(data) == host_code.described(manifest, 0) and data.startswith(b"\x7fELF")
    validate.check_bundle(Archive(str(bundle)), "full")
    assert validate.examine(Archive(str(bundle))) == []


TEXT = b'{"calls":[]}'
WHOLE = b"object" + TEXT + len(TEXT).to_bytes(8, "little") + host_code.MAGIC


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (WHOLE, TEXT),
        (WHOLE[6:], TEXT),
        (WHOLE[7:], None),
        (WHOLE[:-1], None),
        (WHOLE + b"\0", None),
        (b"", None),
        (host_code.MAGIC, None),
        (bytes(8) + host_code.MAGIC, b""),
        (b"\xff" * 8 + host_code.MAGIC, None),
    ],
)
def test_read(data: bytes, expected: bytes | None) -> None:
    assert host_code.read(data) == expected


CHANGES: list[tuple[str, Change]] = [
    ("calls", put_value(0, shape=(4, 2))),
    ("calls", put_value(0, strides=(1, 4))),
    ("calls", put_value(1, dtype="int32")),
    ("calls", put_value(1, offset=4)),
    ("calls", lambda base: edited(base, programs=base.entries[0].programs[::-1])),
    ("constants", lambda base: replace(base, weights=(replace(base.weights[0], shape=(1, 6)), *base.weights[1:]))),
    ("constants", lambda base: replace(base, weights=(replace(base.weights[0], tensor="first.bias"), *base.weights[1:]))),
    ("constants", lambda base: replace(base, regions=(replace(base.regions[0], constants=(("c0", 1), ("c1", 0))),))),
    ("constants", lambda base: replace(base, regions=(replace(base.regions[0], constants=(("c0", 0),)),))),
    ("dimensions", lambda base: edited(base, dimensions=(replace(base.entries[0].dimensions[0], chunk=False),))),
    ("inputs", lambda base: edited(base, inputs=(replace(base.entries[0].inputs[0], order=(1, 0)),))),
    ("outputs", lambda base: edited(base, outputs=(replace(base.entries[0].outputs[0], dtype="int32"),))),
    ("mutated_inputs", lambda base: edited(base, mutated_inputs=(0,))),
    ("random", lambda base: replace(base, random=0)),
    ("result", lambda base: edited(base, result={"tuple": [{"tensor": 0}]})),
    ("call", lambda base: edited(base, call={"call": [["y", {"tensor": 0}]]})),
]


@pytest.mark.parametrize(("field", "change"), CHANGES, ids=[f"{number}-{row[0]}" for number, row in enumerate(CHANGES)])
def test_other_rows_are_refused_by_name(bundle: Path, field: str, change: Change) -> None:
    manifest = archive.read_manifest(str(bundle))
    with raises("manifest-invalid", match=rf"^regions\[0\]\.file: host/model\.so was compiled for a manifest with other {field}$"):
        contents.check_host_code(ArchiveOf(bundle, change(manifest)))


def test_rows_of_a_gpus_host_region_are_those_of_its_steps(bundle: Path) -> None:
    manifest = archive.read_manifest(str(bundle))
    cuda = replace(manifest, target=replace(manifest.target, kind="cuda"))
    text = host_code.described(cuda, 0)
    assert b'"dimensions"' not in text and text.count(b'"float32"') == 2 * 2 + 2
    assert host_code.described(edited(cuda, mutated_inputs=(0,)), 0) == text
    assert host_code.described(put_value(0, shape=(4, 2))(cuda), 0) != text


def test_a_shared_object_without_rows_is_refused(bundle: Path) -> None:
    manifest = archive.read_manifest(str(bundle))
    (bundle / tiny_bundle.HOST_FILE).write_bytes(b"\x7fELF")
    with raises("manifest-invalid", match=r"host/model\.so does not say what it was built for"):
        contents.check_host_code(ArchiveOf(bundle, manifest))


@pytest.mark.parametrize("text", [b"", b"x", b"[]", b"{", b"[" * 100_000, b'"\xff"'])
def test_rows_that_are_none(bundle: Path, text: bytes) -> None:
    manifest = archive.read_manifest(str(bundle))
    (bundle / tiny_bundle.HOST_FILE).write_bytes(text + len(text).to_bytes(8, "little") + host_code.MAGIC)
    with raises("manifest-invalid", match="was compiled for a manifest with other rows"):
        contents.check_host_code(ArchiveOf(bundle, manifest))


def test_load_and_verify_compare(bundle: Path) -> None:
    manifest = archive.read_manifest(str(bundle))
    other = edited(manifest, dimensions=(replace(manifest.entries[0].dimensions[0], pad="no", chunk=False),))
    for level in contents.LEVELS:
        with raises("manifest-invalid", match="compiled for a manifest with other dimensions"):
            validate.check_bundle(ArchiveOf(bundle, other), level)
    assert [error.code for error in validate.examine(ArchiveOf(bundle, other))] == ["manifest-invalid"]
