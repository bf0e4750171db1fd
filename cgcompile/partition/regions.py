"""The regions of a program as modules to lower, for one int_key: what a graph recorder and the host's compiler start from.

What crosses between the host and a GPU is copied as bytes: such a tensor is made contiguous by the region that makes it.  And a
region hands out no view of what it was given: two values of a program never share memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from . import Part, Partition, region_modules
from .roles import is_view


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A region at one int_key: `module(*inputs) -> tuple of outputs`, in the order of the part's names.  `handed`: outputs of a
    host region that computes nothing -> the inputs that they are."""

    part: Part
    module: GraphModule
    handed: Mapping[str, str]


def links(program: ExportedProgram, parts: Partition, tensors: Sequence[torch.Tensor]) -> tuple[Link, ...]:
    """The regions in order; `tensors` have the sizes of the key's inputs.  Raises inputs-unlike."""
    modules = region_modules(program, parts, tensors)
    on_host = {name for part in parts.regions if part.kind == "host" for name in part.inputs}
    return tuple([_link(part, module, on_host) for part, module in zip(parts.regions, modules, strict=True)])


def run(chain: Sequence[Link], parts: Partition, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every value by name, computed by eager PyTorch on the device of `tensors`."""
    values = dict(zip(parts.inputs, tensors, strict=True))
    with torch.no_grad():
        for link in chain:
            made = link.module(*[values[name] for name in link.part.inputs])
            values.update(zip(link.part.outputs, made, strict=True))
    return values


def landings(parts: Partition) -> tuple[str, ...]:
    """The values that the host makes and a graph, or the caller, takes: they need a place on the GPU."""
    taken = {name for part in parts.regions if part.kind == "graph" for name in part.inputs} | set(parts.outputs)
    return tuple([name for part in parts.regions if part.kind == "host" for name in part.outputs if name in taken])


def _link(part: Part, module: GraphModule, on_host: set[str]) -> Link:
    (output,) = [node for node in module.graph.nodes if node.op == "output"]
    made: list[Node] = list(output.args[0])
    if part.kind == "host" and not part.operations:
        return Link(part=part, module=module, handed={name: node.name for name, node in zip(part.outputs, made, strict=True)})
    for place, name in enumerate(part.outputs):
        if part.kind == "host" or name in on_host or _given(made[place]):
            with module.graph.inserting_before(output):
                made[place] = module.graph.call_function(
                    torch.ops.aten.clone.default, (made[place],), {"memory_format": torch.contiguous_format}
                )
    output.args = (tuple(made),)
    module.recompile()
    return Link(part=part, module=module, handed={})


def _given(node: Node) -> bool:
    """Whether a tensor is an input of the region, or a view of one."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"
