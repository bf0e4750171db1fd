"""Generates with the bundle: `python -m cgcompile.tools.generation.bundle_worker JOB`.  Imports only cgbundle and the standard
library."""

from __future__ import annotations

import sys
from array import array
from typing import Any

from ..bench.protocol import Laps, fail, say
from .job import prompt_of


def main(path: str) -> None:
    """Measures, then writes one answer: see `job`."""
    laps = Laps()
    laps.mark("first")
    sys.excepthook = fail
    import json
    from time import perf_counter

    with open(path) as file:
        job = json.load(file)
    import cgbundle

    program = cgbundle.load(job["bundle"], threads=job["threads"])
    lanes = Lanes(program, job)
    token = lanes.read(0)
    laps.mark("first")
    generated_tokens = [token, *lanes.step(1, [token])]
    laps.mark("second")
    rates: dict[str, float] = {}
    for batch in job["batches"]:
        best = 0.0
        for _ in range(job["rounds"]):
            tokens = [lanes.read(lane) for lane in range(batch)]
            begin, first_lane = perf_counter(), tokens[:1]
            for index in range(job["tokens"]):
                tokens = lanes.step(1 + index, tokens)
                first_lane += tokens[:1]
            best = max(best, batch * job["tokens"] / (perf_counter() - begin))
            if batch == job["batches"][0]:
                generated_tokens = first_lane
        rates[str(batch)] = best
    say({"laps": laps.seconds, "rates": rates, "made": generated_tokens, "torch": "torch" in sys.modules})


class Lanes:
    """Generates texts.  A lane is a row of the batch: it holds one text, and has its own pages of the cache."""

    def __init__(self, program: Any, job: dict[str, Any]) -> None:
        self._program, self._job = program, job
        self._lanes, self._seq, self._blocks = job["prefill"]
        self._decode = {batch: blocks for batch, blocks in job["decode"]}
        self._tables: dict[int, tuple[Any, ...]] = {}

    def read(self, lane: int) -> int:
        """Prefills the prompt of a lane in chunks, and returns the next token.  If `several` is true in the job, a call reads
        several consecutive chunks, one in each of its lanes."""
        prompt = prompt_of(lane, self._job["prompt"], self._job["vocabulary"])
        token, parallel = 0, self._lanes if self._job["several"] else 1
        for begin in range(0, len(prompt), self._seq * parallel):
            starts = range(begin, min(len(prompt), begin + self._seq * parallel), self._seq)
            counts, padding = [min(self._seq, len(prompt) - start) for start in starts], [0] * (self._lanes - len(starts))
            chunk = prompt[begin : begin + sum(counts)]
            outputs = self._program.prefill(
                self._integers([*chunk, *[0] * (self._seq * self._lanes - len(chunk))], self._lanes, self._seq),
                self._integers(counts + padding, self._lanes), self._integers([*starts, *padding], self._lanes),
                self._pages([lane] * len(starts), self._lanes, self._blocks),
                self._integers([1 + lane] * len(starts) + padding, self._lanes), *self._sampling(self._lanes),
            )  # fmt: skip
            token = outputs["token"].tolist()[len(starts) - 1]
        return token

    def step(self, place: int, tokens: list[int]) -> list[int]:
        """Returns the next token of each lane.  `tokens`: the last token of each lane, number `place` (from 1) of its answer."""
        batch = next(size for size in sorted(self._decode) if size >= len(tokens))
        count = len(tokens)
        padding = [0] * (batch - count)
        if count not in self._tables:  # created once, as in a server, because they do not change between steps
            self._tables[count] = (
                self._pages(range(count), batch, self._decode[batch]), self._integers([*range(1, count + 1), *padding], batch),
                *self._sampling(batch),
            )  # fmt: skip
        outputs = self._program.decode(
            self._integers([*tokens, *padding], batch, 1), self._integers([1] * count + padding, batch),
            self._integers([self._job["prompt"] + place - 1] * count + padding, batch), *self._tables[count],
        )  # fmt: skip
        next_tokens: list[int] = outputs["token"].tolist()[:count]
        return next_tokens

    def _pages(self, lanes: Any, batch: int, blocks: int) -> Any:
        per_lane = self._job["each"]
        rows = [[*range(1 + lane * per_lane, 1 + (lane + 1) * per_lane), *[0] * (blocks - per_lane)] for lane in lanes]
        return self._integers([page for row in rows for page in row] + [0] * (blocks * (batch - len(rows))), batch, blocks)

    def _sampling(self, batch: int) -> list[Any]:
        """Returns adapter 0 (none) if the bundle has adapters, and greedy sampling: temperature 0, top_k 0, top_p 1, penalty 1,
        seed 0, no alternatives, min_p 0, not deferred."""
        from cgbundle.tensors.tensor import from_bytes

        values = (0, 0, 1, 1, 0, 0, 0, 0)
        adapter = [self._integers([0] * batch, batch)] if self._job["adapters"] else []
        sampling = [
            from_bytes(array("f" if dtype == "float32" else "q", [value] * batch), dtype, (batch,))
            for value, dtype in zip(values, self._job["sampling"], strict=True)
        ]
        return [*adapter, tuple(sampling)]

    def _integers(self, values: list[int], *shape: int) -> Any:
        from cgbundle.tensors.tensor import from_bytes

        return from_bytes(array("q", values), "int64", shape)


if __name__ == "__main__":
    main(*sys.argv[1:])
