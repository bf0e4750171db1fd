"""A defect of a GGUF file, or of the folder beside it, gives an error of one sentence before torch is imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import cgcompile
from cgcompile.errors import BuildError
from cgcompile.language_models.gguf_file import MARK, PACKAGES, check_gguf


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a file that begins like a GGUF file. All packages count as installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_no_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    with pytest.raises(BuildError, match=r"tiny.gguf: no such file"):
        cgcompile.build(path, target="cpu")
    path.write_bytes(b"PK")
    with pytest.raises(cgcompile.ModelError, match=r"tiny.gguf: not a GGUF file") as caught:
        cgcompile.check(path, target="cpu")
    assert caught.value.code == "folder-invalid"


def test_a_package_that_is_missing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, lacks=package: None if name == lacks else object())
        with pytest.raises(BuildError, match=f"reading a GGUF file needs {package}, of the extras llm and gguf"):
            check_gguf(str(file), file.parent / "tiny", False)


def test_the_place_of_its_folder(file: Path) -> None:
    folder = file.parent / "tiny"
    check_gguf(str(file), folder, False)
    folder.mkdir()
    (folder / "config.json").write_text("{}")  # a model of the user, which must stay
    with pytest.raises(BuildError, match=r"exists, and was not written from a GGUF file") as caught:
        check_gguf(str(file), folder, True)
    assert caught.value.code == "output-unwritable"
    (folder / MARK).touch()
    with pytest.raises(BuildError, match=r"exists; the weights and the tokenizer") as caught:
        check_gguf(str(file), folder, False)
    assert caught.value.code == "output-exists"
    check_gguf(str(file), folder, True)
