"""Two wheels from one source tree: cgbundle without dependencies, and cgcompile, which needs cgbundle of the same version."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

from cgcompile import __version__
from tests.helpers.bundles.tiny_bundle import write_bundle
from tests.helpers.imports import PACKAGES
from tests.helpers.places import ROOT

RUNTIME, COMPILER = (
    tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"] for folder in (ROOT / "bundles", ROOT)
)


def test_both_have_one_version() -> None:
    assert RUNTIME["version"] == COMPILER["version"] == __version__
    assert f"cgbundle=={__version__}" in COMPILER["dependencies"] and "dependencies" not in RUNTIME
    assert RUNTIME["requires-python"] == COMPILER["requires-python"]
    assert RUNTIME["optional-dependencies"]["sign"] == COMPILER["optional-dependencies"]["sign"]


def wheel(folder: Path, into: Path) -> tuple[Path, set[str], Message]:
    """Returns the wheel of a project, its top-level folders, and its metadata."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(into)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    [path] = into.iterdir()
    with ZipFile(path) as opened:
        names = opened.namelist()
        [license] = [name for name in names if name.endswith("/LICENSE")]
        assert opened.read(license) == (ROOT / "LICENSE").read_bytes()
        [metadata] = [name for name in names if name.endswith("/METADATA")]
        return path, {name.partition("/")[0] for name in names}, message_from_bytes(opened.read(metadata))


def test_the_runtime_is_a_wheel_that_needs_nothing(tmp_path: Path) -> None:
    path, folders, metadata = wheel(ROOT / "bundles", tmp_path / "dist")
    assert folders == {"cgbundle", f"cgbundle-{__version__}.dist-info"}
    assert all("extra == " in row for row in metadata.get_all("Requires-Dist", []))
    with ZipFile(path) as opened:
        opened.extractall(tmp_path / "site")
    files = {file.relative_to(tmp_path / "site") for file in (tmp_path / "site/cgbundle").rglob("*") if file.is_file()}
    sources = [*(ROOT / "bundles/cgbundle").rglob("*.py"), ROOT / "bundles/cgbundle/py.typed"]
    assert files == {file.relative_to(ROOT / "bundles") for file in sources}
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "from cgbundle.format import archive\nfrom cgbundle.validate import bundle as verify\n"
        f"verify.check_bundle(archive.Archive({str(write_bundle(tmp_path / 'tiny.cgb'))!r}), 'full')"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, check=True)


def test_the_compilers_wheel_has_no_runtime(tmp_path: Path) -> None:
    _, folders, metadata = wheel(ROOT, tmp_path)
    assert folders == {*PACKAGES, f"cgcompile-{__version__}.dist-info"} - {"cgbundle"}
    assert f"cgbundle=={__version__}" in metadata.get_all("Requires-Dist", [])
