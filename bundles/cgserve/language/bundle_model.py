"""A bundle of a language model as the scheduler's model: what it was built for, and a call for a step.  Without torch and NumPy."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import cgbundle
from cgbundle.call.entry import Entry
from cgbundle.tensors.tensor import from_bytes

from .scheduler import STOPS, Lane, Limits, Sampling, Step, Token

NOBODY = Lane(None, (), 0, (), 0, 0, (), Sampling(temperature=0.0))
"""A lane that is off."""


class Cache(NamedTuple):
    """The cache of a bundle: tokens of a page, pages and slots with those of nobody, and how many tokens the model knows."""

    page: int
    pages: int
    slots: int
    vocabulary: int


def is_language_model(manifest: Any) -> bool:
    """Whether a bundle is that of a language model: two entries, a cache in pages, and a table of tokens that texts have."""
    return {"prefill", "decode"} <= {entry.name for entry in manifest.entries} and {"keys_0", "seen"} <= {
        weight.name for weight in manifest.weights
    }


def cache_of(manifest: Any) -> Cache:
    """The cache of a language model's bundle.  The one place that reads how many pages there are."""
    shapes = {weight.name: weight.shape for weight in manifest.weights}
    pages, _, page, _ = shapes["keys_0"]
    return Cache(page, pages, *shapes["seen"])


class BundleModel:
    """A loaded bundle.  `limits` say what it was built for; `vocabulary` how many tokens there are."""

    def __init__(self, program: cgbundle.Program, turns: int) -> None:
        """`turns`: tokens that a call may make for each request in a loop on the device, at most as many as were built; 1 makes
        them one by one."""
        self._entries = program.entries
        cache = cache_of(program.manifest)
        self.vocabulary = cache.vocabulary
        self._takes_length = any(spec.name == "length" for spec in self._entries["prefill"].inputs)
        self._sizes = {name: [sizes_of(entry, key) for key in entry.int_keys] for name, entry in self._entries.items()}
        blocks = min(max(each["blocks"] for each in self._sizes[name]) for name in ("prefill", "decode"))
        loops = [each["batch"] for each in self._sizes.get("generate", ()) if each["blocks"] >= blocks]
        made = self._entries["generate"].outputs if loops else ()
        built = [each.shape[1] for each in made if each.name == "tokens" and isinstance(each.shape[1], int)] or [1]
        chunks = [each for each in self._sizes["prefill"] if each["blocks"] >= blocks]
        chunk = max(each["seq"] for each in chunks)
        self.limits = Limits(
            page=cache.page, pages=cache.pages, slots=cache.slots, blocks=blocks, chunk=chunk,
            readers=max(each["batch"] for each in chunks if each["seq"] == chunk),
            lanes=max(each["batch"] for each in self._sizes["decode"] if each["blocks"] >= blocks),
            loop_lanes=max(loops, default=0), turns=min(turns, *built),
        )  # fmt: skip

    def run(self, step: Step) -> list[list[Token]]:
        """What the model makes for every lane of a step.  Raises CgbundleError."""
        lanes = step.lanes
        size = self._smallest(step)
        off = [NOBODY] * (size["batch"] - len(lanes))
        padded = [*lanes, *off]
        seq, blocks = size.get("seq", 1), size["blocks"]
        ids = integers([lane.ids for lane in padded], seq)
        start, slot = [vector("int64", [getattr(lane, name) for lane in padded]) for name in ("start", "slot")]
        pages = integers([lane.pages[:blocks] for lane in padded], blocks)
        sampling = sampling_of([lane.sampling for lane in padded])
        if step.entry == "generate":
            stop = integers([lane.stop for lane in padded], STOPS, rest=-1)
            most = vector("int64", [lane.most for lane in padded])
            made = self._entries["generate"](ids, start, pages, slot, sampling, stop, most)
            tokens, logprobs, counts = [made[name].tolist()[: len(lanes)] for name in ("tokens", "logprobs", "count")]
            rows = [
                [Token(*each) for each in zip(row[:count], theirs, strict=False)]
                for row, theirs, count in zip(tokens, logprobs, counts, strict=True)
            ]
            return with_reread(rows, made)
        count = vector("int64", [len(lane.ids) for lane in padded])
        lengths = [vector("int64", [lane.length for lane in padded])] if step.entry == "prefill" and self._takes_length else []
        made = self._entries[step.entry](ids, count, start, pages, slot, sampling, *lengths)
        tokens, logprobs = made["token"].tolist(), made["logprob"].tolist()
        if not any(lane.sampling.alternatives for lane in lanes):
            return with_reread([[Token(*pair)] for pair, _ in zip(zip(tokens, logprobs, strict=True), lanes, strict=False)], made)
        best, theirs = made["top_token"].tolist(), made["top_logprob"].tolist()
        rows = [
            [Token(tokens[row], logprobs[row], tuple(zip(best[row], theirs[row], strict=True))[: lane.sampling.alternatives])]
            for row, lane in enumerate(lanes)
        ]
        return with_reread(rows, made)

    def _smallest(self, step: Step) -> dict[str, int]:
        """The cheapest recorded size that holds a step: the fewest tokens to compute, then the shortest tables."""
        lanes = step.lanes
        needed = {
            "batch": len(lanes),
            "seq": max(len(lane.ids) for lane in lanes),
            "blocks": max(len(lane.pages) for lane in lanes),
        }
        fitting = [size for size in self._sizes[step.entry] if all(value >= needed[name] for name, value in size.items())]
        return min(fitting, key=lambda size: (size["batch"] * size.get("seq", 1), size["blocks"]))


def with_reread(rows: list[list[Token]], outputs: Mapping[str, Any]) -> list[list[Token]]:
    """The tokens of every lane, the last of them marked where the entry says that the text is read again before it."""
    if "reread" not in outputs:
        return rows
    flags = outputs["reread"].tolist()
    return [[*row[:-1], row[-1]._replace(reread=bool(flag))] if row else row for row, flag in zip(rows, flags, strict=False)]


def sizes_of(entry: Entry, key: Sequence[int]) -> dict[str, int]:
    """An int_key by the names of its dimensions."""
    return {dimension.name: value for dimension, value in zip(entry.spec.dimensions, key, strict=True)}


def vector(dtype: str, values: Sequence[float]) -> Any:
    """A tensor (len(values),) of float32 or int64."""
    return from_bytes(array("f" if dtype == "float32" else "q", values), dtype, (len(values),))


def integers(rows: Sequence[Sequence[int]], width: int, rest: int = 0) -> Any:
    """A tensor int64 (len(rows), width); behind what a row has, at most `width` numbers, is `rest`."""
    flat = array("q", [rest]) * (len(rows) * width)
    for number, row in enumerate(rows):
        flat[number * width : number * width + len(row)] = array("q", row)
    return from_bytes(flat, "int64", (len(rows), width))


def sampling_of(lanes: Sequence[Sampling]) -> tuple[Any, ...]:
    """The fields of sampling.Sampling, in its order."""
    fields = {
        "temperature": "float32", "top_k": "int64", "top_p": "float32", "penalty": "float32", "seed": "int64",
        "alternatives": "int64",
    }  # fmt: skip
    return tuple([vector(dtype, [getattr(lane, name) for lane in lanes]) for name, dtype in fields.items()])
