"""`push` and `pull` write what scripts read to stdout, and what people read to stderr."""

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


def test_a_bundle_travels(bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    pushed = call("push", bundle, tmp_path / "far" / "tiny.cgb")
    assert pushed.stdout == f"{tmp_path}/far/tiny.cgb\n" and "transferred" in pushed.stderr
    pulled = json.loads(call("pull", tmp_path / "far" / "tiny.cgb", "-o", tmp_path / "back.cgb", "--json").stdout)
    assert pulled["path"] == f"{tmp_path}/back.cgb" and pulled["moved"] == pulled["bytes"]
    check_bundle(Archive(pulled["path"]), "full")
    line = refused(call("pull", tmp_path / "far" / "tiny.cgb", "-o", tmp_path / "back.cgb"), 2)
    assert "back.cgb: exists" in line
