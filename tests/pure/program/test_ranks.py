"""A model over several GPUs, called as one, against a fake driver whose streams work in any order."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

import cgbundle
from cgbundle.tensors.tensor import Tensor, from_bytes
from tests.helpers import rank_bundles
from tests.helpers.fake_driver import install
from tests.helpers.places import GOLDEN
from tests.helpers.rank_bundles import FLOATS, KEYS, expected, inputs
from tests.helpers.ranks_driver import RanksDriver

IMAGE = next((GOLDEN / "v1/gpt_two.cgb/kernels").iterdir()).read_bytes()
"""An ELF file for sm_90; the fake driver has kernels of its own."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "two.cgb"
    rank_bundles.write(folder, IMAGE)
    return folder


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[RanksDriver]:
    made = RanksDriver()
    install(monkeypatch, made)
    yield made
    assert not made.live and not made.mapped
    assert made.retained == 0


def given(key: int, seed: int = 0, device: int | None = None) -> Tensor:
    """Numbers of the CPU, or the same memory taken for a GPU's."""
    made = from_bytes(inputs(key, seed).tobytes(), "float32", (key, FLOATS))
    return made if device is None else Tensor(made.address, made.dtype, made.shape, made.strides, made, device)


def flat(made: Tensor) -> list[float]:
    return array("f", ctypes.string_at(made.address, made.shape[0] * FLOATS * 4)).tolist()


def wanted(key: int, seed: int = 0) -> list[float]:
    return expected(inputs(key, seed)).tolist()


@pytest.mark.parametrize("mode", ["graph", "stream"])
def test_it_is_called_like_any_program(fake: RanksDriver, path: Path, mode: str) -> None:
    with cgbundle.load(path, devices=[0, 1], mode=mode) as program:
        for seed, key in enumerate((4, 8, 4, 8, 8)):
            assert flat(program(given(key, seed))) == wanted(key, seed)
        assert program.int_keys == tuple((key,) for key in KEYS)
    with cgbundle.load(path) as program:
        assert flat(program(given(4))) == wanted(4)
