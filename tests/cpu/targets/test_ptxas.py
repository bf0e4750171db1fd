"""The lowest driver version for kernel images follows from the ptxas that makes them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.raising import raises

pytest.importorskip("triton")

from cgcompile.offline.compile.cubin_info import read_kernel_info
from cgcompile.targets.architectures import ARCHES, Arch
from cgcompile.targets.kernels.fills import PARAMS, PIECES, fill_image
from cgcompile.targets.kernels.ptxas import assemble, lowest_driver


@pytest.fixture
def triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a triton package that only has the folder of its ptxas; returns that folder."""
    folder = tmp_path / "triton" / "backends" / "nvidia" / "bin"
    folder.mkdir(parents=True)
    spec = SimpleNamespace(origin=str(tmp_path / "triton" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return folder


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_the_installed_triton_serves_every_target() -> None:
    """Triton 3.6 and 3.7 contain ptxas of CUDA 12 and of CUDA 13. An image runs with any driver of ptxas's major version or a later
    one."""
    drivers = {row.name: lowest_driver(row.capability) for row in ARCHES}
    assert set(drivers.values()) <= {12000, 13000, 14000}
    assert drivers["sm_80"] == drivers["sm_86"] == drivers["sm_89"] == drivers["sm_90"] <= drivers["sm_100"] == drivers["sm_120"]


@pytest.mark.parametrize("row", ARCHES, ids=lambda row: row.name)
def test_blackwell_has_a_ptxas_of_its_own(triton: Path, row: Arch) -> None:
    script(triton / "ptxas", 'echo "Cuda compilation tools, release 12.8, V12.8.93"')
    script(triton / "ptxas-blackwell", 'echo "Cuda compilation tools, release 13.1, V13.1.80"')
    assert lowest_driver(row.capability) == (13000 if row.major >= 10 else 12000)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises("extra-missing", match="needs triton") as caught:
        lowest_driver(90)
    assert caught.value.hint == "pip install 'torch>=2.11,<2.14' 'triton>=3.6,<3.8' numpy" and caught.value.exit_code == 2


def test_a_triton_without_this_ptxas(triton: Path) -> None:
    script(triton / "ptxas", 'echo "release 12.8"')
    assert lowest_driver(90) == 12000
    with raises("kernel-failed", match="triton has no ptxas-blackwell at "):
        lowest_driver(100)


@pytest.mark.parametrize("body", ["echo hello", "true", "echo 'bad library' >&2; exit 127", "echo 'release 12.8'; exit 1"])
def test_a_ptxas_that_says_no_version(triton: Path, body: str) -> None:
    script(triton / "ptxas", body)
    with raises("kernel-failed", match="ptxas --version printed no version") as caught:
        lowest_driver(90)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("row", ARCHES, ids=lambda row: row.name)
def test_the_kernels_that_fill_memory_are_code_for_every_target(row: Arch) -> None:
    image = fill_image(row.name)
    assert image == fill_image(row.name)  # it does not depend on the folder or the time
    flags = int.from_bytes(image[48:52], "little")  # the low byte up to ptxas 12, the second from 13 on
    assert row.capability in (flags & 0xFF, flags >> 8 & 0xFF)
    assert all(read_kernel_info(image, f"cgcompile_fill_{piece}").params == PARAMS for piece in PIECES)


def test_what_ptxas_refuses_is_said() -> None:
    with raises("kernel-failed", match="ptxas for sm_90: .*version directive"):
        assemble("no code", 90)
