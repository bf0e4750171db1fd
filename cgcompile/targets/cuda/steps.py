"""A program of several regions as rows of the manifest: values, and the steps that bring them from one place to the next.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cgbundle.format.schema import IntKey, Program, Step, Value
from cgbundle.format.spans import span

from ...partition.split import Partition, PlannedRegion
from ..memory_layout import align


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredRegions:
    """The regions of one int_key as they were lowered, by name.  `outputs`: what each makes; `files`: the tables of graph regions;
    `regions`: positions in the manifest.  `inputs`: the call's.  `uploads`: where on the GPU a value that the host makes is put.
    `state`: where the buffers of `Partition.state` lie there.  `passed_through`: as in RegionModule."""

    outputs: Mapping[str, tuple[Value, ...]]
    files: Mapping[str, str]
    inputs: tuple[Value, ...]
    uploads: Mapping[str, Value]
    state: Mapping[str, Value]
    passed_through: Mapping[str, str]
    regions: Mapping[str, int]


@dataclass(slots=True)
class _Steps:
    """Values and steps, growing; `device` and `host` say which value is a name's on either side, `end` where memory host ends."""

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
    """The program of one int_key, and the bytes that it needs of memory host.  A value is copied to the other side once, when a
    region there first reads it.  What the host made and the call returns is copied in the end; what it leaves in state and in the
    call's inputs goes back as soon as it is made."""
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
    left = [rows.add_host(rows.values[rows.device[name]]) for name in region.written]  # laid out as where it goes
    reads = tuple([rows.host[name] for name in region.inputs])
    rows.host.update(zip(region.outputs, writes, strict=True))
    rows.steps.append(Step(kind="host", region=lowered.regions[region.name], file="", inputs=reads, outputs=(*writes, *left)))
    for name, value in zip(region.written, left, strict=True):
        rows.copy(value, rows.add(rows.values[rows.device[name]]))


def _on_device(rows: _Steps, name: str, lowered: LoweredRegions) -> int:
    if name not in rows.device:
        rows.device[name] = rows.add(lowered.uploads[name])
        rows.copy(rows.host[name], rows.device[name])
    return rows.device[name]
