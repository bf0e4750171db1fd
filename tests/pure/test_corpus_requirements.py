"""The packages of tests/corpus/models/strangers have exact versions and do not change the compiler's environment."""

from __future__ import annotations

import re

from tests.helpers.places import ROOT

PINNED = re.compile(r"[a-z0-9][a-z0-9.-]*==[0-9][A-Za-z0-9.]*")
"""A normalized name and one version."""

NEVER = {"torch", "torchvision", "torchaudio", "triton", "numpy", "transformers", "safetensors", "huggingface-hub", "cgcompile"}
"""Packages that must not be in the folder: in PYTHONPATH, they would replace the tested versions."""


def requirements() -> list[str]:
    lines = (ROOT / "tests/corpus/models/strangers/requirements.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_each_requirement_is_pinned_once() -> None:
    lines = requirements()
    assert [line for line in lines if not PINNED.fullmatch(line)] == []
    names = [line.partition("==")[0] for line in lines]
    assert names == sorted(set(names))


def test_no_requirement_replaces_a_tested_package() -> None:
    assert NEVER.isdisjoint(line.partition("==")[0] for line in requirements())
