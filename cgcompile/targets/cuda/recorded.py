"""The result of both recorders for GPUs: the graphs of a program, with a memory and offset for every address."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cgbundle.format.schema import IntKey, Value, Weight
from cgcompile.bundle.recordings import Recording

from ..memory_layout import Table

RegionKey = tuple[str, IntKey]
"""The name of a region, and an int_key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedGraph:
    """A graph region at one int_key: its recording, its input and output tensors, and the bytes of the arena that it needs."""

    recording: Recording
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    arena: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedProgram:
    """A recorded program.  `images`: cubins by sha256.  `static`: bytes of memory `inputs` by int_key, in the bundle's order.
    `weights`: the program's tensors with their offsets, under the program's names; `tables` follow them in memory.  All sizes in
    bytes include PAD.  `state_bytes` is 0 if no call writes to buffers."""

    graphs: Mapping[RegionKey, RecordedGraph]
    images: Mapping[str, bytes]
    static: Mapping[IntKey, int]
    weights: tuple[Weight, ...]
    tables: tuple[Table, ...]
    weights_bytes: int
    state_bytes: int = 0
