"""A signed and an unsigned bundle, and two pairs of keys.

The tiny bundle's shared object is a dummy: if a load passes all checks before, it fails there.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cgcompile.bundle.sign import sign
from tests.helpers.bundles import tiny_bundle
from tests.helpers.bundles.signing import Pair


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, Pair]:
    """Returns the signer's pair of keys and another pair."""
    folder = tmp_path_factory.mktemp("keys")
    return Pair.make(folder, "ours"), Pair.make(folder, "theirs")


@pytest.fixture(scope="session")
def signed_once(tmp_path_factory: pytest.TempPathFactory, pairs: tuple[Pair, Pair]) -> Path:
    path = tiny_bundle.write_bundle(tmp_path_factory.mktemp("signed") / "tiny.cgb")
    sign(path, pairs[0].private)
    return path


@pytest.fixture
def signed(signed_once: Path, tmp_path: Path) -> Path:
    """Returns a signed bundle for one test. A copied bundle keeps its signature."""
    return Path(shutil.copytree(signed_once, tmp_path / "tiny.cgb"))


@pytest.fixture
def unsigned(tmp_path: Path) -> Path:
    return tiny_bundle.write_bundle(tmp_path / "unsigned.cgb")
