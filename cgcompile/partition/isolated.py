"""Regions isolated from each other, for one int_key: what a graph recorder and the host's compiler start from.

What crosses is copied as bytes, so its maker makes it contiguous.  A region hands out no view of what it was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from ..model.source import CPU
from .node_kinds import is_view
from .region_modules import region_modules
from .split import Partition, PlannedRegion


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionModule:
    """A region at one int_key: `module(*inputs) -> tuple of outputs`, in the order of the names in `planned`.

    `passed_through`: outputs of a host region that computes nothing -> the inputs that they are.
    """

    planned: PlannedRegion
    module: GraphModule
    passed_through: Mapping[str, str]


def isolated_regions(program: ExportedProgram, partition: Partition, tensors: Sequence[torch.Tensor]) -> tuple[RegionModule, ...]:
    """The regions in order; `tensors` have the sizes of the key's inputs.  Raises inputs-unlike."""
    modules = region_modules(program, partition, tensors)
    on_host = {name for region in partition.regions if region.kind == "host" for name in region.inputs}
    return tuple([_isolated(region, module, on_host) for region, module in zip(partition.regions, modules, strict=True)])


def eager_values(regions: Sequence[RegionModule], partition: Partition, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every value by name, computed by eager PyTorch: what host regions make on the CPU, the rest on the device of `tensors`."""
    values = dict(zip(partition.inputs, tensors, strict=True))
    device = tensors[0].device if tensors else CPU
    with torch.no_grad():
        for region in regions:
            where = CPU if region.planned.kind == "host" else device
            made = region.module(*[values[name].to(where) for name in region.planned.inputs])
            values.update(zip(region.planned.outputs, made, strict=True))
    return values


def uploaded_values(partition: Partition) -> tuple[str, ...]:
    """The values that the host makes and a graph, or the caller, takes: they need a place on the GPU."""
    taken = {name for region in partition.regions if region.kind == "graph" for name in region.inputs} | set(partition.outputs)
    return tuple([name for region in partition.regions if region.kind == "host" for name in region.outputs if name in taken])


def _isolated(region: PlannedRegion, module: GraphModule, on_host: set[str]) -> RegionModule:
    (output,) = [node for node in module.graph.nodes if node.op == "output"]
    made: list[Node] = list(output.args[0])
    if region.kind == "host" and not region.operations:
        return RegionModule(
            planned=region, module=module, passed_through={name: node.name for name, node in zip(region.outputs, made, strict=True)}
        )
    for place, name in enumerate(region.outputs):
        if region.kind == "host" or name in on_host or _given(made[place]):
            with module.graph.inserting_before(output):
                made[place] = module.graph.call_function(
                    torch.ops.aten.clone.default, (made[place],), {"memory_format": torch.contiguous_format}
                )
    output.args = (tuple(made),)
    module.recompile()
    return RegionModule(planned=region, module=module, passed_through={})


def _given(node: Node) -> bool:
    """Whether a tensor is an input of the region, or a view of one."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"
