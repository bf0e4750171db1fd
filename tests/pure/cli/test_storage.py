"""`cgcompile store`, `push` and `pull`: what scripts read is on stdout, and what people read on stderr."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cgbundle.format.archive import Archive
from cgbundle.validate.bundle import check_bundle
from tests.helpers.bundles.tiny_bundle import write_bundle
from tests.pure.cli.test_commands import call, refused


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "tiny.cgb")


def test_a_bundle_goes_through_a_store(bundle: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    added = call("store", "add", bundle, "--store", store)
    assert added.stdout == f"{store}/tiny.cgb\n" and "of it new to the store" in added.stderr
    again = json.loads(call("store", "add", bundle, "--store", store, "--name", "other.cgb", "--json").stdout)
    assert again["path"] == f"{store}/other.cgb" and again["new"] == 0
    [row] = json.loads(call("store", "list", "--store", store, "--json").stdout)
    assert row["names"] == ["other.cgb", "tiny.cgb"] and row["own"] == row["bytes"] and row["loaded"] is False
    shown = call("store", "list", "--store", store).stdout
    assert "other.cgb, tiny.cgb" in shown and row["digest"][:12] in shown
    assert call("store", "remove", "tiny.cgb", "other.cgb", "--store", store).exit_code == 0
    assert "would remove 1 bundle and 4 files" in call("store", "gc", "--dry-run", "--store", store).stderr
    assert json.loads(call("store", "gc", "--store", store, "--json").stdout)["bundles"] == [row["digest"]]
    assert "removed 0 bundles and 0 files" in call("store", "gc", "--store", store).stderr


def test_what_a_store_refuses_is_one_line(bundle: Path, tmp_path: Path) -> None:
    line = refused(call("store", "list", "--store", tmp_path / "none"), 2)
    assert line.endswith("none: no such store")
    call("store", "add", bundle, "--store", tmp_path / "store")
    other = write_bundle(tmp_path / "other.cgb")
    (other / "program.pt2").write_bytes(b"damaged")
    assert "file-damaged" not in refused(call("store", "add", other, "--store", tmp_path / "s2"), 1)


def test_a_bundle_travels(bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    pushed = call("push", bundle, tmp_path / "far" / "tiny.cgb")
    assert pushed.stdout == f"{tmp_path}/far/tiny.cgb\n" and "travelled" in pushed.stderr
    pulled = json.loads(call("pull", tmp_path / "far" / "tiny.cgb", "-o", tmp_path / "back.cgb", "--json").stdout)
    assert pulled["path"] == f"{tmp_path}/back.cgb" and pulled["moved"] == pulled["bytes"]
    check_bundle(Archive(pulled["path"]), "full")
    line = refused(call("pull", tmp_path / "far" / "tiny.cgb", "-o", tmp_path / "back.cgb"), 2)
    assert "back.cgb: exists" in line
