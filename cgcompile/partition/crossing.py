"""The values that cross between regions, and sentences about where an operation runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from .split import Partition, PlannedRegion

CALL = "call"
"""The name of the caller, which provides the inputs and receives the outputs.  Its tensors are on the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """A value that one region computes and another reads.  `source` and `target`: names of regions, or CALL.  `nbytes`: its size at
    the int_key.  `copied`: this crossing copies it between host and device.  A value is copied only once in each direction."""

    value: str
    source: str
    target: str
    nbytes: int
    copied: bool


def crossings(partition: Partition, modules: Sequence[GraphModule]) -> tuple[Crossing, ...]:
    """Returns every value that crosses, ordered by target region.  `modules` are the `region_modules` at the int_key."""
    producer = {name: region for region in partition.regions for name in region.outputs}
    input_names = (*partition.inputs, *partition.state)
    sides = {(name, "graph") for name in input_names} | {(name, region.kind) for name, region in producer.items()}
    bytes_of = _bytes(partition, modules)
    rows = []
    targets = [(region.name, region.kind, region.inputs) for region in partition.regions]
    for target, kind, values in [*targets, (CALL, "graph", tuple(dict.fromkeys(partition.outputs)))]:
        for value in values:
            source = producer[value].name if value in producer else CALL
            if source != target:
                copied = (value, kind) not in sides
                rows.append(Crossing(value=value, source=source, target=target, nbytes=bytes_of[value], copied=copied))
                sides.add((value, kind))
    return tuple(rows)


def _bytes(partition: Partition, modules: Sequence[GraphModule]) -> dict[str, int]:
    """The size in bytes of every value that crosses, from the metadata of the modules' inputs and outputs."""
    sizes: dict[str, int] = {}
    for region, module in zip(partition.regions, modules, strict=True):
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        (output,) = [node for node in module.graph.nodes if node.op == "output"]
        for name, node in [
            *zip(region.inputs, placeholders, strict=True),
            *zip(region.module_outputs, output.args[0], strict=True),
        ]:
            value = node.meta["val"]
            assert isinstance(value, torch.Tensor), name
            sizes[name] = value.numel() * value.element_size()
    return sizes


def effect_of(partition: Partition, node: str) -> str:
    """Returns the effect of a finding about the operation `node` of the program: a text that says where it runs."""
    regions = [region for region in partition.regions if node in region.nodes]
    if not regions:
        return "nothing is computed for it when the program is replayed"
    first = regions[0]
    if first.kind == "graph":
        return f"it is part of {first.name}"
    where = " and ".join(dict.fromkeys(_where(partition, region) for region in regions))
    if not first.operations:
        return f"a value is copied to the host {where}; nothing is computed there"
    rest = [name for name in first.operations if name != node]
    place = first.nodes.index(node)
    before = sum(first.nodes.index(name) < place for name in rest)
    after = len(rest) - before
    others = {
        (True, True): f", the {before} before it and the {after} after it",
        (True, False): f" and the {before} before it",
        (False, True): f" and the {after} after it",
        (False, False): "",
    }[before > 0, after > 0]
    return f"this operation{others} {'run' if others else 'runs'} on the host {where}"


def _where(partition: Partition, region: PlannedRegion) -> str:
    place = partition.regions.index(region)
    before, after = (
        any(other.kind == "graph" for other in side) for side in (partition.regions[:place], partition.regions[place + 1 :])
    )
    if before and after:
        return "between two graphs"
    if before:
        return "after the last graph"
    return "before the first graph" if after else "and nothing is left for a graph"
