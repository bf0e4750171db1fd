"""Converts collectives of a program to launches of the kernels in `kernels`, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from cgbundle.format.schema import DTYPES, MEMORIES, World
from cgbundle.validate.manifest import GRANULARITY
from cgbundle.validate.module_state import Address, Relocation
from cgbundle.validate.special_kernels import FIRST_PEER, INPUT, OUTPUT, packed, params, unpacked
from cgcompile.bundle.recordings import Function, KernelNode

from .exchange_memory import LIMIT, STATUS, ExchangeMemory
from .kernels import PIECE, Combine, symbol
from .launches import CollectiveLaunch, collective_launch

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

SUMS = ("bfloat16", "float16", "float32")
"""Dtypes that sums support."""

MULTIPLE = 16
"""The sizes that one rank sends to another, and all addresses, are multiples of this many bytes."""

_PEER = MEMORIES.index("peer")
_SYMBOLS = {symbol(way, combine): (way, combine) for way in PIECE for combine in get_args(Combine)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A collective: every rank sends `size` bytes to every other rank.  `scattered`: each rank gets another part of the input; else
    all get the same bytes.  The receiver combines the data in the order of the ranks.  `sender`: the only rank that sends, or -1 if
    all ranks send."""

    combine: Combine
    size: int
    scattered: bool
    sender: int = -1

    def output(self, world: int) -> int:
        """Returns the bytes of the output."""
        return self.size * (world if self.combine == "side by side" and self.sender < 0 else 1)


def transfer(kind: str, dtype: str, nbytes: int, world: int, sender: int = -1) -> Transfer:
    """Returns the transfer of a collective.  `kind`: one of KINDS.  `nbytes`: the bytes of the input on each rank.  Rounds up to
    MULTIPLE unless the input is scattered.  Raises ValueError, with a text for the user, if the kernels do not support it."""
    if kind in ("all_reduce", "reduce_scatter") and dtype not in SUMS:
        raise ValueError(f"{kind} of {dtype}: expected {', '.join(SUMS[:-1])} or {SUMS[-1]}")
    if dtype not in DTYPES:
        raise ValueError(f"{kind} of {dtype}: a bundle has no such dtype")
    scattered = kind in ("reduce_scatter", "all_to_all")
    if scattered and nbytes % (world * MULTIPLE):
        raise ValueError(f"{kind} of {nbytes} bytes: expected a multiple of {MULTIPLE} for each of {world} ranks")
    size = nbytes // world if scattered else -(-nbytes // MULTIPLE) * MULTIPLE
    summed = kind in ("all_reduce", "reduce_scatter")
    combine: Combine = dtype if summed else "side by side"  # type: ignore[assignment]  # the dtype is one of SUMS
    return Transfer(combine=combine, size=size, scattered=scattered, sender=sender if kind == "broadcast" else -1)


def output_shape(kind: str, shape: Sequence[int], world: int) -> tuple[int, ...]:
    """Returns the shape of a collective's output for an input of `shape` on each of `world` ranks."""
    first, *rest = shape or (1,)
    if kind == "all_gather":
        return (first * world, *rest)
    return (first // world, *rest) if kind == "reduce_scatter" else tuple(shape)


def needed_memory(world: int, transfers: Iterable[Transfer]) -> ExchangeMemory:
    """Returns an exchange memory that is large enough for each of the transfers."""
    sizes = {"packets": MULTIPLE, "buffers": MULTIPLE}
    for transfer in transfers:
        way = _launch(transfer).way
        sizes[way] = max(sizes[way], transfer.size)
    return ExchangeMemory(world=world, **sizes)


def stride(memory: ExchangeMemory) -> int:
    """Returns the bytes between the beginnings of two consecutive ranks' parts of memory peer."""
    return -(-memory.bytes // GRANULARITY) * GRANULARITY


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeKernels:
    """The kernels of one rank, in an image of `collective_image` for `memory`."""

    rank: int
    memory: ExchangeMemory
    image: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.image).hexdigest()

    @property
    def world(self) -> World:
        """The row of the manifest."""
        return World(rank=self.rank, size=self.memory.world, stride=stride(self.memory), status=STATUS, limit=LIMIT)

    def function(self, transfer: Transfer) -> Function:
        """Returns the kernel that runs a transfer."""
        name = symbol(_launch(transfer).way, transfer.combine)
        return Function(image=self.sha256, symbol=name, params=params(self.memory.world), attributes=())


def exchange_node(function: int, send: Transfer, memory: ExchangeMemory, rank: int, source: Address, target: Address) -> KernelNode:
    """Returns the launch of a transfer on one rank.  The addresses of input and output are multiples of MULTIPLE."""
    launch = _launch(send)
    senders = 1 << send.sender if send.sender >= 0 else (1 << memory.world) - 1
    parts = [Address(memory=_PEER, offset=number * stride(memory)) for number in range(memory.world)]
    places = [(INPUT, source), (OUTPUT, target), *[(FIRST_PEER + 8 * number, part) for number, part in enumerate(parts)]]
    return KernelNode(
        function=function,
        grid=(launch.blocks, 1, 1),
        threads=(launch.threads, 1, 1),
        shared=0,
        block=packed(memory.world, send.size if send.scattered else 0, launch.count, rank, senders),
        relocations=tuple([Relocation(at=at, target=place) for at, place in places]),
        undefined=(),
        attributes=(),
    )


def transfer_of(function: Function, node: KernelNode) -> Transfer | None:
    """Returns the transfer of a launch from `exchange_node`, or None for any other kernel."""
    world = sum(1 for relocation in node.relocations if relocation.target.memory == _PEER)
    if function.symbol not in _SYMBOLS or function.params != params(world):
        return None
    way, combine = _SYMBOLS[function.symbol]
    scattered, count, _, senders = unpacked(world, node.block)
    sender = senders.bit_length() - 1 if senders != (1 << world) - 1 else -1
    return Transfer(combine=combine, size=count * PIECE[way], scattered=bool(scattered), sender=sender)


def _launch(transfer: Transfer) -> CollectiveLaunch:
    """Returns the launch of a transfer.  A single sender needs buffers: with packets, kernels wait for packets from all ranks."""
    return collective_launch(transfer.size, "buffers" if transfer.sender >= 0 else None)
