"""Isolated regions for one int_key: the input of graph recording and of the host compiler.

A value that crosses is copied as bytes, so the region that computes it makes it contiguous.  A region returns no view of its
inputs.  No other region uses state and inputs that a region writes to.  A graph writes in place, the host returns new values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from ..export.torch_program import device_of
from ..export.weights import weight_placeholders, weight_tensors
from ..model.source import CPU
from ..util.raw_bytes import copied, put_back
from .node_kinds import is_view
from .region_modules import region_modules
from .split import Partition, PlannedRegion, new_value


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionModule:
    """A region at one int_key: `module(*inputs) -> tuple`, in the order of the names in `planned.inputs` and
    `planned.module_outputs`.

    `passed_through`: for a host region that computes nothing, the input that each output is; else {}.
    """

    planned: PlannedRegion
    module: GraphModule
    passed_through: Mapping[str, str]


def isolated_regions(program: ExportedProgram, partition: Partition, tensors: Sequence[torch.Tensor]) -> tuple[RegionModule, ...]:
    """Returns the isolated regions in order.  `tensors` have the sizes of the int_key's inputs.  Raises inputs-unlike."""
    modules = region_modules(program, partition, tensors)
    on_host = {name for region in partition.regions if region.kind == "host" for name in region.inputs}
    return tuple([_isolated(region, module, on_host) for region, module in zip(partition.regions, modules, strict=True)])


def eager_values(
    program: ExportedProgram, regions: Sequence[RegionModule], partition: Partition, tensors: Sequence[torch.Tensor], calls: int = 1
) -> list[dict[str, torch.Tensor]]:
    """Runs the regions in eager PyTorch, host regions on the CPU, and returns all values by name, one dict per call.

    The returned inputs and state have their values from before the call.  The program's buffers are restored afterwards.
    """
    state = state_tensors(program, partition)
    initial = {name: copied(value) for name, value in state.items()}
    call_values = []
    try:
        with torch.no_grad():
            for _ in range(calls):
                call_values.append(_eager_call(regions, partition, tensors, state, device_of(program)))
    finally:
        with torch.no_grad():
            for name, value in state.items():
                put_back(value, initial[name])
    return call_values


def state_tensors(program: ExportedProgram, partition: Partition) -> dict[str, torch.Tensor]:
    """Returns the buffers that regions write to, and those of `partition.state`, by their placeholders' names."""
    names, tensors = weight_placeholders(program), weight_tensors(program)
    used = {*partition.state, *[name for region in partition.regions for name in region.written]}
    return {name: tensors[target] for name, target in names.items() if name in used}


def _eager_call(
    regions: Sequence[RegionModule],
    partition: Partition,
    tensors: Sequence[torch.Tensor],
    state: Mapping[str, torch.Tensor],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    values = dict(zip(partition.inputs, tensors, strict=True)) | {name: copied(value) for name, value in state.items()}
    for region in regions:
        planned = region.planned
        written = {name: values[name].clone() for name in planned.written if name not in state}
        region_device = CPU if planned.kind == "host" else device
        outputs = region.module(*[written.get(name, values[name]).to(region_device) for name in planned.inputs])
        persistent = {tensor.untyped_storage().data_ptr() for tensor in (*written.values(), *state.values()) if tensor.numel()}
        copies = [output.clone() if output.untyped_storage().data_ptr() in persistent else output for output in outputs]
        values.update(zip(planned.module_outputs, copies, strict=True))
        for name in planned.written:
            if name in state and planned.kind == "host":
                state[name].copy_(values[new_value(name)])
    return values


def uploaded_values(partition: Partition) -> tuple[str, ...]:
    """The names of the values that the host computes and a graph or the caller reads.  They need memory on the GPU."""
    read = {name for region in partition.regions if region.kind == "graph" for name in region.inputs} | set(partition.outputs)
    return tuple([name for region in partition.regions if region.kind == "host" for name in region.outputs if name in read])


def _isolated(region: PlannedRegion, module: GraphModule, on_host: set[str]) -> RegionModule:
    (output,) = [node for node in module.graph.nodes if node.op == "output"]
    outs: list[Node] = list(output.args[0])
    if region.kind == "host" and not region.operations:
        return RegionModule(
            planned=region, module=module, passed_through={name: node.name for name, node in zip(region.outputs, outs, strict=True)}
        )
    for place, name in enumerate(region.outputs):  # the new values of `written` follow, and are clones already
        if region.kind == "host" or name in on_host or _is_region_input(outs[place]):
            with module.graph.inserting_before(output):
                outs[place] = module.graph.call_function(
                    torch.ops.aten.clone.default, (outs[place],), {"memory_format": torch.contiguous_format}
                )
    output.args = (tuple(outs),)
    module.recompile()
    return RegionModule(planned=region, module=module, passed_through={})


def _is_region_input(node: Node) -> bool:
    """Whether a tensor is an input of the region, or a view of one."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"
