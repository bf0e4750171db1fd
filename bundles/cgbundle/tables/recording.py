"""The rows of a recording: one graph region at one int_key, as both recorders produce it.

Executors read the table of columns (`table.py`) without making rows: loading a bundle does not import this module.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..format.schema import IntKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """A place: position of a memory in MEMORIES, and bytes into it."""

    memory: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Relocation:
    """The 8 bytes at `at` of a parameter block hold the address of `target`."""

    at: int
    target: Address


@dataclass(frozen=True, kw_only=True, slots=True)
class Handle:
    """The 8 bytes at `at` of a parameter block hold the handle of the recording's conditional node number `conditional`, counted
    among its conditional nodes.  The driver gives it out when a graph is built, and it belongs to that graph."""

    at: int
    conditional: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A kernel of an image: identified by the image's sha256 and the symbol, never by name alone.

    `params` is (offset, size) of each parameter, as the driver reports them; `attributes` are CUfunction_attribute numbers and
    values to set before use (dynamic shared memory, carve-out, non-portable cluster size).
    """

    image: str
    symbol: str
    params: tuple[tuple[int, int], ...]
    attributes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelNode:
    """A launch.  `block` is the whole parameter block, its undefined bytes and relocated words zeroed.  `undefined` lists
    (offset, size) of bytes that no kernel reads; `attributes` are CUlaunchAttributeID numbers with up to three values.

    One with `handles` is a launch of SET_CONDITION: see there.
    """

    function: int
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared: int
    block: bytes
    relocations: tuple[Relocation, ...]
    undefined: tuple[tuple[int, int], ...]
    attributes: tuple[tuple[int, tuple[int, int, int]], ...]
    handles: tuple[Handle, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MemsetNode:
    """`width` elements of `element` bytes, `height` rows `pitch` bytes apart, set to `value`."""

    target: Address
    value: int
    element: int
    width: int
    height: int
    pitch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemcpyNode:
    """`width` bytes x `height` rows x `depth` slices, device to device; pitches in bytes, heights in rows."""

    source: Address
    target: Address
    width: int
    height: int
    depth: int
    source_pitch: int
    source_height: int
    target_pitch: int
    target_height: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EmptyNode:
    """A node that only orders others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionalNode:
    """A branch or a loop of the device's own.  `type` "if": the first of the `bodies` runs where the condition is true, else the
    second, if there is one.  "while": the only body runs as long as the condition is true, which is asked before each turn.
    "switch": the body of that number runs, counted from 0; where there is none, nothing does.
    `bodies` are positions in `Recording.bodies`.  Launches of SET_CONDITION, here and in the loop's body, set the condition."""

    type: str
    bodies: tuple[int, ...]


Node = KernelNode | MemsetNode | MemcpyNode | EmptyNode | ConditionalNode

TYPES = ("if", "while", "switch")
"""Types of conditional nodes, as column `conditional_type` numbers them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """Node `source` before node `target`, with the driver's edge data (programmatic dependent launch lives there)."""

    source: int
    target: int
    from_port: int
    to_port: int
    type: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """A graph region at one int_key.

    `bodies` are the positions in `nodes` of the first node of each body of a conditional node: a body's nodes end where the next
    one's begin, and those before the first body are the graph's own.  An edge joins nodes of one graph or body.
    """

    key: IntKey
    functions: tuple[Function, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    bodies: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleState:
    """A data symbol of an image whose contents had changed when it was recorded: written back after the module is loaded."""

    image: str
    symbol: str
    contents: bytes
    relocations: tuple[Relocation, ...]
