"""What the targets' halves of a build share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cgbundle.format.schema import Dimension, Exam, IntKey, Program, Region, Target, Weight

from ..model.source import Source
from ..transforms.prepared import Prepared


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildSpec:
    """What is built: the model, its sizes per declared dimension, and how.  `placements`: by int_key the nodes of its program that
    must be on the host beside a GPU, with the reasons.  `recorder` is that of `targets.Chosen`, the rest, `waive` too, are options
    of `build`."""

    source: Source
    prepared: Prepared
    sizes: dict[str, tuple[int, ...]]
    dimensions: tuple[Dimension, ...]
    placements: Mapping[IntKey, Mapping[str, str]]
    target: str
    recorder: str
    lower: str
    specialize: str
    prove: str
    prove_budget: float
    waive: tuple[str, ...]
    torch_version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestParts:
    """The fields of the manifest that depend on the target; the files they name are in the stage."""

    target: Target
    weights: tuple[Weight, ...]
    memories: tuple[tuple[str, int], ...]
    regions: tuple[Region, ...]
    programs: tuple[Program, ...]
    module_state: str
    exam: Exam
