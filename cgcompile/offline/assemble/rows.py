"""Builds recordings from a lowered program, its kernel images and its arena plan.  Pure.  The nodes run one after the other, in the
order of Inductor's wrapper, also inside the bodies of branches and loops."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cgbundle.format.schema import MEMORIES, Value
from cgbundle.validate.module_state import Address, Relocation
from cgbundle.validate.recordings import EDGE_PROGRAMMATIC, KERNEL_PORT_PROGRAMMATIC
from cgcompile.bundle.recordings import Edge, Function, KernelNode, MemcpyNode, MemsetNode, Node, Recording

from ...errors import BuildError
from ...targets.collectives.exchange_nodes import ExchangeKernels, exchange_node, transfer
from ...targets.cuda.bodies import Bodies
from ...targets.cuda.recorded import RecordedGraph
from ...targets.kernels.conditions import set_condition
from ..compile.kernels import CompiledKernel
from ..lowered import (
    INPUT,
    TEMPORARY,
    WEIGHT,
    Begin,
    BufferView,
    Copy,
    End,
    Exchange,
    Fill,
    Launch,
    Lowered,
    LoweredProgram,
    NextBody,
    Pointer,
    RegionEvents,
    SetCondition,
)
from .arena import Plan
from .parameter_block import pack_arguments

MAX_DYNAMIC_SHARED, NON_PORTABLE_CLUSTER = 8, 14
"""CUfunction_attribute for dynamic shared memory over DEFAULT_SHARED bytes, and for clusters over PORTABLE_CLUSTER blocks."""

DEFAULT_SHARED = 48 << 10
PORTABLE_CLUSTER = 8

COOPERATIVE, CLUSTER_DIMENSION, CLUSTER_SCHEDULING = 2, 4, 5
SPREAD = 1
"""Values of CUlaunchAttributeID.  SPREAD: the cluster scheduling policy that triton's launcher sets for clusters."""

LARGEST_ROW = 1 << 30

