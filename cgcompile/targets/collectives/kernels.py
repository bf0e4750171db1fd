"""Kernels for collectives between the GPUs of one host: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast.

All of them are variants of one exchange.  Every rank writes a part of its input to the memory of every other rank
(`exchange_memory`), and waits for the parts that the other ranks send.  Then it adds the parts in the order of the ranks, or stores
them side by side.  The fixed order, in float32, gives the same bits on every rank and in every run.

There are two methods to send.  A packet holds 8 bytes of data and its epoch twice.  The receiver polls the data itself, so an
exchange needs one trip over the link, and twice the bytes.  Buffers hold plain data, followed by a flag per block.  A *piece* is
the data of a packet, or 16 bytes of a buffer.

Only memory changes from launch to launch, so a graph with these kernels can be stored and replayed.  All ranks launch the same
collectives in the same order, with the same blocks and threads, and with at least as many threads as ranks.  All blocks of a
launch must fit on the GPU at once.  `cgbundle.validate.special_kernels` defines the parameters: the input, the output, and the
exchange memories of all ranks in order; the bytes between the parts of the input for two ranks, 0 if all ranks get the same; the
number of pieces for each rank; the number of this rank; a bit for each rank that sends.  If buffers are stored side by side, ranks
without this bit only set flags.  A kernel that reaches the time limit stores the rank for which it waited, and stops waiting.
Later kernels do not wait either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from cgbundle.validate.special_kernels import params as params

from ..kernels.ptxas import assemble
from .buffers import buffers
from .exchange_memory import ExchangeMemory
from .kernel_text import HEAD, entry
from .packets import packets

Combine = Literal["bfloat16", "float16", "float32", "side by side"]
"""The result of a receiver: a sum of numbers of a dtype, or bytes side by side."""

Way = Literal["packets", "buffers"]

PIECE: dict[Way, int] = {"packets": 8, "buffers": 16}
"""Bytes of data that a thread handles at once."""

_COMBINES: tuple[Combine, ...] = ("bfloat16", "float16", "float32", "side by side")


def symbol(way: Way, combine: Combine) -> str:
    """Returns the name of a kernel in the image of `collective_image`."""
    return f"cgcompile_{way}_{combine.replace(' ', '_')}"


def collective_image(name: str, memory: ExchangeMemory) -> bytes:
    """Returns the image of all kernels for an architecture ("sm_90").  Raises extra-missing, kernel-failed."""
    return assemble(source(memory), int(name.removeprefix("sm_")))


def source(memory: ExchangeMemory) -> str:
    ways: dict[Way, Callable[[ExchangeMemory, str], str]] = {"packets": packets, "buffers": buffers}
    kernels = [
        entry(memory.world, symbol(way, combine), text(memory, combine)) for way, text in ways.items() for combine in _COMBINES
    ]
    return HEAD + "".join(kernels)
