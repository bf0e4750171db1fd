"""Collectives between ranks that are interpreted side by side in one process: each stops where it has to wait for the others.

The kernels are not Triton's, and their text is not run here (`tests/pure/targets/test_collectives.py` does): what they send and
combine is read back from the parameter block, and done as they do it, in float32 and in the order of the ranks.
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
    """What a rank sends to each one, itself too."""

    transfer: Transfer
    parts: tuple[bytes, ...]


Result = TypeVar("Result")

Steps = Generator[Sent, Sequence[bytes], Result]
"""A rank at work: it gives what it sends at every collective, and goes on with what has come from each rank."""


def exchange(memory: Memory, sent: Transfer, node: KernelNode) -> Steps[None]:
    """The collective that a launch stands for: see `exchange_node`."""
    source, target, *parts = [relocation.target for relocation in node.relocations]
    step = sent.size if sent.scattered else 0
    came = yield Sent(
        sent, tuple([memory.span(source.memory, source.offset + step * rank, sent.size).tobytes() for rank in range(len(parts))])
    )
    if sent.combine == "side by side":
        chosen = [part for rank, part in enumerate(came) if sent.sender in (-1, rank)]
        output = np.frombuffer(b"".join(chosen), np.uint8)
    else:
        output = _summed(sent.combine, came)
    memory.span(target.memory, target.offset, len(output), "writes")[...] = output


def together(ranks: Sequence[Steps[Result]], key: IntKey) -> list[Result]:
    """All ranks to their ends.  Raises collectives-unlike where one sends what another one does not."""
    ended: dict[int, Result] = {}
    received: list[Sequence[bytes] | None] = [None] * len(ranks)
    while True:
        asked: dict[int, Sent] = {}
        for number, rank in enumerate(ranks):
            if number not in ended:
                try:
                    asked[number] = next(rank) if received[number] is None else rank.send(received[number] or ())
                except StopIteration as end:
                    ended[number] = end.value
        if not asked:
            return [ended[number] for number in range(len(ranks))]
        first = next(iter(asked.values())).transfer
        if ended or any([sent.transfer != first for sent in asked.values()]):
            text = f"int_key {key}: one rank sends {first.size} bytes ({first.combine}), another one something else, or nothing"
            raise ModelError("collectives-unlike", text)
        received = [[asked[source].parts[number] for source in range(len(ranks))] for number in range(len(ranks))]


def _summed(combine: str, came: Sequence[bytes]) -> Array:
    """The sum of numbers of a dtype, rounded to nearest at the end; the first are taken as they are, so that -0 stays."""
    with np.errstate(all="ignore"):
        total, *others = [_numbers(combine, part) for part in came]
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
