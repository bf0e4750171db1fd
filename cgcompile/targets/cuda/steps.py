"""Converts a program of several regions to rows of the manifest: values, and steps that run regions and copy values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cgbundle.format.schema import IntKey, Program, Step, Value
from cgbundle.format.shapes import span

from ...partition.split import Partition, PlannedRegion
from ..memory_layout import align


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredRegions:
    """The lowered regions of one int_key, by name.  `outputs`: their output values.  `files`: the tables of graph regions.
    `regions`: positions in the manifest.  `inputs`: the inputs of the call.  `uploads`: the device memory of values that the host
    computes.  `state`: the device memory of the buffers of `Partition.state`.  `passed_through`: as in RegionModule."""

    outputs: Mapping[str, tuple[Value, ...]]
    files: Mapping[str, str]
    inputs: tuple[Value, ...]
    uploads: Mapping[str, Value]
    state: Mapping[str, Value]
    passed_through: Mapping[str, str]
    regions: Mapping[str, int]


@dataclass(slots=True)
class _Steps:
    """The values and steps so far.  `device`, `host`: positions in `values` by name, for each side.  `end`: the end of memory
    host."""

    values: list[Value]
    steps: list[Step]
    device: dict[str, int]
    host: dict[str, int]
    end: int

    def add(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def add_host(self, value: Value) -> int:
        placed = replace(value, memory="host", offset=self.end)
        self.end = align(self.end + span(placed))
        return self.add(placed)

    def copy(self, source: int, target: int) -> None:
        self.steps.append(Step(kind="copy", region=0, file="", inputs=(source,), outputs=(target,)))


def program_row(key: IntKey, partition: Partition, lowered: LoweredRegions, arena: int, static: int) -> tuple[Program, int]:
    """Returns the program of one int_key, and its bytes of memory host.  A value is copied between host and device once, before the
    first region that reads it there.  Outputs that the host computes are copied to the device at the end.  New values of state and
    of the call's inputs that the host computes are copied to the device immediately."""
    rows = _Steps(values=[], steps=[], device={}, host={}, end=0)
    for name, value in zip(partition.inputs, lowered.inputs, strict=True):
        rows.device[name] = rows.add(value)
    rows.device |= {name: rows.add(value) for name, value in lowered.state.items()}
    inputs = tuple(range(len(partition.inputs)))
    for region in partition.regions:
        if region.kind == "graph":
            _graph(rows, region, lowered)
        else:
            _host(rows, region, lowered)
    outputs = tuple([_on_device(rows, name, lowered) for name in partition.outputs])
    program = Program(
        key=key, values=tuple(rows.values), inputs=inputs, outputs=outputs, steps=tuple(rows.steps), arena=arena, static=static
    )
    return program, rows.end


def _graph(rows: _Steps, region: PlannedRegion, lowered: LoweredRegions) -> None:
    reads = tuple([_on_device(rows, name, lowered) for name in region.inputs])
    writes = tuple([rows.add(value) for value in lowered.outputs[region.name]])
    rows.device.update(zip(region.outputs, writes, strict=True))
    number, file = lowered.regions[region.name], lowered.files[region.name]
    rows.steps.append(Step(kind="graph", region=number, file=file, inputs=reads, outputs=writes))


def _host(rows: _Steps, region: PlannedRegion, lowered: LoweredRegions) -> None:
    for name in region.inputs:
        if name not in rows.host:
            source = rows.device[name]
            rows.host[name] = rows.add_host(rows.values[source])
            rows.copy(source, rows.host[name])
    if not region.operations:
        rows.host.update({name: rows.host[lowered.passed_through[name]] for name in region.outputs})
        return
    writes = [rows.add_host(value) for value in lowered.outputs[region.name]]
    # the written values have the layout of the tensors on the device, to which they are copied
    written = [rows.add_host(rows.values[rows.device[name]]) for name in region.written]
    reads = tuple([rows.host[name] for name in region.inputs])
    rows.host.update(zip(region.outputs, writes, strict=True))
    rows.steps.append(Step(kind="host", region=lowered.regions[region.name], file="", inputs=reads, outputs=(*writes, *written)))
    for name, value in zip(region.written, written, strict=True):
        rows.copy(value, rows.add(rows.values[rows.device[name]]))


def _on_device(rows: _Steps, name: str, lowered: LoweredRegions) -> int:
    if name not in rows.device:
        rows.device[name] = rows.add(lowered.uploads[name])
        rows.copy(rows.host[name], rows.device[name])
    return rows.device[name]
