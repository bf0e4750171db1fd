"""A language model of transformers for serving: prompts by chunks, a token for every lane, or many tokens in one call.

    CAUSAL_LM=~/models/Qwen3-0.6B cgcompile build examples/causal_lm.py -o qwen.cgb --sizes prefill:batch=1 \\
        --sizes prefill:seq=128 --sizes decode:batch=1,8,32 --sizes generate:batch=1,8 --sizes blocks=64

The bundle has three entries over one set of weights and one cache of keys and values, which lies in pages
(language_model/attention.py):

    prefill   a chunk of a prompt for each lane, as long as each has, and the token behind it
    decode    one token for each lane, and the one behind it
    generate  up to CAUSAL_LM_TURNS tokens for each lane in one launch, until a stop token or the lane's limit

Which pages a lane has is an input, and whoever calls gives them out: a request may come, go and leave its pages to another between
any two calls.  So is its *slot*, a row of what the device remembers of a request.  Page 0 and slot 0 are nobody's: a lane that is
off has count 0 (`generate`: limit 0), pages 0 and slot 0, and changes nothing.

CAUSAL_LM is a folder in the Hub's layout, or a name from language_model/configurations.py (default: llama, a tiny one);
CAUSAL_LM_DTYPE float32 (default), bfloat16 or float16; CAUSAL_LM_WEIGHTS=int8 keeps the weights of linear layers in eight bits
(language_model/int8.py); CAUSAL_LM_PAGES (65) and CAUSAL_LM_SLOTS (9) count pages of 16 tokens and
slots, those of nobody among them; CAUSAL_LM_TURNS is 32, and 0 leaves `generate` out.

Before a build, a small copy of the model is compared with transformers' `generate` (language_model/comparison.py), then the model
with weights of its own on two short texts.  Another text, or a model that pages do not serve, is refused by name.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable

import torch
from language_model import comparison
from language_model.attention import PAGE, Lanes, Loop, Pages, empty_pages, write
from language_model.configurations import CONFIGURATIONS, configuration, network
from language_model.control_flow import while_loop
from language_model.int8 import int8_weights
from language_model.positions import depends_on_length, reread_length, ropes_by_length, temperatures_by_place, with_length
from language_model.probe import Probe, probe_layers
from language_model.sampling import Sampling, alternatives, log_probability, sample
from torch import Tensor, nn
from transformers import PretrainedConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAME, DTYPE = os.environ.get("CAUSAL_LM", "llama"), os.environ.get("CAUSAL_LM_DTYPE", "float32")
WEIGHTS = os.environ.get("CAUSAL_LM_WEIGHTS", "")
PAGES, SLOTS, TURNS = [
    int(os.environ.get(f"CAUSAL_LM_{name}", value)) for name, value in (("PAGES", 65), ("SLOTS", 9), ("TURNS", 32))
]
COMPARED = "CAUSAL_LM_COMPARED"
"""Tells the processes that a build starts, which inherit it, that the first one has compared the model with transformers."""

STOPS = 8
"""Stop tokens that a lane may have; -1 is none."""

Result = dict[str, Tensor]


class CausalLM(nn.Module):
    """A model of transformers whose attention is `paged`, with its cache.

    The buffers, which calls change: `keys_N` and `values_N` of layer N, (PAGES, key heads, PAGE, dim); `seen`, bool (SLOTS,
    vocabulary), which tokens the text of a slot has.
    """

    def __init__(self, network: nn.Module, pages: int = PAGES, slots: int = SLOTS, turns: int | None = None) -> None:
        """`pages`, `slots` and `turns`: CAUSAL_LM_PAGES, CAUSAL_LM_SLOTS and CAUSAL_LM_TURNS.  Raises Refused."""
        super().__init__()
        self.network = temperatures_by_place(ropes_by_length(network))
        self.by_length, self.reread_at = depends_on_length(network.config), reread_length(network)
        self.keeps_rows = "logits_to_keep" in inspect.signature(network.forward).parameters
        self.turns = TURNS if turns is None else turns
        self.vocabulary = network.config.get_text_config().vocab_size
        weight = next(network.parameters())
        self.layers = probe_layers(network)
        for number, layer in enumerate(self.layers):
            for name in ("keys", "values"):
                cache = empty_pages((pages, layer.heads, PAGE, layer.dim), weight.dtype, weight.device)
                self.register_buffer(f"{name}_{number}", cache, persistent=False)
        seen = torch.zeros(slots, self.vocabulary, dtype=torch.bool, device=weight.device)
        self.register_buffer("seen", seen, persistent=False)

    def prefill(
        self, ids: Tensor, count: Tensor, start: Tensor, pages: Tensor, slot: Tensor, sampling: Sampling,
        length: Tensor | None = None,
    ) -> Result:  # fmt: skip
        """Reads the first `count` (batch,) of the tokens `ids` (batch, seq), behind the `start` (batch,) tokens that the lane's
        pages hold; `start` 0 begins a new text.  `pages` (batch, blocks) has those for the chunk, too; `slot` (batch,).  All int64.

        Gives `token`, int64 (batch,), the one behind the chunk, which counts where the prompt is at its end; `logprob`, float32
        (batch,); `top_token`, int64, and `top_logprob`, float32 (batch, 20), zeros unless `sampling.alternatives` asks for any.

        `length`, int64 (batch,), belongs to models whose rope depends on the length of a text, and is the whole prompt's.  Some of
        these read a text again when it outgrows their first context: `reread`, bool (batch,), says that this comes next.  Then the
        caller reads the text from its start, with the token that this call gave, and its new length as `length`.
        """
        lanes = Lanes(start, count, pages)
        batch, seq = ids.shape
        keys, values = self._cache()
        last = torch.arange(batch, device=ids.device) * seq + (count - 1).clamp(min=0)
        logits = self.logits(ids, lanes.positions(seq), Pages(keys, values, self.layers, lanes, seq), last, length)
        counts = torch.arange(seq, device=ids.device) < count[:, None]
        seen = self.seen[slot] & (start > 0)[:, None]
        seen = seen.scatter(1, torch.where(counts, ids, ids[:, :1]), True) & (count > 0)[:, None]
        self.seen[slot] = seen
        token = sample(logits, seen, start + count, sampling)
        best, logprobs = alternatives(logits, sampling.alternatives)
        made = {"token": token, "logprob": log_probability(logits, token), "top_token": best, "top_logprob": logprobs}
        return made | self._reread(start + count)

    def decode(self, ids: Tensor, count: Tensor, start: Tensor, pages: Tensor, slot: Tensor, sampling: Sampling) -> Result:
        """`prefill` for one token of each lane: `ids` (batch, 1), `count` 1, or 0 where the lane is off."""
        return self.prefill(ids, count, start, pages, slot, sampling)

    def generate(
        self, ids: Tensor, start: Tensor, pages: Tensor, slot: Tensor, sampling: Sampling, stop: Tensor, limit: Tensor
    ) -> Result:
        """Goes on from a token of each lane, `ids` (batch, 1), until one of `stop` (batch, 8), -1 for none, or `limit` (batch,)
        tokens, at most `turns`.  The lane's pages need a place for every token that is read: `start + limit` in all.  All int64.

        Gives `tokens`, int64 (batch, turns), the stop token among them and -1 behind it; `logprobs`, float32, the same shape; and
        `count`, int64 (batch,); and `reread` as `prefill` does: a lane ends there, too.
        """
        keys, values = self._cache()
        batch = ids.shape[0]
        tail = [
            each.new_zeros(batch, each.shape[1], self.turns, each.shape[3])
            for pair in zip(keys, values, strict=True)
            for each in pair
        ]
        turns = torch.arange(self.turns, device=ids.device)

        def more(turn: Tensor, token: Tensor, made: Tensor, on: Tensor, *_: Tensor) -> Tensor:
            return (turn < self.turns) & on.any()

        def step(
            turn: Tensor, token: Tensor, made: Tensor, on: Tensor, tokens: Tensor, logprobs: Tensor, seen: Tensor, *tail: Tensor
        ) -> tuple[Tensor, ...]:
            cache = Loop(keys, values, self.layers, tail, pages, start, turn)
            place = torch.where(on, start + turn, 0)
            seen = seen | (torch.arange(self.vocabulary, device=token.device) == token[:, None]) & on[:, None]
            logits = self.logits(token[:, None], place[:, None], cache, torch.arange(batch, device=token.device))
            new = sample(logits, seen, start + turn + 1, sampling)
            logprob = log_probability(logits, new)
            now = (turns == turn) & on[:, None]
            made = made + on
            on = on & (new[:, None] != stop).all(1) & (made < limit)
            if self.reread_at:
                on = on & (start + turn + 1 != self.reread_at)
            return (
                turn + 1, new, made, on, torch.where(now, new[:, None], tokens), torch.where(now, logprob[:, None], logprobs), seen,
                *cache.tail,
            )  # fmt: skip

        zero = torch.zeros_like(start)
        tokens = torch.full((batch, self.turns), -1, dtype=torch.int64, device=ids.device)
        begin = (zero[0].clone(), ids[:, 0].clone(), zero, limit > 0, tokens, tokens * 0.0, self.seen[slot], *tail)
        _, _, made, _, tokens, logprobs, seen, *tail = while_loop(more, step, begin)
        for cache, rows in zip([each for pair in zip(keys, values, strict=True) for each in pair], tail, strict=True):
            write(cache, rows.transpose(1, 2), Lanes(start, made, pages))
        self.seen[slot] = seen & (limit > 0)[:, None]
        return {"tokens": tokens, "logprobs": logprobs, "count": made} | self._reread(start + made)

    def _reread(self, place: Tensor) -> Result:
        """Whether the text has to be read again, from its start and with its new length, before its token at `place` is read."""
        return {"reread": place == self.reread_at} if self.reread_at else {}

    def _cache(self) -> tuple[list[Tensor], list[Tensor]]:
        keys, values = [[self.get_buffer(f"{name}_{layer}") for layer in range(len(self.layers))] for name in ("keys", "values")]
        return keys, values

    def logits(
        self, ids: Tensor, places: Tensor, cache: Pages | Loop | Probe, rows: Tensor, length: Tensor | None = None
    ) -> Tensor:
        """ids and places (batch, seq) -> float32 (len(rows), vocabulary), of the tokens at `rows` of all, lane behind lane.

        `length` (batch,): of the prompts, as `prefill` takes it.
        """
        if self.by_length:
            places = with_length(places, length)
        made = self.network(
            input_ids=ids.reshape(1, -1), position_ids=places.reshape(1, -1), use_cache=False, logits_to_keep=rows, cache=cache
        )
        return (made.logits[0] if self.keeps_rows else made.logits[0][rows]).float()


def compare(config: PretrainedConfig) -> None:
    """Raises Refused where a small copy of a model gives another text than transformers."""
    comparison.compare_small(config, small)


def small(network: nn.Module) -> CausalLM:
    """A model with a cache for a comparison."""
    return CausalLM(network, comparison.PAGES, comparison.SLOTS, comparison.TURNS)


def model() -> nn.Module:
    """The model in eval mode; the same weights in every process."""
    if DTYPE not in DTYPES:
        raise ValueError(f"CAUSAL_LM_DTYPE: expected one of {', '.join(DTYPES)}, got {DTYPE!r}")
    if WEIGHTS not in ("", "int8"):
        raise ValueError(f"CAUSAL_LM_WEIGHTS: expected int8 or nothing, got {WEIGHTS!r}")
    process, _, compared = os.environ.get(COMPARED, "").partition(" ")
    first = process == str(os.getpid()) or compared != f"{NAME} {DTYPE}"
    if first:
        compare(configuration(NAME))
    made = network(NAME, DTYPES[DTYPE])
    if first:
        if NAME not in CONFIGURATIONS:
            comparison.compare_weights(made, small)
        os.environ[COMPARED] = f"{os.getpid()} {NAME} {DTYPE}"
    return CausalLM(int8_weights(made) if WEIGHTS else made).eval()


def lanes(batch: int, blocks: int, seq: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(count, start, pages, slot) of lanes that share no page, with tokens before and up to `seq` new ones.  Where pages or slots
    do not suffice, the last lanes are off."""
    each = max(1, min(blocks, (PAGES - 1) // batch))
    number = torch.arange(batch)
    on = (number < SLOTS - 1) & ((number + 1) * each < PAGES)
    order = 1 + torch.randperm(PAGES - 1)
    pages = order[(number[:, None] * each + torch.arange(blocks)) % (PAGES - 1)]
    pages = torch.where(on[:, None] & (torch.arange(blocks) < each), pages, 0)
    count = torch.randint(1, min(seq, each * PAGE) + 1, (batch,))
    start = (torch.rand(batch) * (each * PAGE - count + 1)).long()
    return count * on, start * on, pages, (1 + torch.randperm(SLOTS - 1)[number % (SLOTS - 1)]) * on


def sampling_of(batch: int) -> Sampling:
    """Lanes of every kind."""
    warm = torch.arange(batch) % 2
    return Sampling(
        temperature=warm * 0.8, top_k=warm * 20, top_p=1 - warm * 0.1, penalty=1 + warm * 0.1,
        seed=torch.randint(0, 1 << 62, (batch,)), alternatives=1 - warm,
    )  # fmt: skip


def prompts(batch: int, seq: int, blocks: int) -> tuple[object, ...]:
    """Chunks of up to `seq` tokens for `batch` lanes with tables of `blocks` pages."""
    ids, count, start, *others = chunks(batch, seq, blocks)
    length = [start + count + torch.randint(0, blocks * PAGE, (batch,))] if depends_on_length(configuration(NAME)) else []
    return ids, count, start, *others, *length


def tokens(batch: int, blocks: int) -> tuple[object, ...]:
    """A token for each lane."""
    return chunks(batch, 1, blocks)


def chunks(batch: int, seq: int, blocks: int) -> tuple[object, ...]:
    """What `prefill` and `decode` take of every model."""
    vocabulary = configuration(NAME).get_text_config().vocab_size
    return torch.randint(0, vocabulary, (batch, seq)), *lanes(batch, blocks, seq), sampling_of(batch)


def texts(batch: int, blocks: int) -> tuple[object, ...]:
    """A token for each lane to go on from."""
    ids, _, start, pages, slot, sampling = tokens(batch, blocks)
    capacity = (pages > 0).sum(1) * PAGE
    limit = torch.minimum(capacity - start, torch.randint(1, TURNS + 1, (batch,))).clamp(min=0)
    return ids, start, pages, slot, sampling, torch.full((batch, STOPS), -1), limit


def entries() -> dict[str, Callable[..., tuple[object, ...]]]:
    """The methods that are called, and what makes their inputs."""
    return {"prefill": prompts, "decode": tokens} | ({"generate": texts} if TURNS else {})
