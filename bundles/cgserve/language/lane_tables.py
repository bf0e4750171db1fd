"""The input tensors of a call, reused between calls: for a lane that continues, only changes are written."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from cgbundle.tensors.tensor import Tensor

from ..scheduling.requests import STOPS, Lane, Sampling

SAMPLING = {
    "temperature": "float32", "top_k": "int64", "top_p": "float32", "penalty": "float32", "seed": "int64", "alternatives": "int64",
    "min_p": "float32", "deferred": "int64",
}  # fmt: skip
"""The fields of Sampling in cgcompile/language_models/sampling.py."""

NEUTRAL, DEFERRED = Sampling(temperature=0.0), Sampling(temperature=0.0, deferred=1)
"""Sampling of an unused lane, and of a lane whose token the entry `choose` chooses."""

KINDS = {"float32": "f", "int64": "q", "int32": "i"}


class Column:
    """A tensor (rows, *shape) of int64, int32 or float32, whose numbers may be changed in place between calls."""

    def __init__(self, dtype: str, rows: int, shape: tuple[int, ...] = (), value: float = 0) -> None:
        self.width = prod(shape)
        self.numbers: array[Any] = array(KINDS[dtype], [float(value) if dtype == "float32" else int(value)]) * (rows * self.width)
        self.tensor = Tensor(self.numbers.buffer_info()[0], dtype, (rows, *shape), None, self.numbers)


class LaneTables:
    """The inputs of one recorded size of an entry: `batch` lanes of `seq` tokens, and `blocks` pages."""

    def __init__(self, batch: int, seq: int, blocks: int) -> None:
        self.batch, self.seq, self.blocks = batch, seq, blocks
        self.ids, self.pages = Column("int64", batch, (seq,)), Column("int64", batch, (blocks,))
        self.count, self.start, self.slot, self.most, self.length, self.adapter = [Column("int64", batch) for _ in range(6)]
        self.stop = Column("int64", batch, (STOPS,), -1)
        self.sampling = sampling_columns(batch)
        self.fields = tuple([column.tensor for column in self.sampling.values()])
        self._texts: list[Sequence[int] | None] = [None] * batch  # the page list of each row, compared by identity
        self._written = [0] * batch  # pages written for each row
        self._deferred = [False] * batch
        self._used = 0

    def fill(self, lanes: Sequence[Lane]) -> None:
        """Writes the inputs for a step with these lanes, and switches the other rows off."""
        used, texts, written = len(lanes), self._texts, self._written
        for row, lane in enumerate(lanes):
            pages = lane.pages
            if texts[row] is not pages or self._deferred[row] != (lane.rules is not None):
                self._begin(row, lane)
            elif written[row] != len(pages):
                begin, old_count = row * self.blocks, written[row]
                self.pages.numbers[begin + old_count : begin + len(pages)] = array("q", pages[old_count:])
                written[row] = len(pages)
        for row in range(used, self._used):
            self._switch_off(row)
        self._used = used
        if self.seq == 1:
            self.ids.numbers[:used] = array("q", [lane.ids[0] for lane in lanes])
        else:
            for row, lane in enumerate(lanes):
                count, begin = len(lane.ids), row * self.seq
                self.ids.numbers[begin : begin + count] = array("q", lane.ids)
                self.count.numbers[row] = count
        self.start.numbers[:used] = array("q", [lane.start for lane in lanes])

    def _begin(self, row: int, lane: Lane) -> None:
        """Writes all inputs of a row for another lane."""
        pages, begin = array("q", lane.pages), row * self.blocks
        stale = max(0, self._written[row] - len(pages))
        self.pages.numbers[begin : begin + len(pages) + stale] = pages + array("q", [0]) * stale
        self._texts[row], self._written[row] = lane.pages, len(pages)
        self.slot.numbers[row], self.count.numbers[row], self.adapter.numbers[row] = lane.slot, len(lane.ids), lane.adapter
        self._deferred[row] = lane.rules is not None
        write_sampling(self.sampling, row, DEFERRED if self._deferred[row] else lane.sampling)
        self.stop.numbers[row * STOPS : (row + 1) * STOPS] = array("q", [*lane.stop, *[-1] * (STOPS - len(lane.stop))])

    def _switch_off(self, row: int) -> None:
        self._begin(row, Lane(None, (), 0, (), 0, 0, (), NEUTRAL))
        self._texts[row] = None
        self.start.numbers[row] = self.most.numbers[row] = self.length.numbers[row] = 0
        begin = row * self.seq
        self.ids.numbers[begin : begin + self.seq] = array("q", [0]) * self.seq


def sampling_columns(rows: int) -> dict[str, Column]:
    """Returns columns for the fields of `SAMPLING`, with the values of unused lanes."""
    return {name: Column(dtype, rows, (), getattr(NEUTRAL, name)) for name, dtype in SAMPLING.items()}


def write_sampling(columns: Mapping[str, Column], row: int, sampling: Sampling) -> None:
    for name, column in columns.items():
        column.numbers[row] = getattr(sampling, name)
