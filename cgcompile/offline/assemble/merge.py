"""Merges a program's lowered regions at one int_key into one program with one list of buffers and one arena plan.  Pure.  A read by
the host between two regions is an event.  Values that the host computes are in memory `inputs`, after the call's tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cgbundle.format.schema import DTYPES, IntKey

from ...bundle.single_region import WHOLE
from ...errors import DEFECT, BuildError
from ..lowered import (
    TEMPORARY,
    WEIGHT,
    Allocate,
    Begin,
    Buffer,
    BufferView,
    Copy,
    End,
    Event,
    Exchange,
    Fill,
    FoldedConstant,
    HostRead,
    KernelVariant,
    Launch,
    Lowered,
    LoweredProgram,
    NextBody,
    Pointer,
    RegionEvents,
    Release,
    SetCondition,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredRegion:
    """A region of a program: the names of its inputs and outputs, and its `Lowered`, or None for a host region."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    lowered: Lowered | None


def whole(traced: Lowered) -> LoweredProgram:
    """Returns a program with a single graph region."""
    region = RegionEvents(name=WHOLE, start=0, stop=len(traced.events), inputs=traced.inputs, outputs=traced.outputs)
    return LoweredProgram(lowered=traced, regions=(region,))


def merge(key: IntKey, regions: Sequence[LoweredRegion], input_names: Sequence[str], outputs: Sequence[str]) -> LoweredProgram:
    """Merges `regions`, in the order in which they run.  `input_names`: the INPUT buffers in order: the call's inputs, then the
    values that the host computes and a graph reads.  `outputs`: the call's outputs.  The outputs of graphs stay allocated to the
    end.  Raises inputs-unlike if a region reads a value in another layout than it was computed in, and place-invalid if the value
    exceeds its buffer."""
    merged = MergedProgram(key=key, input_places={name: place for place, name in enumerate(input_names)})
    for region in regions:
        if region.lowered is None:
            merged.read(region.inputs)
        else:
            merged.add(region, region.lowered)
    return merged.program(outputs)


class MergedProgram:
    """Builds the merged program.  `views`: the regions' outputs by name.  `on_host`: the outputs that the host has read.  `shared`:
    the buffers of weights and inputs by kind and name."""

    def __init__(self, key: IntKey, input_places: Mapping[str, int]) -> None:
        self.key = key
        self.input_places = input_places
        self.buffers: list[Buffer] = []
        self.variants: dict[KernelVariant, int] = {}
        self.events: list[Event] = []
        self.regions: list[RegionEvents] = []
        self.constants: dict[str, FoldedConstant] = {}
        self.views: dict[str, BufferView] = {}
        self.shared: dict[tuple[str, str], int] = {}
        self.on_host: set[str] = set()
        self.written: dict[int, None] = {}

    def read(self, names: Sequence[str]) -> None:
        """Adds events for the values that a host region reads."""
        for name in names:
            if name in self.views and name not in self.on_host:
                self.on_host.add(name)
                self.events.append(HostRead(buffer=self.views[name].pointer.buffer))

    def add(self, region: LoweredRegion, traced: Lowered, targets: Sequence[Pointer] = ()) -> None:
        """Adds a graph region, or a part of one.  `targets`: the addresses for its dense outputs, or () to leave them in the
        region's buffers."""
        start = len(self.events)
        replaced = _output_buffers(traced) if targets else {}
        places = [
            targets[replaced[i]] if i in replaced else self._place(region, traced, buffer)
            for i, buffer in enumerate(traced.buffers)
        ]
        variants = [self.variants.setdefault(variant, len(self.variants)) for variant in traced.variants]
        events = [event for event in traced.events if not (isinstance(event, Allocate | Release) and event.buffer in replaced)]
        self.events += [_merged_event(event, places, variants) for event in events]
        inputs, outputs = [[_merged_view(tensor, places) for tensor in tensors] for tensors in (traced.inputs, traced.outputs)]
        for number, target in enumerate(targets):
            if outputs[number].pointer != target:
                self.events.append(Copy(source=outputs[number].pointer, target=target, nbytes=dense_bytes(outputs[number])))
                outputs[number] = replace(outputs[number], pointer=target)
        self.regions.append(
            RegionEvents(name=region.name, start=start, stop=len(self.events), inputs=tuple(inputs), outputs=tuple(outputs))
        )
        self.views.update(zip(region.outputs, outputs, strict=True))
        for constant in traced.constants:
            earlier = self.constants.get(constant.name, constant)
            sources = tuple(sorted({*earlier.sources, *constant.sources}))
            self.constants[constant.name] = replace(constant, sources=sources)
        written = [places[index].buffer for index in traced.written]
        self.written |= dict.fromkeys([index for index in written if self.buffers[index].kind != TEMPORARY])

    def temporary(self, nbytes: int, at: int | None = None) -> Pointer:
        """Returns a new buffer, allocated before event number `at`, or after all events."""
        pointer = self._new(Buffer(kind=TEMPORARY, name=f"own{len(self.buffers)}", nbytes=nbytes))
        self.events.insert(len(self.events) if at is None else at, Allocate(buffer=pointer.buffer))
        return pointer

    def argument_pointer(self, kind: str, name: str, nbytes: int) -> Pointer:
        """Returns the buffer of a weight, or of an input, whose name is its number."""
        return self._shared(Buffer(kind=kind, name=name, nbytes=nbytes))

    def program(self, outputs: Sequence[str]) -> LoweredProgram:
        traced = self.joined((), [self.views[name] for name in outputs if name in self.views])
        return LoweredProgram(lowered=traced, regions=tuple(self.regions))

    def joined(self, inputs: Sequence[BufferView], outputs: Sequence[BufferView]) -> Lowered:
        """Returns the merged program as one `Lowered` with these inputs and outputs."""
        return Lowered(
            key=self.key,
            buffers=tuple(self.buffers),
            variants=tuple(self.variants),
            events=tuple(self.events),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            constants=tuple(self.constants.values()),
            written=tuple(self.written),
        )

    def _place(self, region: LoweredRegion, traced: Lowered, buffer: Buffer) -> Pointer:
        """Returns where a region's buffer begins in the merged program."""
        if buffer.kind == TEMPORARY:
            return self._new(replace(buffer, name=f"{region.name}.{buffer.name}"))
        if buffer.kind == WEIGHT:
            return self._shared(buffer)
        name, tensor = region.inputs[int(buffer.name)], traced.inputs[int(buffer.name)]
        if name in self.input_places:
            return self._shared(replace(buffer, name=str(self.input_places[name])))
        view, where = self.views[name], f"int_key {self.key}, {region.name}"
        if _layout(view) != _layout(tensor):
            what = f"{where}: {name} is read with layout {_layout(tensor)}, but was computed with layout {_layout(view)}"
            raise BuildError("inputs-unlike", what, DEFECT)
        if view.pointer.offset + buffer.nbytes > self.buffers[view.pointer.buffer].nbytes:
            text = f"{where}: {name}, {buffer.nbytes} bytes, exceeds the buffer that contains it"
            raise BuildError("place-invalid", text)
        return view.pointer

    def _new(self, buffer: Buffer) -> Pointer:
        self.buffers.append(buffer)
        return Pointer(buffer=len(self.buffers) - 1, offset=0)

    def _shared(self, buffer: Buffer) -> Pointer:
        index = self.shared.get((buffer.kind, buffer.name))
        if index is None:
            index = self.shared[buffer.kind, buffer.name] = self._new(buffer).buffer
        elif self.buffers[index].nbytes < buffer.nbytes:
            self.buffers[index] = buffer
        return Pointer(buffer=index, offset=0)


