"""The traced regions of a program at one int_key -> one program over one set of buffers, which one plan places.  Pure.  What the
host reads between two regions is an event of its own; what it makes lies in memory `inputs`, behind the call's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cgbundle.format.schema import IntKey

from ...errors import BuildError
from ...targets.rows import WHOLE
from ..lowered import (
    TEMPORARY,
    WEIGHT,
    Buffer,
    BufferView,
    Copy,
    Event,
    Fill,
    FoldedConstant,
    HostRead,
    KernelVariant,
    Launch,
    Lowered,
    LoweredProgram,
    Pointer,
    RegionEvents,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredRegion:
    """A region of a program: the names of the values that it takes and makes, and what tracing gave; None for one of the host."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    lowered: Lowered | None


def whole(traced: Lowered) -> LoweredProgram:
    """A program that is one graph."""
    region = RegionEvents(name=WHOLE, start=0, stop=len(traced.events), inputs=traced.inputs, outputs=traced.outputs)
    return LoweredProgram(lowered=traced, regions=(region,))


def merge(key: IntKey, regions: Sequence[LoweredRegion], given: Sequence[str], outputs: Sequence[str]) -> LoweredProgram:
    """`regions`, in the order in which they run, as one program.  `given`: the values of INPUT buffers, in order: the call's, and
    behind them those that the host makes and a graph takes.  `outputs`: the call's; those that a graph makes live to the end.
    Raises sizes-unlike and place-invalid when a region takes a value otherwise than an earlier one made it."""
    growing = _MergedProgram(key=key, given={name: place for place, name in enumerate(given)})
    for region in regions:
        if region.lowered is None:
            growing.read(region.inputs)
        else:
            growing.add(region, region.lowered)
    return growing.program(outputs)


class _MergedProgram:
    """The merged program as it grows.  `made`: the values of the regions so far; `on_host`: those that the host has a copy of.
    `shared`: weights and inputs by kind and name, which several regions may take."""

    def __init__(self, key: IntKey, given: Mapping[str, int]) -> None:
        self.key = key
        self.given = given
        self.buffers: list[Buffer] = []
        self.variants: dict[KernelVariant, int] = {}
        self.events: list[Event] = []
        self.regions: list[RegionEvents] = []
        self.constants: dict[str, FoldedConstant] = {}
        self.made: dict[str, BufferView] = {}
        self.shared: dict[tuple[str, str], int] = {}
        self.on_host: set[str] = set()
        self.written: dict[int, None] = {}

    def read(self, names: Sequence[str]) -> None:
        """A host region takes these values."""
        for name in names:
            if name in self.made and name not in self.on_host:
                self.on_host.add(name)
                self.events.append(HostRead(buffer=self.made[name].pointer.buffer))

    def add(self, region: LoweredRegion, traced: Lowered) -> None:
        """A graph region."""
        start = len(self.events)
        places = [self._place(region, traced, buffer) for buffer in traced.buffers]
        variants = [self.variants.setdefault(variant, len(self.variants)) for variant in traced.variants]
        self.events += [_moved(event, places, variants) for event in traced.events]
        inputs, outputs = [[_tensor(tensor, places) for tensor in tensors] for tensors in (traced.inputs, traced.outputs)]
        self.regions.append(
            RegionEvents(name=region.name, start=start, stop=len(self.events), inputs=tuple(inputs), outputs=tuple(outputs))
        )
        self.made.update(zip(region.outputs, outputs, strict=True))
        self.constants.update({constant.name: constant for constant in traced.constants})
        self.written |= dict.fromkeys([places[index].buffer for index in traced.written])

    def program(self, outputs: Sequence[str]) -> LoweredProgram:
        """All of it; `outputs` of the call."""
        traced = Lowered(
            key=self.key,
            buffers=tuple(self.buffers),
            variants=tuple(self.variants),
            events=tuple(self.events),
            inputs=(),
            outputs=tuple([self.made[name] for name in outputs if name in self.made]),
            constants=tuple(self.constants.values()),
            written=tuple(self.written),
        )
        return LoweredProgram(lowered=traced, regions=tuple(self.regions))

    def _place(self, region: LoweredRegion, traced: Lowered, buffer: Buffer) -> Pointer:
        """Where a buffer of a region begins among all buffers."""
        if buffer.kind == TEMPORARY:
            return self._new(replace(buffer, name=f"{region.name}.{buffer.name}"))
        if buffer.kind == WEIGHT:
            return self._shared(buffer)
        name, tensor = region.inputs[int(buffer.name)], traced.inputs[int(buffer.name)]
        if name in self.given:
            return self._shared(replace(buffer, name=str(self.given[name])))
        made, where = self.made[name], f"int_key {self.key}, {region.name}"
        if _layout(made) != _layout(tensor):
            raise BuildError("sizes-unlike", f"{where}: {name} is taken as {_layout(tensor)}, and was made as {_layout(made)}")
        if made.pointer.offset + buffer.nbytes > self.buffers[made.pointer.buffer].nbytes:
            raise BuildError(
                "place-invalid", f"{where}: {name}, {buffer.nbytes} bytes, does not lie inside the buffer that it was made in"
            )
        return made.pointer

    def _new(self, buffer: Buffer) -> Pointer:
        self.buffers.append(buffer)
        return Pointer(buffer=len(self.buffers) - 1, offset=0)

    def _shared(self, buffer: Buffer) -> Pointer:
        known = self.shared.get((buffer.kind, buffer.name))
        if known is None:
            known = self.shared[buffer.kind, buffer.name] = self._new(buffer).buffer
        elif self.buffers[known].nbytes < buffer.nbytes:
            self.buffers[known] = buffer
        return Pointer(buffer=known, offset=0)


def _layout(tensor: BufferView) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The dtype, and (size, stride) of every axis that has more than one element."""
    axes = zip(tensor.shape, tensor.strides, strict=True)
    return tensor.dtype, tuple([(size, stride if size > 1 else 0) for size, stride in axes])


def _tensor(tensor: BufferView, places: Sequence[Pointer]) -> BufferView:
    return replace(tensor, pointer=_at(tensor.pointer, places))


def _at(place: Pointer, places: Sequence[Pointer]) -> Pointer:
    begin = places[place.buffer]
    return Pointer(buffer=begin.buffer, offset=begin.offset + place.offset)


def _moved(event: Event, places: Sequence[Pointer], variants: Sequence[int]) -> Event:
    """An event of a region, over all buffers and variants."""
    match event:
        case Launch():
            arguments = tuple([_at(each, places) if isinstance(each, Pointer) else each for each in event.arguments])
            return replace(event, variant=variants[event.variant], arguments=arguments)
        case Copy():
            return replace(event, source=_at(event.source, places), target=_at(event.target, places))
        case Fill():
            return replace(event, target=_at(event.target, places))
        case _:  # of a temporary, which begins where its buffer does
            return replace(event, buffer=places[event.buffer].buffer)
