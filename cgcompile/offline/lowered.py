"""The result of lowering one int_key: the launches in order with typed arguments, and the buffers that they use.  `compile` makes
images of the variants, `assemble` the arena plan and the recordings.  Imports neither torch nor Triton."""

from __future__ import annotations

from dataclasses import dataclass

from cgbundle.format.schema import IntKey

WEIGHT, INPUT, TEMPORARY = "weight", "input", "temporary"
"""Kinds of buffers: the weight or state tensor `name`, input number `name` of the call, memory that the program allocates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelVariant:
    """One configuration of one Triton kernel, as Triton needs it to compile and the interpreter to run it.

    `source`: Python that defines the function `name`, without decorators, and its helpers.  It may use `triton`, `tl`,
    `triton_helpers`, `libdevice`, `tl_math`, `tl_extra`.  `signature`: (argument, type) in the function's order, in Triton's types
    ("*bf16", "i32", "fp32", "constexpr").  `constants`: (argument, value) of every constexpr.  `divisible`: arguments that are
    multiples of 16.  `options`: further options of `triton.compile`, such as ("num_ctas", 1).  `selected_by`: see
    `tuning.cost_model.choose`.  `begins_next`: the kernel lets the next one begin early (compile/programmatic_launch.py).
    """

    name: str
    source: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int | float | bool | str | None], ...]
    divisible: tuple[str, ...]
    warps: int
    stages: int
    options: tuple[tuple[str, int | float | bool | str], ...]
    selected_by: str
    begins_next: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """Memory that launches refer to."""

    kind: str
    name: str
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pointer:
    """An address in a buffer: the position in `Lowered.buffers`, and the offset in bytes."""

    buffer: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocate:
    """The buffer is in use from here on.  Its contents are undefined at first."""

    buffer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """Nothing reads the buffer from here on."""

    buffer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A launch of `Lowered.variants[variant]`.  `arguments`: without constexprs, in the order of the signature."""

    variant: int
    grid: tuple[int, int, int]
    arguments: tuple[Pointer | int | float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Copies `nbytes` bytes.  Source and target do not overlap."""

    source: Pointer
    target: Pointer
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """Sets `count` elements, of `element` bytes each (1, 2 or 4), to the low bytes of `value`."""

    target: Pointer
    value: int
    element: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRead:
    """The host reads the buffer here, between two regions."""

    buffer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SetCondition:
    """Sets the condition of the region's branch or loop number `conditional` to the value of `byte`; 0 is false.  A switch runs the
    body with this number."""

    conditional: int
    byte: Pointer


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """A collective over `nbytes` dense bytes of a dtype at `source`; the received data goes to `target`.  `kind`: one of
    `exchange_nodes.KINDS`.  `sender`: the only rank that sends, or -1."""

    kind: str
    dtype: str
    nbytes: int
    sender: int
    source: Pointer
    target: Pointer


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """Begins the first body of a branch ("if", "switch") or the body of a loop ("while"), numbered by `conditional`."""

    conditional: int
    type: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NextBody:
    """Begins the next body of a branch: the false body, or the body of a switch for the next number."""

    conditional: int


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Ends the last body of the branch or loop."""

    conditional: int


Event = Allocate | Release | Launch | Copy | Fill | HostRead | SetCondition | Exchange | Begin | NextBody | End


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferView:
    """A tensor in a buffer; strides in elements."""

    pointer: Pointer
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldedConstant:
    """A weight that was computed when the program was lowered.  `name` is derived from the contents.  `sources`: the names of the
    weights that it was computed from."""

    name: str
    contents: bytes
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowered:
    """A program, or a region of one, lowered at one int_key.  Its outputs stay allocated to the end.  `written`: the positions of
    the buffers with state or inputs of the call that the program changes."""

    key: IntKey
    buffers: tuple[Buffer, ...]
    variants: tuple[KernelVariant, ...]
    events: tuple[Event, ...]
    inputs: tuple[BufferView, ...]
    outputs: tuple[BufferView, ...]
    constants: tuple[FoldedConstant, ...] = ()
    written: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionEvents:
    """A graph region of a lowered program.  Its events are `Lowered.events[start:stop]`."""

    name: str
    start: int
    stop: int
    inputs: tuple[BufferView, ...]
    outputs: tuple[BufferView, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredProgram:
    """A program at one int_key and its graph regions in order, which share the buffers."""

    lowered: Lowered
    regions: tuple[RegionEvents, ...]
