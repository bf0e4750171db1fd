"""Collectives between ranks that are interpreted in one process.  A rank is a generator that stops at every collective.

The code of the collective kernels does not run here (`tests/pure/targets/test_collectives.py` tests it).  Parameters are read from
the parameter block.  Sums are computed as in the kernels: in float32, in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from cgbundle.format.schema import IntKey
from cgcompile.bundle.recordings import KernelNode

from ...errors import ModelError
from ...targets.collectives.exchange_nodes import Transfer
from .memory import Memory
from .values import Array


@dataclass(frozen=True, slots=True)
class Sent:
    """The data that a rank sends to every rank, also to itself."""

    transfer: Transfer
    parts: tuple[bytes, ...]


Result = TypeVar("Result")

Steps = Generator[Sent, Sequence[bytes], Result]
"""The generator of a rank: yields the data that it sends at a collective, and receives the data of every rank."""


def exchange(memory: Memory, sent: Transfer, node: KernelNode) -> Steps[None]:
    """Runs a collective.  `node`: its launch, built by `exchange_node`."""
    source, target, *parts = [relocation.target for relocation in node.relocations]
    step = sent.size if sent.scattered else 0
    received = yield Sent(
        sent, tuple([memory.span(source.memory, source.offset + step * rank, sent.size).tobytes() for rank in range(len(parts))])
    )
    if sent.combine == "side by side":
        chosen = [part for rank, part in enumerate(received) if sent.sender in (-1, rank)]
        output = np.frombuffer(b"".join(chosen), np.uint8)
    else:
        output = _summed(sent.combine, received)
    memory.span(target.memory, target.offset, len(output), "writes")[...] = output


def run_ranks(ranks: Sequence[Steps[Result]], key: IntKey) -> list[Result]:
    """Runs all ranks and returns their results.  Raises collectives-unlike if the ranks do not reach equal collectives."""
    ended: dict[int, Result] = {}
    received: list[Sequence[bytes] | None] = [None] * len(ranks)
    while True:
        sent_by_rank: dict[int, Sent] = {}
        for number, rank in enumerate(ranks):
            if number not in ended:
                try:
                    sent_by_rank[number] = next(rank) if received[number] is None else rank.send(received[number] or ())
                except StopIteration as end:
                    ended[number] = end.value
        if not sent_by_rank:
            return [ended[number] for number in range(len(ranks))]
        first = next(iter(sent_by_rank.values())).transfer
        if ended or any([sent.transfer != first for sent in sent_by_rank.values()]):
            text = f"one rank sends {first.size} bytes ({first.combine}), another rank runs a different collective, or none"
            raise ModelError("collectives-unlike", f"int_key {key}: {text}")
        received = [[sent_by_rank[source].parts[number] for source in range(len(ranks))] for number in range(len(ranks))]


def _summed(combine: str, received: Sequence[bytes]) -> Array:
    """The sum over the ranks, rounded at the end to the dtype `combine`.  It does not start with zero, so that a sum of -0 stays
    -0."""
    with np.errstate(all="ignore"):
        total, *others = [_numbers(combine, part) for part in received]
        for other in others:
            total = total + other
        if combine == "float32":
            return total.view(np.uint8)
        if combine == "float16":
            return total.astype(np.float16).view(np.uint8)
        bits: Array = total.view(np.uint32)
        rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
        return np.where(np.isnan(total), 0x7FFF, rounded).astype(np.uint16).view(np.uint8)


def _numbers(combine: str, data: bytes) -> Array:
    if combine == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.float16 if combine == "float16" else np.float32).astype(np.float32)
