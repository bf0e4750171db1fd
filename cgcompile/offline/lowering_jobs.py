"""The lowering jobs of a program: the whole program at every int_key, or each of its graph regions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch.export import ExportedProgram

from cgbundle.format.schema import IntKey

from ..bundle.single_region import WHOLE
from ..errors import BuildError
from ..export.programs import Programs
from ..model.flat_module import PREFIX
from ..model.user_code import first_line
from ..partition.isolated import RegionModule
from ..targets.cuda.host_regions import SplitProgram
from ..targets.memory_layout import dense_strides
from ..transforms.output_aliases import OutputAlias
from .lower.jobs import LoweringJob, RegionKey


def live_weights(tensors: Mapping[str, torch.Tensor], aliases: Sequence[OutputAlias], state: Collection[str]) -> tuple[str, ...]:
    """The weights that may change between calls: state, and those that share memory with outputs, because a caller may write to
    outputs.  `tensors`: weights and state of all programs."""
    names = {PREFIX + alias.name for alias in aliases if alias.name} | set(state)
    memory = {tensors[name].untyped_storage().data_ptr() for name in names if name in tensors and tensors[name].numel()}
    shared = {name for name, value in tensors.items() if value.numel() and value.untyped_storage().data_ptr() in memory}
    return tuple(sorted(shared))


def whole_jobs(
    programs: Programs, calls: Mapping[IntKey, Sequence[torch.Tensor]], writes: Mapping[IntKey, bool], live: tuple[str, ...]
) -> dict[RegionKey, LoweringJob]:
    """The jobs of programs that are one graph.  `writes`: whether each program writes to buffers or inputs.  `live`: see
    `live_weights`."""
    return {
        (WHOLE, key): LoweringJob(program=programs.at(key), tensors=tuple(tensors), layouts=(), writes=writes[key], live=live)
        for key, tensors in calls.items()
    }


def region_jobs(split: SplitProgram, live: tuple[str, ...]) -> dict[RegionKey, LoweringJob]:
    """The jobs of every graph region at every key.  An output that another region reads has eager PyTorch's strides, or dense ones
    if these leave gaps, because regions are lowered separately.  `live`: see `live_weights`.  Raises lowering-broken."""
    jobs = {}
    for key, regions in split.regions.items():
        read = {name for region in regions for name in region.planned.inputs}
        values = {name: _laid_out(value) for name, value in split.values[key].items()}
        for region in regions:
            planned = region.planned
            if planned.kind == "graph":
                arguments = tuple([values[name] for name in planned.inputs])
                layouts = tuple([values[name].stride() if name in read else None for name in planned.outputs])
                program = _exported(region, key, arguments)
                jobs[planned.name, key] = LoweringJob(
                    program=program, tensors=arguments, layouts=layouts, writes=bool(planned.written), live=live
                )
    return jobs


def _laid_out(value: torch.Tensor) -> torch.Tensor:
    """An empty tensor like a value, with the strides that the value has between regions."""
    shape = tuple(value.shape)
    return torch.empty_strided(shape, dense_strides(shape, value.stride()), dtype=value.dtype)


def _exported(region: RegionModule, key: IntKey, arguments: Sequence[torch.Tensor]) -> ExportedProgram:
    try:
        with torch.no_grad():
            return torch.export.export(region.module, tuple(arguments), strict=False)
    except Exception as error:
        raise BuildError(
            "lowering-broken",
            f"int_key {key}, {region.planned.name}: torch.export cannot export it: {type(error).__name__}: {first_line(error)}",
        ) from error