DIVISOR = 16
"""Arguments in `KernelVariant.divisible` are multiples of this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Addresses:
    """The address of each buffer of a lowered program."""

    lowered: Lowered
    bases: tuple[Address | None, ...]

    def address(self, place: Pointer, nbytes: int, where: str) -> Address:
        """Returns the address of `nbytes` bytes.  Raises place-invalid if they are not inside the buffer."""
        buffer, base = self.lowered.buffers[place.buffer], self.bases[place.buffer]
        if base is None:
            text = f"buffer {place.buffer} ({buffer.kind} {buffer.name}) has no place in any memory"
            raise BuildError("place-invalid", f"{where}: {text}")
        if place.offset < 0 or place.offset + nbytes > buffer.nbytes:
            text = f"{nbytes} bytes at {place.offset} of buffer {place.buffer} ({buffer.name}), which has {buffer.nbytes}"
            raise BuildError("place-invalid", f"{where}: {text}")
        return Address(memory=base.memory, offset=base.offset + place.offset)


def assemble(
    program: LoweredProgram,
    compiled: Sequence[CompiledKernel],
    plan: Plan,
    weights: Mapping[str, Address],
    inputs: Sequence[int],
    written: Collection[int] = (),
    conditions: Function | None = None,
    exchanges: ExchangeKernels | None = None,
) -> tuple[RecordedGraph, ...]:
    """Builds one graph per region at an int_key, without empty launches, copies and fills.  `compiled`: the kernel of each variant.
    `weights`: the addresses of WEIGHT buffers by name.  `inputs`: the offsets of INPUT buffers in memory inputs, by number.
    `written`: the numbers of the inputs that calls may change.  `conditions`: the kernel that sets conditions, if there is a branch
    or loop.  `exchanges`: the kernels of collectives, for a model over several devices.

    Raises parameter-mismatch, and place-invalid for a buffer without an address, for bytes outside their buffer, and for a weight
    or input that must not change.
    """
    lowered = program.lowered
    addresses = _Addresses(lowered=lowered, bases=tuple(_bases(lowered, plan, weights, inputs)))
    _check_written(addresses, written)
    return tuple([_assemble(region, compiled, addresses, conditions, exchanges, plan.arena) for region in program.regions])


def _assemble(
    region: RegionEvents, compiled: Sequence[CompiledKernel], addresses: _Addresses, conditions: Function | None,
    exchanges: ExchangeKernels | None, arena: int,
) -> RecordedGraph:  # fmt: skip
    lowered = addresses.lowered
    functions: dict[Function, int] = {}
    begin_next: set[int] = set()
    graph = Bodies()
    for moment, event in enumerate(lowered.events[region.start : region.stop], region.start):
        location = f"int_key {lowered.key}, event {moment}"
        match event:
            case Launch() if all(event.grid):
                function = functions.setdefault(_function(compiled[event.variant]), len(functions))
                if lowered.variants[event.variant].begins_next:
                    begin_next.add(function)
                graph.add([_kernel(event, function, compiled[event.variant], addresses, location)])
            case Copy() if event.nbytes:
                graph.add(list(_copies(event, addresses, location)))
            case Fill() if event.count:
                graph.add([_fill(event, addresses, location)])
            case SetCondition():
                assert conditions is not None  # compiled if any program sets a condition
                function = functions.setdefault(conditions, len(functions))
                graph.add([set_condition(function, addresses.address(event.byte, 1, location), event.conditional)])
            case Exchange() if event.nbytes:
                assert exchanges is not None  # only a model over several devices has collectives
                graph.add([_exchange(event, functions, exchanges, addresses, location)])
            case Begin():
                graph.begin(event.conditional, event.type)
            case NextBody():
                graph.next_body()
            case End():
                graph.end()
    nodes, edges, bodies = graph.rows()
    return RecordedGraph(
        recording=Recording(
            key=lowered.key, functions=tuple(functions), nodes=nodes, edges=_early(edges, nodes, begin_next), bodies=bodies
        ),
        inputs=tuple(_value(tensor, addresses, f"int_key {lowered.key}, input {i}") for i, tensor in enumerate(region.inputs)),
        outputs=tuple(_value(tensor, addresses, f"int_key {lowered.key}, output {i}") for i, tensor in enumerate(region.outputs)),
        arena=arena,
    )


def _early(edges: Sequence[Edge], nodes: Sequence[Node], begin_next: Collection[int]) -> tuple[Edge, ...]:
    """Returns the edges.  Those that start at launches of the functions `begin_next` become programmatic edges."""

    def early(edge: Edge) -> bool:
        source = nodes[edge.source]
        return isinstance(source, KernelNode) and source.function in begin_next

    return tuple(
        [replace(edge, from_port=KERNEL_PORT_PROGRAMMATIC, type=EDGE_PROGRAMMATIC) if early(edge) else edge for edge in edges]
    )


def _bases(lowered: Lowered, plan: Plan, weights: Mapping[str, Address], inputs: Sequence[int]) -> list[Address | None]:
    temporaries = {i: Address(memory=MEMORIES.index("arena"), offset=offset) for i, offset in plan.offsets.items()}
    input_addresses = {str(i): Address(memory=MEMORIES.index("inputs"), offset=offset) for i, offset in enumerate(inputs)}
    places = {WEIGHT: weights, INPUT: input_addresses}
    return [
        temporaries.get(i) if buffer.kind == TEMPORARY else places[buffer.kind].get(buffer.name)
        for i, buffer in enumerate(lowered.buffers)
    ]


def _check_written(addresses: _Addresses, written: Collection[int]) -> None:
    """Raises place-invalid for writes to weights, which sessions share, or to inputs that are not copied back to the caller."""
    for index in addresses.lowered.written:
        buffer, base = addresses.lowered.buffers[index], addresses.bases[index]
        written_input = buffer.kind == INPUT and int(buffer.name) in written
        if not written_input and (base is None or MEMORIES[base.memory] != "state"):
            text = f"the program changes buffer {index} ({buffer.kind} {buffer.name}), which is neither state nor a written input"
            raise BuildError("place-invalid", f"int_key {addresses.lowered.key}: {text}")


def _function(compiled: CompiledKernel) -> Function:
    attributes: list[tuple[int, int]] = []
    if compiled.shared > DEFAULT_SHARED:
        attributes.append((MAX_DYNAMIC_SHARED, compiled.shared))
    if compiled.cluster[0] > PORTABLE_CLUSTER:
        attributes.append((NON_PORTABLE_CLUSTER, 1))
    return Function(image=compiled.sha256, symbol=compiled.symbol, params=compiled.layout, attributes=tuple(attributes))


def _kernel(launch: Launch, function: int, compiled: CompiledKernel, addresses: _Addresses, location: str) -> KernelNode:
    variant = addresses.lowered.variants[launch.variant]
    location = f"{location} ({variant.name})"
    block = pack_arguments(compiled, launch, location)
    relocations = tuple(Relocation(at=at, target=addresses.address(place, 0, location)) for at, place in block.places)
    # a kernel compiled for multiples of 16 accesses wrong addresses with other values
    for (_, name), value in zip(compiled.params, launch.arguments, strict=True):
        number = addresses.address(value, 0, location).offset if isinstance(value, Pointer) else value
        if name in variant.divisible and number % DIVISOR:
            text = f"parameter {name}: {number} is no multiple of {DIVISOR}, which the kernel relies on"
            raise BuildError("parameter-mismatch", f"{location}, {text}")
    attributes: list[tuple[int, tuple[int, int, int]]] = []
    if compiled.cooperative:
        attributes.append((COOPERATIVE, (1, 0, 0)))
    if compiled.cluster != (1, 1, 1):
        attributes += [(CLUSTER_DIMENSION, compiled.cluster), (CLUSTER_SCHEDULING, (SPREAD, 0, 0))]
    x, y, z = (size * blocks for size, blocks in zip(launch.grid, compiled.cluster, strict=True))
    return KernelNode(
        function=function,
        grid=(x, y, z),
        threads=(compiled.threads, 1, 1),
        shared=compiled.shared,
        block=block.data,
        relocations=relocations,
        undefined=(),
        attributes=tuple(attributes),
    )


def _exchange(
    event: Exchange, functions: dict[Function, int], kernels: ExchangeKernels, addresses: _Addresses, location: str
) -> KernelNode:
    world = kernels.memory.world
    sent = transfer(event.kind, event.dtype, event.nbytes, world, event.sender)
    source = addresses.address(event.source, sent.size * (world if sent.scattered else 1), location)
    target = addresses.address(event.target, sent.output(world), location)
    function = functions.setdefault(kernels.function(sent), len(functions))
    return exchange_node(function, sent, kernels.memory, kernels.rank, source, target)


def _copies(copy: Copy, addresses: _Addresses, location: str) -> Iterator[MemcpyNode]:
    """Splits a copy into rows of at most LARGEST_ROW bytes; the driver's limit is 2 GiB (MAX_PITCH)."""
    source, target = addresses.address(copy.source, copy.nbytes, location), addresses.address(copy.target, copy.nbytes, location)
    for start in range(0, copy.nbytes, LARGEST_ROW):
        width = min(LARGEST_ROW, copy.nbytes - start)
        yield MemcpyNode(
            source=Address(memory=source.memory, offset=source.offset + start),
            target=Address(memory=target.memory, offset=target.offset + start),
            width=width,
            height=1,
            depth=1,
            source_pitch=width,
            source_height=1,
            target_pitch=width,
            target_height=1,
        )


def _fill(fill: Fill, addresses: _Addresses, location: str) -> MemsetNode:
    target = addresses.address(fill.target, fill.count * fill.element, location)
    if target.offset % fill.element:
        raise BuildError("place-invalid", f"{location}: a fill with elements of {fill.element} bytes at offset {target.offset}")
    value = fill.value & ((1 << (8 * fill.element)) - 1)
    return MemsetNode(target=target, value=value, element=fill.element, width=fill.count, height=1, pitch=0)


def _value(tensor: BufferView, addresses: _Addresses, location: str) -> Value:
    address = addresses.address(tensor.pointer, 0, location)
    return Value(
        dtype=tensor.dtype,
        shape=tensor.shape,
        strides=tensor.strides,
        memory=MEMORIES[address.memory],
        offset=address.offset,
    )
