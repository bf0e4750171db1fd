"""What tracing one int_key gives: the launches of a lowered program in order, every argument typed, and the buffers between them.

Values only: `lowering` makes them, `compiling` turns variants into kernel images, `planning` places buffers in the arena, and
`assembling` makes the rows of a bundle of all three.  Imports neither torch nor Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

from cgbundle.format.schema import IntKey

WEIGHT, INPUT, TEMPORARY = "weight", "input", "temporary"
"""Kinds of buffers: a tensor of the program under its name there, input number `name` of the call, and what the program makes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One configuration of one Triton kernel: what Triton needs to compile it, and the interpreter to run it.

    `source`: Python that defines the function `name` and nothing else, decorators left out; it may use `triton`, `tl`,
    `triton_helpers`, `libdevice`, `tl_math`, `tl_extra`.  `signature`: (argument, type) in the function's order, types as Triton
    writes them ("*bf16", "i32", "fp32", "constexpr").  `constants`: (argument, value) of every constexpr.  `divisible`: arguments
    that are multiples of 16 (addresses aligned to 16 bytes).  `options`: further options of `triton.compile`, e.g. ("num_ctas", 1).
    `chosen` says how this configuration was found: "only" (there was no other), "table", "nearest", "heuristic", "measured".
    """

    name: str
    source: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int | float | bool | str | None], ...]
    divisible: tuple[str, ...]
    warps: int
    stages: int
    options: tuple[tuple[str, int | float | bool | str], ...]
    chosen: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """Memory that launches refer to.  `nbytes` from its first byte to its last; `name` as its kind says."""

    kind: str
    name: str
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A byte of a buffer: its position in `Traced.buffers`, and bytes into it."""

    buffer: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocate:
    """From here on the buffer holds values, at first undefined ones."""

    buffer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """From here on nothing reads the buffer."""

    buffer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A launch of `Traced.variants[variant]`: the values of its arguments that are no constexpr, in the order of the signature."""

    variant: int
    grid: tuple[int, int, int]
    arguments: tuple[Place | int | float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """`nbytes` bytes from one place to another, which do not overlap."""

    source: Place
    target: Place
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """`count` elements of `element` bytes (1, 2, 4) set to the low bytes of `value`."""

    target: Place
    value: int
    element: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """Between two regions: the host reads the buffer here."""

    buffer: int


Event = Allocate | Release | Launch | Copy | Fill | Read


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor of the call: strides in elements."""

    place: Place
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """A weight that the program does not have: its bytes in the order of memory, under a name that follows from them."""

    name: str
    contents: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """A program lowered at one int_key.  `inputs` and `outputs` are the call's tensors; outputs live to the end.  `constants` are
    the weights among `buffers` that were computed when it was lowered."""

    key: IntKey
    buffers: tuple[Buffer, ...]
    variants: tuple[Variant, ...]
    events: tuple[Event, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    constants: tuple[Constant, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionEvents:
    """A graph region of a traced program: `Traced.events[start:stop]`; `inputs` and `outputs` are the tensors that cross."""

    name: str
    start: int
    stop: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedProgram:
    """The graph regions of a program at one int_key, in order, over the buffers of `traced`."""

    traced: Traced
    regions: tuple[RegionEvents, ...]
