"""Reading a bundle from disk: invalid paths, and missing, changed and unexpected files."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from cgbundle import loader, process
from cgbundle.errors import BundleError, CgbundleError
from cgbundle.format import archive, file_names, manifest_json
from cgbundle.validate import bundle as verify
from cgbundle.validate import contents
from cgbundle.validate.manifest import check_manifest
from cgcompile.bundle import manifest_text
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.tiny_bundle import HOST_FILE, manifest, write_bundle
from tests.helpers.raising import raises


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "tiny.cgb")


# --- the path --------------------------------------------------------------------------------------------------------


def test_nothing_at_the_path(tmp_path: Path) -> None:
    with raises("bundle-missing", match=r"no\.cgb: no such bundle") as caught:
        archive.read_manifest(str(tmp_path / "no.cgb"))
    assert caught.value.exit_code == 2


def test_a_file_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with raises("not-a-bundle", match="a file, not a bundle directory") as caught:
        archive.read_manifest(str(tmp_path / "f"))
    assert caught.value.exit_code == 2


def test_a_directory_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    with raises("not-a-bundle", match=r"a directory without manifest\.json"):
        archive.read_manifest(str(tmp_path))


def test_a_directory_in_the_place_of_the_manifest_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with raises("not-a-bundle"):
        archive.read_manifest(str(tmp_path))


@pytest.mark.parametrize(
    ("data", "error"), [(b"", "manifest-invalid"), (b"{}", "manifest-invalid"), (b'{"format":99}', "format-unsupported")]
)
def test_the_manifests_own_defects_come_through(tmp_path: Path, data: bytes, error: type[CgbundleError]) -> None:
    (tmp_path / "manifest.json").write_bytes(data)
    with raises(error):
        archive.read_manifest(str(tmp_path))


def test_a_manifest_is_read(bundle: Path) -> None:
    assert archive.read_manifest(str(bundle)) == manifest_json.decode((bundle / "manifest.json").read_bytes())
    assert archive.read_manifest(str(bundle)).name == "tiny"


# --- the files -------------------------------------------------------------------------------------------------------

FILES = [file_names.WEIGHTS, file_names.SELF_TEST, file_names.PROGRAM, HOST_FILE]


def check(bundle: Path, level: str) -> None:
    verify.check_bundle(archive.Archive(str(bundle)), level)


def reject(bundle: Path, level: str, error: type[CgbundleError], message: str) -> None:
    with raises(error, match=message) as caught:
        check(bundle, level)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("level", contents.LEVELS)
def test_a_whole_bundle_holds(bundle: Path, level: str) -> None:
    check(bundle, level)


@pytest.mark.parametrize("level", contents.LEVELS)
@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(bundle: Path, level: str, name: str) -> None:
    (bundle / name).unlink()
    reject(bundle, level, "file-damaged", f"^{name}: missing")


@pytest.mark.parametrize("level", contents.LEVELS)
@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named_with_both_lengths(bundle: Path, level: str, name: str) -> None:
    data = (bundle / name).read_bytes()
    (bundle / name).write_bytes(data[:-1])
    reject(bundle, level, "file-damaged", f"^{name}: {len(data) - 1} bytes, expected {len(data)}")


@pytest.mark.parametrize("name", FILES)
def test_a_directory_in_the_place_of_a_file_is_damage(bundle: Path, name: str) -> None:
    manifest = archive.read_manifest(str(bundle))
    (bundle / name).unlink()
    (bundle / name).mkdir()
    size = os.stat(bundle / name).st_size  # a directory may have the same size as the missing file
    files = tuple(replace(file, bytes=size) if file.path == name else file for file in manifest.files)
    with raises("file-damaged", match=f"^{name}: "):
        verify.check_bundle(ArchiveOf(bundle, replace(manifest, files=files)), "full")


def test_a_file_in_the_place_of_a_directory_is_damage(bundle: Path) -> None:
    (bundle / HOST_FILE).unlink()
    (bundle / "host").rmdir()
    (bundle / "host").write_text("")
    reject(bundle, "load", "file-damaged", f"^{HOST_FILE}: missing")


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_is_found_by_the_full_check(bundle: Path, name: str) -> None:
    whole = (bundle / name).read_bytes()
    for position in range(0, len(whole), 7):
        data = bytearray(whole)
        data[position] ^= 1 << (position % 8)
        (bundle / name).write_bytes(data)
        with pytest.raises((BundleError, BundleError)) as caught:
            check(bundle, "full")
        assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize("name", [file_names.SELF_TEST, file_names.PROGRAM, HOST_FILE])
def test_loading_finds_a_flipped_byte_in_all_files_but_the_weights(bundle: Path, name: str) -> None:
    data = bytearray((bundle / name).read_bytes())
    data[-1] ^= 1
    (bundle / name).write_bytes(data)
    reject(bundle, "load", "file-damaged", f"^{name}: SHA-256 is [0-9a-f]{{16}}..., expected [0-9a-f]{{16}}...")


def test_a_flipped_byte_of_the_weights_is_left_to_the_full_check(bundle: Path) -> None:
    data = bytearray((bundle / file_names.WEIGHTS).read_bytes())
    data[-1] ^= 1
    (bundle / file_names.WEIGHTS).write_bytes(data)
    check(bundle, "load")
    reject(bundle, "full", "file-damaged", rf"^{file_names.WEIGHTS}: SHA-256")


def stranger(place: Path, kind: str) -> None:
    """Creates a file, a folder, a link or a pipe."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if kind == "file":
        place.write_text("")
    elif kind == "folder":
        place.mkdir()
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to({"loop": place.name, "nothing": "nowhere", "in": place.parent, "out": "/"}[kind])


