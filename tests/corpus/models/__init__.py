"""The models by package."""

from __future__ import annotations

from itertools import zip_longest

from ..case import Case
from . import (
    layers,
    strangers,
    timm_models,
    torchaudio_models,
    torchvision_models,
    transformers_audio,
    transformers_causal,
    transformers_multimodal,
    transformers_sequence,
    transformers_text,
    transformers_vision,
)

PACKAGES = (
    transformers_text, transformers_causal, torchvision_models, transformers_vision, layers, transformers_sequence,
    transformers_multimodal, torchaudio_models, transformers_audio, timm_models, *strangers.FIELDS,
)  # fmt: skip


def all_cases() -> list[Case]:
    """Returns every case, alternating between the packages, so that a stopped run has covered part of each."""
    return [case for row in zip_longest(*[module.CASES for module in PACKAGES]) for case in row if case is not None]


def find(name: str) -> Case:
    """Returns the case with this name, which may be a member of another case. Raises KeyError."""
    cases = all_cases()
    return {case.name: case for case in [*cases, *[member for case in cases for member in case.members]]}[name]
