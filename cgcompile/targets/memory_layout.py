"""The layout of device memory: weights, tables, state, static inputs and the arena.  Offsets and sizes are in bytes.

*weights*: every parameter, buffer and constant of the program at 256-byte aligned offsets, tied tensors once.  Then the tables:
constants that kernels read and that are no tensor of the program (cuFFT's twiddle factors, constants that Inductor folded).
*state*: the buffers that the program writes to.  Buffers whose number of rows is chosen at load come last, with room for MORE rows.
*inputs*: the input tensors of the call.  Every int_key starts at offset 0, so int_keys share this memory.
*arena*: the temporaries of an int_key.  int_keys share this memory, so a bundle needs the largest size, not the sum.  Its offsets
are planned elsewhere: `offline/assemble/arena.py` for cross-compiled programs, `capture/placement.py` for torch's allocator.

On a GPU each memory ends with PAD unused bytes, so that an address one past the end of the last tensor is still inside.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from cgbundle.format.schema import DTYPES, Weight

ALIGN = 256
PAD = 256

RECORDED_STATES = 5
"""The largest number of copies of memory state in a recording process: the state, its initial values, and in the self-test the
results of a replay and of two runs of eager PyTorch."""

MORE = 1
"""The number of extra rows in a second recording, and in the proof, of state with a variable number of rows.  Apart from these
rows, the recordings must be equal."""


def align(value: int, to: int = ALIGN) -> int:
    """Rounds `value` up to a multiple of `to`."""
    return -(-value // to) * to


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A tensor without its contents.  `same_as`: the name of an earlier tensor with the same memory, or ""."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    same_as: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Constants at `offset` of memory `weights` that belong to no tensor of the program."""

    offset: int
    contents: bytes


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Returns the size of a dense tensor in bytes."""
    return DTYPES[dtype] * math.prod(shape)


def dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Returns `strides` if they describe a dense tensor without overlaps, with axes in any order, else contiguous strides."""
    expected = 1
    for n, stride in sorted(((n, s) for n, s in zip(shape, strides, strict=True) if n != 1), key=lambda axis: (axis[1], axis[0])):
        if stride != expected:
            break
        expected *= n
    else:
        return strides
    contiguous = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        contiguous[i] = contiguous[i + 1] * max(shape[i + 1], 1)
    return tuple(contiguous)


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadedValue:
    """A value that the host computes and a graph reads, and its place in memory `inputs`.  Strides are in elements."""

    name: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """The aligned end, in bytes."""
        return align(self.offset + tensor_bytes(self.dtype, self.shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightLayout:
    """The offsets of all weights, and the end of the last one in memory `weights` and in memory `state`, in bytes."""

    rows: tuple[Weight, ...]
    weights_end: int
    state_end: int


def lay_out(
    shapes: Mapping[str, Shape], state: Collection[str] = (), host_only: Collection[str] = (), varying: Collection[str] = ()
) -> WeightLayout:
    """Assigns offsets to the program's tensors, in their order.  Tensors named in `state` are in memory `state`, all other tensors
    in `weights`.  Tensors in `host_only` get no place on the GPU.  Tensors in `varying` are state with a variable number of
    rows."""
    rows: list[Weight] = []
    offsets: dict[str, int] = {}
    ends = {"weights": 0, "state": 0}
    fixed = sum(align(tensor_bytes(s.dtype, s.shape)) for name, s in shapes.items() if name in state and name not in varying)
    last = fixed
    for name, s in shapes.items():
        tensor = s.same_as or name
        memory: Literal["weights", "state", "host"] = "host" if name in host_only else "state" if name in state else "weights"
        row = Weight(name=name, tensor=tensor, dtype=s.dtype, shape=s.shape, strides=s.strides, memory=memory)
        if name in host_only:
            rows.append(row)
            continue
        if name in varying:
            offsets[tensor] = last
            last += align(tensor_bytes(s.dtype, (s.shape[0] + MORE, *s.shape[1:])))
        elif tensor not in offsets:
            offsets[tensor] = ends[memory]
            ends[memory] = align(ends[memory] + tensor_bytes(s.dtype, s.shape))
        rows.append(replace(row, offset=offsets[tensor]))
    return WeightLayout(rows=tuple(rows), weights_end=ends["weights"], state_end=max(last, ends["state"]))
