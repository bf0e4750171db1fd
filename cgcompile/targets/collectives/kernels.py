"""Kernels for collectives between the GPUs of one host: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast.

All of them are one exchange: every rank writes a part of its input to the memory of every other one (`exchange_memory`), waits
for what the others send to it, and then either adds up what came, in the order of the ranks, or puts it side by side.  Adding in
that order, in float32, gives the same bits on every rank and in every run.

There are two ways to send.  Packets carry 8 bytes of data and twice their epoch: whoever waits for them looks at the data itself,
so that an exchange takes one way through the link, and twice the bytes.  Buffers are written as they are, then a flag per block.

Nothing but memory changes from launch to launch, so a graph with these kernels can be stored and replayed.  All ranks launch the
same collectives in the same order, each with as many blocks and threads as the others, no fewer threads than ranks, and all
blocks of a launch have to fit on the GPU at once.  A kernel's parameters are those of `cgbundle.tables.collectives`: the input,
the output, the exchange memories of all ranks in their order, the own one among them; the bytes from what is sent to one rank to
what is sent to the next, 0 where all get the same; how many pieces each rank gets; the own rank; and as bits the ranks that send:
of buffers side by side the others only say they are there.  A kernel that has waited too long writes down for whom and no longer
waits; neither does any after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from cgbundle.tables.collectives import params as params

from ..kernels.ptxas import assemble
from .buffers import buffers
from .exchange_memory import ExchangeMemory
from .kernel_text import HEAD, entry
from .packets import packets

Combine = Literal["bfloat16", "float16", "float32", "side by side"]
"""Adding up numbers of a dtype, or putting bytes side by side."""

Way = Literal["packets", "buffers"]

PIECE: dict[Way, int] = {"packets": 8, "buffers": 16}
"""Bytes of data that a thread handles at once."""

_COMBINES: tuple[Combine, ...] = ("bfloat16", "float16", "float32", "side by side")


def symbol(way: Way, combine: Combine) -> str:
    """The name of a kernel in the image of `collective_image`."""
    return f"cgcompile_{way}_{combine.replace(' ', '_')}"


def collective_image(name: str, memory: ExchangeMemory) -> bytes:
    """The image of all kernels for an architecture ("sm_90").  Raises extra-missing, kernel-failed."""
    return assemble(source(memory), int(name.removeprefix("sm_")))


def source(memory: ExchangeMemory) -> str:
    """The kernels as PTX."""
    ways: dict[Way, Callable[[ExchangeMemory, str], str]] = {"packets": packets, "buffers": buffers}
    kernels = [
        entry(memory.world, symbol(way, combine), text(memory, combine)) for way, text in ways.items() for combine in _COMBINES
    ]
    return HEAD + "".join(kernels)
