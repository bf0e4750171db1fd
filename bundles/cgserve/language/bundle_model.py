"""Makes a bundle of a language model usable for the scheduler: its limits, and a call for each step.  Without torch and NumPy."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import cgbundle
from cgbundle.call.entry import Entry
from cgbundle.tensors.tensor import from_bytes

from ..scheduling.requests import Call, Limits, Made, Step, Token
from .adapters import ENTRY, AdapterError, AdapterWeights, bank_of
from .chooser import Chooser, Following, tokens_of
from .lane_tables import Column, LaneTables


class Cache(NamedTuple):
    """The cache of a bundle: tokens of a page, numbers of pages and slots including number 0, size of the vocabulary, and whether
    slots have states."""

    page: int
    pages: int
    slots: int
    vocabulary: int
    states: bool


def is_language_model(manifest: Any) -> bool:
    """Returns whether a bundle is a language model: two entries, a paged cache, and the table of tokens that occur in a text."""
    return {"prefill", "decode"} <= {entry.name for entry in manifest.entries} and {"keys_0", "seen"} <= {
        weight.name for weight in manifest.weights
    }


def cache_of(manifest: Any) -> Cache:
    """Returns the cache of a language model's bundle."""
    shapes = {weight.name: weight.shape for weight in manifest.weights}
    pages, _, page, _ = shapes["keys_0"]
    slots, vocabulary = shapes["seen"]
    return Cache(page, pages, slots, vocabulary, "state_0" in shapes)


