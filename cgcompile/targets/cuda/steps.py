"""A program of several regions as rows of the manifest: values, and the steps that bring them from one place to the next.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cgbundle.format.schema import IntKey, Program, Step, Value
from cgbundle.format.spans import span

from ...partition import Part, Partition
from .memory_layout import align


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowered:
    """What the recorders made of a key: (inputs, outputs) of each graph region by name, the files of their tables, where the call's
    inputs lie, where on the GPU what the host made is put, and the position of each region in the manifest."""

    graphs: Mapping[str, tuple[tuple[Value, ...], tuple[Value, ...]]]
    files: Mapping[str, str]
    given: tuple[Value, ...]
    landing: Mapping[str, Value]
    hosts: Mapping[str, tuple[Value, ...]]
    handed: Mapping[str, str]
    regions: Mapping[str, int]


@dataclass(slots=True)
class _Rows:
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


def program(key: IntKey, parts: Partition, lowered: Lowered, arena: int, static: int) -> tuple[Program, int]:
    """The program of one int_key, and the bytes that it needs of memory host.

    A value is copied to the other side when a region there first reads it, and once; what the host made and the call returns is
    copied in the end.
    """
    rows = _Rows(values=[], steps=[], device={}, host={}, end=0)
    for name, value in zip(parts.inputs, lowered.given, strict=True):
        rows.device[name] = rows.add(value)
    inputs = tuple(range(len(parts.inputs)))
    for part in parts.regions:
        if part.kind == "graph":
            _graph(rows, part, lowered)
        else:
            _host(rows, part, lowered)
    outputs = tuple([_on_device(rows, name, lowered) for name in parts.outputs])
    made = Program(
        key=key, values=tuple(rows.values), inputs=inputs, outputs=outputs, steps=tuple(rows.steps), arena=arena, static=static
    )
    return made, rows.end


def _graph(rows: _Rows, part: Part, lowered: Lowered) -> None:
    given = tuple([_on_device(rows, name, lowered) for name in part.inputs])
    made = tuple([rows.add(value) for value in lowered.graphs[part.name][1]])
    rows.device.update(zip(part.outputs, made, strict=True))
    region, file = lowered.regions[part.name], lowered.files[part.name]
    rows.steps.append(Step(kind="graph", region=region, file=file, inputs=given, outputs=made))


def _host(rows: _Rows, part: Part, lowered: Lowered) -> None:
    for name in part.inputs:
        if name not in rows.host:
            source = rows.device[name]
            rows.host[name] = rows.add_host(rows.values[source])
            rows.copy(source, rows.host[name])
    if not part.operations:
        rows.host.update({name: rows.host[lowered.handed[name]] for name in part.outputs})
        return
    made = tuple([rows.add_host(value) for value in lowered.hosts[part.name]])
    given = tuple([rows.host[name] for name in part.inputs])
    rows.host.update(zip(part.outputs, made, strict=True))
    rows.steps.append(Step(kind="host", region=lowered.regions[part.name], file="", inputs=given, outputs=made))


def _on_device(rows: _Rows, name: str, lowered: Lowered) -> int:
    if name not in rows.device:
        rows.device[name] = rows.add(lowered.landing[name])
        rows.copy(rows.host[name], rows.device[name])
    return rows.device[name]
