"""Tables that a build computes are in a separate file: checks of the manifest and of the file, and the space that this saves."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cgbundle.cuda.upload import listed
from cgbundle.errors import BundleError
from cgbundle.format import archive, file_names, safetensors_files
from cgbundle.format.archive import Archive
from cgbundle.format.file_names import TABLES, WEIGHTS
from cgbundle.format.schema import Manifest
from cgbundle.validate.bundle import check_bundle, check_manifest, examine
from cgcompile.bundle import manifest_text
from cgcompile.tools.diff.bundle_files import open_bundle
from cgcompile.tools.diff.compare import compare
from tests.helpers.bundles.edits import edited
from tests.helpers.places import GOLDEN
from tests.helpers.raising import raises

BUNDLE = GOLDEN / "v1/traced_tables.cgb"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLE, tmp_path / "copy.cgb"))


def manifest() -> Manifest:
    return archive.read_manifest(str(BUNDLE))


def write(folder: Path, tables: dict[str, bytes]) -> None:
    """Writes the bundle with these tables, and seals it again."""
    with open(folder / TABLES, "wb") as file:
        safetensors_files.write(file, {name: ("uint8", (len(data),), lambda data=data: data) for name, data in tables.items()})
    manifest = replace(archive.read_manifest(str(folder)), files=manifest_text.describe_files(str(folder)))
    (folder / file_names.MANIFEST).write_bytes(manifest_text.encode(manifest))


def contents(folder: Path) -> dict[str, bytes]:
    mapped = safetensors_files.Mapped(str(folder / TABLES), TABLES)
    return {name: bytes(mapped.data(name)) for name in mapped.entries}


def test_weights_hold_the_models_own_and_tables_the_rest() -> None:
    opened = Archive(str(BUNDLE))
    check_bundle(opened, "full")
    bundle_manifest = opened.manifest
    tables = {weight.tensor for weight in bundle_manifest.weights if weight.computed}
    assert tables == opened.tensors(TABLES).keys() == {"cgcompile.table.0", "cgcompile.table.1"}
    assert opened.tensors(WEIGHTS).keys() == {weight.tensor for weight in bundle_manifest.weights} - tables
    pieces = listed(opened)
    assert sum(piece.size for piece in pieces[TABLES]) == sum(len(data) for data in contents(BUNDLE).values())
    ends = [(piece.target, piece.target + piece.size) for parts in pieces.values() for piece in parts]
    assert all(a[1] <= b[0] for a, b in zip(sorted(ends), sorted(ends)[1:], strict=False)), "each has its own place on the GPU"


def test_tables_are_weights_that_nothing_shares() -> None:
    base = manifest()
    rows = list(base.weights)
    rows[4] = replace(rows[4], tensor=rows[0].tensor, **_layout(base, 0))
    rows[0] = replace(rows[0], computed=True)
    with raises("manifest-invalid", match=r"^weights\[0\]\.computed: 'places' is another weight's, too"):
        check_manifest(edited(base, weights=tuple(rows), frozen=()))


def _layout(manifest: Manifest, index: int) -> dict[str, object]:
    row = manifest.weights[index]
    return {"dtype": row.dtype, "shape": row.shape, "strides": row.strides, "offset": row.offset}


def test_the_file_has_to_be_listed() -> None:
    base = manifest()
    with raises("file-damaged", f"{TABLES}: the manifest needs it"):
        check_manifest(replace(base, files=tuple([file for file in base.files if file.path != TABLES])))


def test_what_is_wrong_with_the_file_is_told_by_its_name(copy: Path) -> None:
    whole = contents(copy)
    broken = {
        f"{TABLES}: tensor 'cgcompile.table.1' is missing": {"cgcompile.table.0": whole["cgcompile.table.0"]},
        f"{TABLES}: tensor 'places' is no weight's": {**whole, "places": b"1"},
        f"{TABLES}: tensor 'cgcompile.table.0' is uint8 \\[5\\]": {**whole, "cgcompile.table.0": b"short"},
    }
    for message, tables in broken.items():
        write(copy, tables)
        with raises("weights-invalid", message):
            check_bundle(Archive(str(copy)))
        (error,) = examine(Archive(str(copy)))
        assert isinstance(error, BundleError) and error.code == "weights-invalid"
    write(copy, whole)
    check_bundle(Archive(str(copy)), "full")
    data = bytearray((copy / TABLES).read_bytes())
    data[-1] ^= 1
    (copy / TABLES).write_bytes(data)
    check_bundle(Archive(str(copy)))  # only "full" computes the hash of the file, as for weights
    with raises("file-damaged", f"{TABLES}: SHA-256"):
        check_bundle(Archive(str(copy)), "full")
    (copy / TABLES).unlink()
    with raises("file-damaged", TABLES):
        check_bundle(Archive(str(copy)))


def test_diff_tells_which_elements_of_a_table_differ(copy: Path) -> None:
    whole = contents(copy)
    other = bytes([whole["cgcompile.table.0"][0] ^ 1]) + whole["cgcompile.table.0"][1:]
    write(copy, {**whole, "cgcompile.table.0": other})
    rows = compare(open_bundle(str(BUNDLE)), open_bundle(str(copy)))
    assert [(row.part, row.name, row.facts) for row in rows] == [
        ("weights", "cgcompile.table.0", {"elements": len(other), "differ": 1})
    ]