class BundleModel:
    """A loaded bundle.  `limits`: its sizes; `vocabulary`: number of tokens; `bank`: its bank of adapters, or None."""

    def __init__(self, program: cgbundle.Program, turns: int) -> None:
        """`turns`: maximum tokens per request of a call of `generate`, limited by the build; 1 disables these calls."""
        self._entries = program.entries
        cache = cache_of(program.manifest)
        self.vocabulary = cache.vocabulary
        self.bank = bank_of(program.manifest)
        self._takes_length = any(spec.name == "length" for spec in self._entries["prefill"].inputs)
        self._tables: dict[tuple[str, int, int, int], list[LaneTables]] = {}
        self._sizes = {name: [sizes_of(entry, key) for key in entry.int_keys] for name, entry in self._entries.items()}
        blocks = min(max(size["blocks"] for size in self._sizes[name]) for name in ("prefill", "decode"))
        loops = [size["batch"] for size in self._sizes.get("generate", ()) if size["blocks"] >= blocks]
        loop_outputs = self._entries["generate"].outputs if loops else ()
        built = [spec.shape[1] for spec in loop_outputs if spec.name == "tokens" and isinstance(spec.shape[1], int)] or [1]
        chunks = [size for size in self._sizes["prefill"] if size["blocks"] >= blocks]
        chunk = max(size["seq"] for size in chunks)
        self.limits = Limits(
            page=cache.page, pages=cache.pages, slots=cache.slots, blocks=blocks, chunk=chunk,
            readers=tuple(sorted({size["batch"] for size in chunks if size["seq"] == chunk})),
            lanes=max(size["batch"] for size in self._sizes["decode"] if size["blocks"] >= blocks),
            loop_lanes=max(loops, default=0), turns=min(turns, *built), several=not cache.states,
            shared=not cache.states and not self._takes_length, ahead=not self._takes_length,
            vocabulary=cache.vocabulary if "choose" in self._entries else 0,
        )  # fmt: skip
        self._chooser: Chooser | None = None
        if "choose" in self._entries:
            self._chooser = Chooser(self._entries["choose"], [size["batch"] for size in self._sizes["choose"]])

    def prepare(self, step: Step) -> Call:
        """Returns a call for a step.  Writes its inputs now, even while the previous call runs.  At most two calls may be prepared
        or running, and they must be called in order.  A call raises CgbundleError."""
        lanes = step.lanes
        size = self._smallest(step)
        batch, seq, blocks = size["batch"], size.get("seq", 1), size["blocks"]
        pair = self._tables.setdefault((step.entry, batch, seq, blocks), [])
        if len(pair) < 2:
            pair.insert(0, LaneTables(batch, seq, blocks))
        tables = pair.pop(0)  # the less recently used one: a running call may still read the other
        pair.append(tables)
        tables.fill(lanes)
        if step.entry == "prefill":
            tables.length.numbers[: len(lanes)] = array("q", [lane.length for lane in lanes])
        elif step.entry == "generate":
            tables.most.numbers[: len(lanes)] = array("q", [lane.most for lane in lanes])
        behind = [(row, lane.behind) for row, lane in enumerate(lanes) if lane.behind >= 0]
        return partial(self._loop if step.entry == "generate" else self._call, step, tables, behind)

    def _call(self, step: Step, tables: LaneTables, behind: Sequence[tuple[int, int]], previous: Made | None) -> Made:
        if behind:
            assert previous is not None
            ids, previous_tokens = tables.ids.numbers, previous.tokens
            for row, source in behind:
                ids[row] = previous_tokens[source]
        columns = [tables.ids, tables.count, tables.start, tables.pages, *self._lane_columns(tables)]
        lengths = [tables.length.tensor] if step.entry == "prefill" and self._takes_length else []
        deferred = [row for row, lane in enumerate(step.lanes) if lane.rules is not None]
        following = self._follow(step, tables, deferred) if deferred else None
        output = self._entries[step.entry](*[column.tensor for column in columns], tables.fields, *lengths)
        if following is None:
            return Made(output["token"].tolist(), lambda: with_reread([[token] for token in tokens_of(step.lanes, output)], output))
        assert self._chooser is not None
        tokens_by_lane = tokens_of(step.lanes, output)
        chosen = self._chooser.choose([step.lanes[row] for row in deferred], following, fresh=step.entry == "prefill")
        for row, token in zip(deferred, chosen, strict=True):
            tokens_by_lane[row] = token
        return Made([token.id for token in tokens_by_lane], lambda: with_reread([[token] for token in tokens_by_lane], output))

    def _lane_columns(self, tables: LaneTables) -> list[Column]:
        return [tables.slot] if self.bank is None else [tables.slot, tables.adapter]

    def load_adapter(self, place: int, adapter: AdapterWeights) -> None:
        """Stores an adapter in the bank, for the following calls.  Raises CgbundleError, and AdapterError for numbers that are not
        finite; in that case the place holds zeros."""
        index, scale = array("q", [place]), array("f", [adapter.scale])
        output = self._entries[ENTRY](from_bytes(index, "int64", (1,)), from_bytes(scale, "float32", (1,)), dict(adapter.factors))
        if not output["finite"].tolist():
            raise AdapterError("the adapter has numbers that are not finite, or too large for the dtype of the bundle")

    def _follow(self, step: Step, tables: LaneTables, deferred: Sequence[int]) -> Following:
        """Starts to compute the masks of lanes with rules."""
        assert self._chooser is not None
        lanes, ids = [step.lanes[row] for row in deferred], tables.ids.numbers
        last = [ids[row * tables.seq + len(step.lanes[row].ids) - 1] for row in deferred]
        return self._chooser.follow(lanes, last, fresh=step.entry == "prefill")

    def _loop(self, step: Step, tables: LaneTables, _behind: Sequence[tuple[int, int]], _before: Made | None) -> Made:
        columns = [tables.ids, tables.start, tables.pages, *self._lane_columns(tables)]
        others = tables.fields, tables.stop.tensor, tables.most.tensor
        output = self._entries["generate"](*[column.tensor for column in columns], *others)
        tokens, logprobs, counts = [output[name].tolist()[: len(step.lanes)] for name in ("tokens", "logprobs", "count")]
        rows = [
            [Token(*pair) for pair in zip(row[:count], row_logprobs, strict=False)]
            for row, row_logprobs, count in zip(tokens, logprobs, counts, strict=True)
        ]
        rows = with_reread(rows, output)
        return Made([row[-1].id for row in rows], lambda: rows)

    def _smallest(self, step: Step) -> dict[str, int]:
        """Returns the cheapest recorded size that holds a step: the fewest tokens to compute, then the shortest tables."""
        lanes = step.lanes
        needed = {
            "batch": len(lanes),
            "seq": max(len(lane.ids) for lane in lanes),
            "blocks": max(len(lane.pages) for lane in lanes),
        }
        fitting = [size for size in self._sizes[step.entry] if all(value >= needed[name] for name, value in size.items())]
        return min(fitting, key=lambda size: (size["batch"] * size.get("seq", 1), size["blocks"]))


def with_reread(rows: list[list[Token]], outputs: Mapping[str, Any]) -> list[list[Token]]:
    """Marks the last token of each lane if the entry reports that the text must be read again before it."""
    if "reread" not in outputs:
        return rows
    flags = outputs["reread"].tolist()
    return [[*row[:-1], row[-1]._replace(reread=bool(flag))] if row else row for row, flag in zip(rows, flags, strict=False)]


def sizes_of(entry: Entry, key: Sequence[int]) -> dict[str, int]:
    """Returns an int_key as sizes by dimension."""
    return {dimension.name: value for dimension, value in zip(entry.spec.dimensions, key, strict=True)}