def dense_bytes(tensor: BufferView) -> int:
    return DTYPES[tensor.dtype] * math.prod(tensor.shape)


def _output_buffers(traced: Lowered) -> dict[int, int]:
    """Maps buffers that contain one output and nothing else to the output's number."""
    output_numbers: dict[int, int] = {}
    output_buffers = [output.pointer.buffer for output in traced.outputs]
    for number, output in enumerate(traced.outputs):
        buffer = traced.buffers[output.pointer.buffer]
        fills_buffer = buffer.kind == TEMPORARY and not output.pointer.offset and buffer.nbytes == dense_bytes(output)
        if fills_buffer and output_buffers.count(output.pointer.buffer) == 1:
            output_numbers[output.pointer.buffer] = number
    return output_numbers


def _layout(tensor: BufferView) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The dtype, and (size, stride) of every axis; strides of axes with one element are 0."""
    axes = zip(tensor.shape, tensor.strides, strict=True)
    return tensor.dtype, tuple([(size, stride if size > 1 else 0) for size, stride in axes])


def _merged_view(tensor: BufferView, places: Sequence[Pointer]) -> BufferView:
    return replace(tensor, pointer=_merged_pointer(tensor.pointer, places))


def _merged_pointer(pointer: Pointer, places: Sequence[Pointer]) -> Pointer:
    begin = places[pointer.buffer]
    return Pointer(buffer=begin.buffer, offset=begin.offset + pointer.offset)


def _merged_event(event: Event, places: Sequence[Pointer], variants: Sequence[int]) -> Event:
    """Returns a region's event with the buffers (at `places`) and variants of the merged program."""
    match event:
        case Launch():
            arguments = tuple(
                [_merged_pointer(argument, places) if isinstance(argument, Pointer) else argument for argument in event.arguments]
            )
            return replace(event, variant=variants[event.variant], arguments=arguments)
        case Copy() | Exchange():
            return replace(event, source=_merged_pointer(event.source, places), target=_merged_pointer(event.target, places))
        case Fill():
            return replace(event, target=_merged_pointer(event.target, places))
        case SetCondition():
            return replace(event, byte=_merged_pointer(event.byte, places))
        case Begin() | NextBody() | End():
            return event
        case _:  # an event of a temporary, whose offset is 0
            return replace(event, buffer=places[event.buffer].buffer)
