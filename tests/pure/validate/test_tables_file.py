"""Tables of a build lie in a file of their own: what a manifest may say of them, what their file must hold, and what that saves."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cgbundle.errors import BundleError
from cgbundle.format import archive, file_names, manifest_json, safetensors
from cgbundle.format.archive import Archive
from cgbundle.format.file_names import TABLES, WEIGHTS
from cgbundle.format.schema import Manifest
from cgbundle.validate.bundle import check_bundle, check_manifest, examine
from cgbundle.weights.upload import listed
from cgcompile.tools.diff.bundle_files import open_bundle
from cgcompile.tools.diff.compare import compare
from tests.helpers.places import GOLDEN
from tests.helpers.raising import raises

BUNDLE = GOLDEN / "v6/traced_tables.cgb"
BEFORE = GOLDEN / "v6/traced_fixed.cgb"
"""One of the same format version from before the file was there."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLE, tmp_path / "copy.cgb"))


def manifest() -> Manifest:
    return archive.read_manifest(str(BUNDLE))


def write(folder: Path, tables: dict[str, bytes]) -> None:
    """The bundle with such tables, sealed again."""
    with open(folder / TABLES, "wb") as file:
        safetensors.write(file, {name: ("uint8", (len(data),), lambda data=data: data) for name, data in tables.items()})
    made = replace(archive.read_manifest(str(folder)), files=archive.describe_files(str(folder)))
    (folder / file_names.MANIFEST).write_bytes(manifest_json.encode(made))


def contents(folder: Path) -> dict[str, bytes]:
    mapped = safetensors.Mapped(str(folder / TABLES), TABLES)
    return {name: bytes(mapped.data(name)) for name in mapped.entries}


def test_weights_hold_the_models_own_and_tables_the_rest() -> None:
    opened = Archive(str(BUNDLE))
    check_bundle(opened, "full")
    made = opened.manifest
    tables = {made.weights[index].tensor for index in made.tables}
    assert tables == opened.tensors(TABLES).keys() == {"cgcompile.table.0", "cgcompile.table.1"}
    assert opened.tensors(WEIGHTS).keys() == {weight.tensor for weight in made.weights} - tables
    pieces = listed(opened)
    assert sum(piece.size for piece in pieces[TABLES]) == sum(len(data) for data in contents(BUNDLE).values())
    ends = [(piece.target, piece.target + piece.size) for parts in pieces.values() for piece in parts]
    assert all(a[1] <= b[0] for a, b in zip(sorted(ends), sorted(ends)[1:], strict=False)), "each has its own place on the GPU"


def test_a_bundle_without_the_file_is_read_as_before() -> None:
    opened = Archive(str(BEFORE))
    assert b'"tables"' not in opened.text and opened.manifest.tables == ()
    assert listed(opened).keys() == {WEIGHTS} and manifest_json.encode(opened.manifest) == opened.text


@pytest.mark.parametrize(
    ("tables", "where", "message"),
    [
        ((0, 6), "tables[0]", "is another weight's, too"),
        ((6, 5), "tables[1]", "not ascending"),
        ((5, 5), "tables[1]", "not ascending"),
        ((-1, 5), "tables[0]", "is no weight"),
        ((5, 7), "tables[1]", "is no weight"),
    ],
)
def test_tables_are_ascending_weights_that_nothing_shares(tables: tuple[int, ...], where: str, message: str) -> None:
    made = manifest()
    rows = (*made.weights[:4], replace(made.weights[4], tensor="places", **_layout(made, 0)), *made.weights[5:])
    if tables[0] == 0:
        made = replace(made, weights=rows, fixed=())
    with raises("manifest-invalid") as caught:
        check_manifest(replace(made, tables=tables))
    assert str(caught.value).startswith(f"{where}: ") and message in str(caught.value)


def _layout(made: Manifest, index: int) -> dict[str, object]:
    row = made.weights[index]
    return {"dtype": row.dtype, "shape": row.shape, "strides": row.strides, "offset": row.offset}


def test_the_file_has_to_be_listed() -> None:
    made = manifest()
    with raises("file-damaged", f"{TABLES}: the manifest needs it"):
        check_manifest(replace(made, files=tuple([file for file in made.files if file.path != TABLES])))


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
    check_bundle(Archive(str(copy)))  # as of the weights, the data is what "full" hashes
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