@pytest.mark.parametrize("kind", ["file", "folder", "pipe", "loop", "nothing", "in", "out"])
@pytest.mark.parametrize(
    "name", ["stranger", "host/stranger", ".hidden", "manifest.json.sig.old", "ranks", "graph", "\udcff\x1b[2J"]
)
def test_what_the_manifest_does_not_name_is_found_by_the_full_check(bundle: Path, name: str, kind: str) -> None:
    stranger(bundle / name, kind)
    check(bundle, "load")
    with raises("file-damaged") as caught:
        check(bundle, "full")
    shown = name if name.isprintable() else r"\udcff\x1b[2J"
    assert str(caught.value) == f"{shown}: {'a folder of no named file' if kind == 'folder' else 'not named in the manifest'}"
    assert len(verify.examine(archive.Archive(str(bundle)))) == 1


def test_the_contents_of_an_unknown_folder_are_not_read(bundle: Path) -> None:
    """Such a folder may have any size and depth, or be unreadable."""
    deep, folders = bundle / "new", 0
    stranger(deep / "file", "file")
    place = os.open(deep, os.O_RDONLY)
    while folders < 1200:  # deeper than any path that a system call accepts
        os.mkdir("d" * 200, dir_fd=place)
        inside = os.open("d" * 200, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place, folders = inside, folders + 1
    os.close(place)
    assert [str(error) for error in verify.examine(archive.Archive(str(bundle)))] == ["new: a folder of no named file"]
    os.system(f"rm -rf {deep}")


def test_folders_of_the_format_may_be_empty(bundle: Path) -> None:
    """Earlier versions created these folders also for ranks and models without kernels or graphs."""
    for name in ("graphs", "kernels", "programs"):
        (bundle / name).mkdir()
    check(bundle, "full")
    (bundle / "kernels" / "stranger").mkdir()
    reject(bundle, "full", "file-damaged", "^kernels/stranger: a folder of no named file")


def test_a_named_file_that_is_a_folder_is_no_file(bundle: Path) -> None:
    (bundle / file_names.PROGRAM).unlink()
    (bundle / file_names.PROGRAM).mkdir()
    reject(bundle, "load", "file-damaged", f"^{file_names.PROGRAM}: ")


def test_files_are_described_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/c").write_bytes(b"abc")
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "manifest.json").write_bytes(b"x")
    rows = manifest_text.describe_files(str(tmp_path))
    assert [(row.path, row.bytes) for row in rows] == [("a", 0), ("b/c", 3)]
    assert [row.sha256 for row in rows] == [hashlib.sha256(b"").hexdigest(), hashlib.sha256(b"abc").hexdigest()]


def test_a_hash_is_taken_over_more_than_one_piece(tmp_path: Path) -> None:
    data = bytes(range(256)) * 20_000
    assert len(data) > process.CHUNK
    (tmp_path / "big").write_bytes(data)
    assert manifest_text.sha256(str(tmp_path / "big")) == hashlib.sha256(data).hexdigest()


# --- weights and self-test ------------------------------------------------------------------------------------------------


def test_weights_that_the_manifest_names_must_be_there(bundle: Path) -> None:
    manifest = archive.read_manifest(str(bundle))
    wrong = replace(manifest.weights[0], tensor="second.weight")
    with raises("weights-invalid", match=r"^weights\.safetensors: tensor 'second\.weight' is missing"):
        contents.check_weights(ArchiveOf(bundle, replace(manifest, weights=(wrong,))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int32"}, r"is float32 \[2, 3\], expected int32 \[2, 3\]"),
        ({"shape": (2, 4), "strides": (4, 1)}, r"is float32 \[2, 3\], expected float32 \[2, 4\]"),
        ({"shape": (6,), "strides": (1,)}, r"is float32 \[2, 3\], expected float32 \[6\]"),
        ({"shape": (3, 2), "strides": (2, 1)}, r"is float32 \[2, 3\], expected float32 \[3, 2\]"),
    ],
)
def test_weights_must_have_the_manifests_dtype_and_shape(bundle: Path, changes: dict[str, object], message: str) -> None:
    manifest = archive.read_manifest(str(bundle))
    wrong = replace(manifest.weights[0], **changes)  # type: ignore[arg-type]
    with raises("weights-invalid", match=message):
        contents.check_weights(ArchiveOf(bundle, replace(manifest, weights=(wrong,))))


def test_a_weight_that_is_not_row_major_is_stored_with_its_axes_in_memory_order(bundle: Path) -> None:
    manifest = archive.read_manifest(str(bundle))
    turned = replace(manifest.weights[0], shape=(3, 2), strides=(1, 3))
    contents.check_weights(ArchiveOf(bundle, replace(manifest, weights=(turned, *manifest.weights[1:]))))


# --- the options of load -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["mode", "on_miss", "outputs", "check"])
def test_an_option_that_does_not_exist_names_those_that_do(bundle: Path, option: str) -> None:
    with pytest.raises(ValueError, match=rf"^{option}='nonsense': expected one of '"):
        loader.load(bundle, **{option: "nonsense"})  # type: ignore[arg-type]


def test_load_refuses_before_it_runs_anything(bundle: Path) -> None:
    (bundle / HOST_FILE).write_bytes(b"x")
    with raises("file-damaged"):
        loader.load(str(bundle))


def test_the_fabricated_manifest_is_sound() -> None:
    files = tuple(archive.File(path=name, bytes=0, sha256="0" * 64) for name in FILES)
    check_manifest(replace(manifest(), files=files))
