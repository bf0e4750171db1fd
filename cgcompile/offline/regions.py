"""What has to be lowered of a program: all of it at every int_key, or each of its graph regions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.export import ExportedProgram

from cgbundle.format.schema import IntKey

from ..errors import BuildError
from ..model.user_code import first_line
from ..partition.regions import Link
from ..targets.cuda.host_regions import Mixed
from ..targets.cuda.memory_layout import dense_strides
from .lower.jobs import LoweringJob, RegionKey

WHOLE = "model"
"""The name of the one region of a program that is one graph."""


def whole_works(program: ExportedProgram, calls: Mapping[IntKey, Sequence[torch.Tensor]]) -> dict[RegionKey, LoweringJob]:
    """A program that is one graph, at every key."""
    return {(WHOLE, key): LoweringJob(program=program, tensors=tuple(tensors), layouts=()) for key, tensors in calls.items()}


def region_works(mixed: Mixed) -> dict[RegionKey, LoweringJob]:
    """Every graph region at every key.  What another region reads has the strides that eager PyTorch gives it, dense ones where
    these leave gaps: the regions are lowered apart and must agree.  Raises lowering-broken."""
    read = {name for part in mixed.parts.regions for name in part.inputs}
    works = {}
    for key, chain in mixed.chains.items():
        values = {name: _laid_out(value) for name, value in mixed.values[key].items()}
        for link in chain:
            if link.part.kind == "graph":
                given = tuple([values[name] for name in link.part.inputs])
                layouts = tuple([values[name].stride() if name in read else None for name in link.part.outputs])
                works[link.part.name, key] = LoweringJob(program=_exported(link, key, given), tensors=given, layouts=layouts)
    return works


def _laid_out(value: torch.Tensor) -> torch.Tensor:
    """A tensor like a value, laid out as it is between regions."""
    shape = tuple(value.shape)
    return torch.empty_strided(shape, dense_strides(shape, value.stride()), dtype=value.dtype)


def _exported(link: Link, key: IntKey, given: Sequence[torch.Tensor]) -> ExportedProgram:
    try:
        with torch.no_grad():
            return torch.export.export(link.module, tuple(given), strict=False)
    except Exception as error:
        raise BuildError(
            "lowering-broken",
            f"int_key {key}, {link.part.name}: torch.export cannot take it alone: {type(error).__name__}: {first_line(error)}",
        ) from error
