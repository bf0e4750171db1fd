"""Reads the sizes and dtypes of a language model's entries and cache from the manifest of its bundle.

The convention is that of cgcompile/language_models/causal_lm.py.  Entries `prefill` and `decode` take ids, count, start, pages,
slot and the fields of sampling, and return `token`.  The cache `keys_0` is (pages, heads, tokens in a page, dim); `seen` has a row
per slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cgbundle.format.file_names import entry_named
from cgbundle.format.schema import EntrySpec, Manifest

from ...errors import BuildError

INPUTS = ("ids", "count", "start", "pages", "slot")
ADAPTER = "adapter"
"""The input after the sampling fields, if the bundle has adapters."""

ENTRIES = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A lane is a row of the batch; its blocks are the maximum number of its pages.

    `prefill`: lanes, tokens per lane and blocks of the recorded prefill for the prompts.  `several`: whether several of its lanes
    may read one prompt.  `decode`: (lanes, blocks) of the recorded decodes with the most blocks.  `page`: tokens in a page.
    `pages`, `slots`: the numbers of pages and slots in the cache, including the unused first one; the maximum if a load chooses the
    number.  `sampling`: the dtypes of the sampling fields.  `vocabulary`, `dtype`: those of the model.  `adapters`: whether lanes
    select an adapter."""

    prefill: tuple[int, int, int]
    several: bool
    decode: tuple[tuple[int, int], ...]
    page: int
    pages: int
    slots: int
    sampling: tuple[str, ...]
    vocabulary: int
    dtype: str
    adapters: bool

    def longest(self, lanes: int) -> int:
        """Returns the maximum number of tokens of each of `lanes` lanes."""
        blocks = min(self.prefill[2], *[blocks for _, blocks in self.decode])
        return min(blocks, (self.pages - 1) // lanes) * self.page


def read_layout(manifest: Manifest, prompt: int) -> Layout:
    """Returns the layout for prompts of `prompt` tokens.  Raises bench-failed for a bundle that does not follow the convention."""
    names = {entry.name for entry in manifest.entries}
    weights = {weight.name: weight for weight in manifest.weights}
    if not set(ENTRIES) <= names or not {"keys_0", "seen"} <= set(weights):
        raise BuildError(
            "bench-failed", "the bundle has no entries prefill and decode with a paged cache (`cgcompile build FOLDER`)",
            "leave --generate out to measure calls",
        )  # fmt: skip
    prefill, decode = [entry_named(manifest, name) for name in ENTRIES]
    for entry in (prefill, decode):
        in_names = [spec.name for spec in entry.inputs]
        others = [name for name in in_names[len(INPUTS) :] if name != ADAPTER]
        if tuple(in_names[: len(INPUTS)]) != INPUTS or any(not name.startswith("sampling") for name in others):
            raise BuildError("bench-failed", f"{entry.name} takes {', '.join(in_names)}, expected {', '.join(INPUTS)} and sampling")
    cache, (slots, vocabulary) = weights["keys_0"], weights["seen"].shape
    most = {dimension.name: dimension.most or 0 for dimension in manifest.state_dimensions}
    several = "state_0" not in weights

    def tokens(key: Sequence[int]) -> int:
        return _dim(prefill, key, "seq") * (_dim(prefill, key, "batch") if several else 1)

    keys = sorted([program.key for program in prefill.programs], key=lambda key: (tokens(key), -_dim(prefill, key, "batch")))
    chosen = next((key for key in keys if tokens(key) >= prompt), keys[-1])
    widest = max(_dim(decode, program.key, "blocks") for program in decode.programs)
    sizes = {
        _dim(decode, program.key, "batch"): widest for program in decode.programs if _dim(decode, program.key, "blocks") == widest
    }
    lanes, seq, blocks = [_dim(prefill, chosen, name) for name in ("batch", "seq", "blocks")]
    return Layout(
        prefill=(lanes, seq, blocks), several=several, decode=tuple(sorted(sizes.items())), page=cache.shape[2],
        pages=max(cache.shape[0], most.get("pages", 0)), slots=max(slots, most.get("slots", 0)),
        sampling=tuple([spec.dtype for spec in decode.inputs[len(INPUTS) :] if spec.name != ADAPTER]), vocabulary=vocabulary,
        dtype=cache.dtype, adapters=any(spec.name == ADAPTER for spec in decode.inputs),
    )  # fmt: skip


def _dim(entry: EntrySpec, key: Sequence[int], name: str) -> int:
    """Returns the size of a dimension in an int_key, 1 if the entry does not have it."""
    return next((size for row, size in zip(entry.dimensions, key, strict=True) if row.name == name), 1)
