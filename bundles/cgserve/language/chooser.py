"""Chooses tokens of lanes with rules, by the entry `choose`.  A thread computes the masks while another call computes the
logits."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

from cgbundle.call.entry import Entry

from ..scheduling.requests import Lane, Token
from .lane_tables import Column, sampling_columns, write_sampling


class ChoiceTables:
    """The inputs of one recorded size of `choose`: `batch` lanes, masks of `words` words, `biases` biases per lane."""

    def __init__(self, batch: int, words: int, biases: int) -> None:
        self.batch, self.words, self.biases = batch, words, biases
        self.slot, self.place, self.fresh = [Column("int64", batch) for _ in range(3)]
        self.sampling = sampling_columns(batch)
        self.mask = Column("int32", batch, (words,))
        self.token, self.bias = Column("int64", batch, (biases,)), Column("float32", batch, (biases,))
        columns = [self.mask, self.token, self.bias, self.fresh]
        fields = tuple([column.tensor for column in self.sampling.values()])
        self.inputs = self.slot.tensor, self.place.tensor, fields, tuple([column.tensor for column in columns])

    def begin(self, lanes: Sequence[Lane], *, fresh: bool) -> None:
        """Writes the inputs for these lanes, and switches the other rows off.  `fresh`: the lanes' slots drop earlier biases."""
        for row, lane in enumerate(lanes):
            assert lane.rules is not None
            self.slot.numbers[row], self.place.numbers[row] = lane.slot, lane.start + len(lane.ids)
            self.mask.numbers[row * self.words : (row + 1) * self.words] = lane.rules.words
            write_sampling(self.sampling, row, lane.sampling)
        for row in range(self.batch):
            self.fresh.numbers[row] = fresh
            if row >= len(lanes):
                self.slot.numbers[row] = 0

    def change(self, lanes: Sequence[Lane], changes: Sequence[dict[int, float]]) -> None:
        """Writes up to `biases` changed biases per lane, and removes them from `changes`.  Repeats one bias if there are fewer."""
        for row, (lane, changed) in enumerate(zip(lanes, changes, strict=True)):
            assert lane.rules is not None
            tokens = list(islice(changed, self.biases)) or [0]
            values = [changed.pop(token, lane.rules.bias(token)) for token in tokens]
            unused, begin = self.biases - len(tokens), row * self.biases
            self.token.numbers[begin : begin + self.biases] = array("q", tokens + tokens[:1] * unused)
            self.bias.numbers[begin : begin + self.biases] = array("f", values + values[:1] * unused)


Following = Future[list[Mapping[int, float]]]


class Chooser:
    """Calls the entry `choose` for the lanes of a step."""

    def __init__(self, entry: Entry, sizes: Sequence[int]) -> None:
        """`sizes`: the recorded numbers of lanes."""
        self._entry, self._sizes = entry, sorted(sizes)
        mask, _, bias, _ = [spec.shape for spec in entry.inputs[-4:]]
        assert isinstance(mask[1], int) and isinstance(bias[1], int)
        self._words, self._biases = mask[1], bias[1]
        self._tables: dict[int, ChoiceTables] = {}
        self._thread = ThreadPoolExecutor(1, "masks")

    def follow(self, lanes: Sequence[Lane], tokens: Sequence[int], *, fresh: bool) -> Following:
        """Computes the masks of lanes with rules after their last tokens, in a thread."""

        def work() -> list[Mapping[int, float]]:
            return [
                lane.rules.follow(lane.start + len(lane.ids), token, fresh=fresh)
                for lane, token in zip(lanes, tokens, strict=True)
                if lane.rules is not None
            ]

        return self._thread.submit(work)

    def choose(self, lanes: Sequence[Lane], following: Following, *, fresh: bool) -> list[Token]:
        """Returns the token of every lane.  All lanes have rules, and their logits are in their slots."""
        changes, largest = [dict(changed) for changed in following.result()], self._sizes[-1]
        chosen: list[Token] = []
        for begin in range(0, len(lanes), largest):
            chosen += self._call(lanes[begin : begin + largest], changes[begin : begin + largest], fresh)
        return chosen

    def _call(self, lanes: Sequence[Lane], changes: Sequence[dict[int, float]], fresh: bool) -> list[Token]:
        size = next(size for size in self._sizes if size >= len(lanes))
        if size not in self._tables:
            self._tables[size] = ChoiceTables(size, self._words, self._biases)
        tables = self._tables[size]
        tables.begin(lanes, fresh=fresh)
        tables.change(lanes, changes)
        output = self._entry(*tables.inputs)
        while any(changes):  # a call sets only some of the biases: the output of the last call uses all of them
            tables.begin(lanes, fresh=False)
            tables.change(lanes, changes)
            output = self._entry(*tables.inputs)
        return tokens_of(lanes, output)


def tokens_of(lanes: Sequence[Lane], output: Mapping[str, Any]) -> list[Token]:
    """Returns the token of every lane with its log-probability, and alternatives if its request asks for them."""
    tokens, logprobs = output["token"].tolist(), output["logprob"].tolist()
    if not any([lane.sampling.alternatives for lane in lanes]):
        return [Token(token, logprob) for token, logprob, _ in zip(tokens, logprobs, lanes, strict=False)]
    top, top_logprobs = output["top_token"].tolist(), output["top_logprob"].tolist()
    return [
        Token(tokens[row], logprobs[row], tuple(zip(top[row], top_logprobs[row], strict=True))[: lane.sampling.alternatives])
        for row, lane in enumerate(lanes)
    ]
