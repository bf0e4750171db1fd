"""A decoder of transformers with its cache, in the form of entries that a server calls.  A *lane* is a row of the batch.

Four entries share the weights and the cache of keys and values, which is divided into pages (attention.py):

    prefill   reads a chunk of a prompt for each lane, of any length up to `seq`, and chooses the next token
    decode    reads one token for each lane, and chooses the next one
    generate  chooses up to `turns` tokens for each lane in one launch, until a stop token or the lane's limit
    choose    chooses the next token of lanes whose token is restricted by a grammar or by biases

The mask of allowed tokens depends on the previous token.  So `prefill` and `decode` take no mask.  A lane that is `deferred` stores
its logits in its slot.  Meanwhile the CPU computes the mask, which `choose` applies.  Other lanes write zeros to slot 0.

The pages of a lane are an input; the caller allocates them.  Between two calls a request may start, end, or pass its pages to
another request.  Its *slot* is also an input: a row of the buffers with the data of requests.  Page 0 and slot 0 belong to no
request.  A lane without a request is *off*: it has count 0 (`generate`: limit 0), pages 0 and slot 0, and changes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..model.quantization.stored_weights import Quantization
from .architectures.lane_cache import LaneCache
from .attention import Lanes, Loop, Pages, empty_pages, write
from .comparison.cache_probe import probe_cache
from .comparison.probe import Probe
from .control_flow import while_loop
from .positions import depends_on_length, reread_length, ropes_by_length, temperatures_by_place, with_length
from .sampling import Restriction, Sampling, alternatives, log_probability, restricted, sample, with_changes
from .settings import PAGE

STOPS = 8
"""Maximum number of stop tokens of a lane; unused positions hold -1."""

Result = dict[str, Tensor]


class CausalLM(nn.Module):
    """A model of transformers with its cache.  It uses the attention `paged`, or the model's own attention over keys in pages
    (architectures/lane_cache.py).

    Calls change these buffers: `keys_N` and `values_N` of the N-th layer with keys, (pages, key heads, PAGE, dim); `state_N`,
    (slots, ...), of layers with a state; `seen`, bool (slots, vocabulary), the tokens that occur in a slot's text; `deferred` and
    `biases`, float32 (slots, vocabulary), the logits for `choose` and the biases that it adds to them.
    """

    def __init__(self, network: Any, pages: int, slots: int, turns: int) -> None:
        """`network`: from `networks`, with attention over pages.  `pages` (of PAGE tokens) and `slots`: how many there are,
        including number 0.  `turns`: the maximum number of tokens of a call of `generate`.  Raises language-model-refused."""
        super().__init__()
        self.network = ropes_by_length(network)
        self.by_length, self.reread_at = depends_on_length(network.config), reread_length(network)
        self.takes = tuple(inspect.signature(network.forward).parameters)
        self.turns = turns
        self.quantization: Quantization | None = None
        self.vocabulary = network.config.get_text_config().vocab_size
        weight = next(network.parameters())
        self.kept = probe_cache(network)
        self.layers = self.kept.layers
        if not self.kept.by_lane:
            temperatures_by_place(network)
        for number, layer in enumerate(self.layers):
            for name in ("keys", "values"):
                cache = empty_pages((pages, layer.heads, PAGE, layer.dim), weight.dtype, weight.device)
                self.register_buffer(f"{name}_{number}", cache, persistent=False)
        for number, state in enumerate(self.kept.states):
            rows = torch.zeros(slots, *state.shape, dtype=state.dtype, device=weight.device)
            self.register_buffer(f"state_{number}", rows, persistent=False)
        seen = torch.zeros(slots, self.vocabulary, dtype=torch.bool, device=weight.device)
        self.register_buffer("seen", seen, persistent=False)
        for name in ("deferred", "biases"):
            rows = torch.zeros(slots, self.vocabulary, device=weight.device)
            self.register_buffer(name, rows, persistent=False)

    def prefill(
        self, ids: Tensor, count: Tensor, start: Tensor, pages: Tensor, slot: Tensor, sampling: Sampling,
        length: Tensor | None = None,
    ) -> Result:  # fmt: skip
        """Reads the first `count` (batch,) of the tokens `ids` (batch, seq), after the `start` (batch,) tokens in the lane's pages;
        `start` 0 begins a new text.  `pages` (batch, blocks) includes the pages for the chunk; `slot` (batch,).  All int64.

        Consecutive lanes may hold consecutive chunks of one text, with its pages and slot: every layer writes all lanes before it
        reads.  But the slot records the tokens of only one lane.  So texts with a `penalty` need a single lane, and models with
        states do, too.

        Returns `token`, int64 (batch,), the token after the chunk, valid only at the end of the prompt; `logprob`, float32
        (batch,); `top_token`, int64, and `top_logprob`, float32 (batch, 20), zeros unless `sampling.alternatives` requests them.

        If `sampling.deferred` is 1, the logits are stored in the lane's slot, and the token of `choose` replaces this one.

        `length`, int64 (batch,), is the length of the whole prompt, for models whose rope depends on the length of a text.  Some of
        these models must read a text again when it exceeds their original context.  They also return `reread`, bool (batch,).  If
        it is True, the caller next reads the text from its start, with the token of this call and its new length as `length`.
        """
        lanes = Lanes(start, count, pages)
        batch, seq = ids.shape
        if self.kept.by_lane:
            logits = self._read(ids, lanes, slot, length)
        else:
            last = torch.arange(batch, device=ids.device) * seq + (count - 1).clamp(min=0)
            logits = self.logits(ids, lanes.positions(seq), Pages(*self._cache(), self.layers, lanes, seq), last, length)
        used = torch.arange(seq, device=ids.device) < count[:, None]
        seen = self.seen[slot] & (start > 0)[:, None]
        seen = seen.scatter(1, torch.where(used, ids, ids[:, :1]), True) & (count > 0)[:, None]
        self.seen[slot] = seen
        deferred = (sampling.deferred > 0) & (count > 0)
        self.deferred[torch.where(deferred, slot, 0)] = torch.where(deferred[:, None], logits, 0.0)  # only slot 0 is written twice
        return self._chosen(logits, logits, seen, start + count, sampling) | self._reread(start + count)

    def decode(self, ids: Tensor, count: Tensor, start: Tensor, pages: Tensor, slot: Tensor, sampling: Sampling) -> Result:
        """Runs `prefill` for one token of each lane: `ids` (batch, 1), `count` 1, or 0 if the lane is off."""
        return self.prefill(ids, count, start, pages, slot, sampling)

    def choose(self, slot: Tensor, place: Tensor, sampling: Sampling, restriction: Restriction) -> Result:
        """Chooses the token at `place` (batch,) of a lane's text, from the logits in its `slot` (batch,).  Slot 0 is a lane that is
        off.  Returns what `prefill` returns; log-probabilities are those before the restriction."""
        logits, biases = self.deferred[slot], with_changes(self.biases[slot], restriction)
        self.biases[slot] = torch.where(slot[:, None] > 0, biases, 0.0)
        return self._chosen(logits, restricted(logits, biases, restriction.mask), self.seen[slot], place, sampling)

    def _chosen(self, logits: Tensor, adjusted: Tensor, seen: Tensor, place: Tensor, sampling: Sampling) -> Result:
        """Samples tokens from the logits `adjusted`.  Returns them with their log-probabilities according to `logits`."""
        token = sample(adjusted, seen, place, sampling)
        best, logprobs = alternatives(logits, sampling.alternatives)
        return {"token": token, "logprob": log_probability(logits, token), "top_token": best, "top_logprob": logprobs}

    def generate(
        self, ids: Tensor, start: Tensor, pages: Tensor, slot: Tensor, sampling: Sampling, stop: Tensor, limit: Tensor
    ) -> Result:
        """Continues after a token of each lane, `ids` (batch, 1).  A lane ends at a token of `stop` (batch, 8; -1 for none), or
        after `limit` (batch,) tokens, at most `turns`.  The lane's pages need space for all tokens that are read: `start + limit`.
        All int64.

        Returns `tokens`, int64 (batch, turns), which end with the stop token and then -1; `logprobs`, float32, the same shape;
        `count`, int64 (batch,); and `reread` as in `prefill`.  A lane also ends when its text must be read again.
        """
        batch = ids.shape[0]
        tail, states = self._tail(batch, self.turns), self._states(start, slot)
        turns, on_gpu = torch.arange(self.turns, device=ids.device), ids.device.type != "cpu"
        others, kept = (turns, start, pages, stop, limit, *sampling), len(tail) + len(states)

        def unfinished(turn: Tensor, token: Tensor, counts: Tensor, on: Tensor, *_: Tensor) -> Tensor:
            return (turn < self.turns) & on.any()

        def step(
            turn: Tensor,
            token: Tensor,
            counts: Tensor,
            on: Tensor,
            tokens: Tensor,
            logprobs: Tensor,
            seen: Tensor,
            *values: Tensor,
        ) -> tuple[Tensor, ...]:
            carried, (turns, start, pages, stop, limit, *numbers) = values[:kept], values[kept:]
            sampling = Sampling(*numbers)
            seen = seen | (torch.arange(self.vocabulary, device=token.device) == token[:, None]) & on[:, None]
            logits, new_carried = self._turn(token[:, None], start, turn, on, pages, carried, on_gpu)
            new = sample(logits, seen, start + turn + 1, sampling)
            logprob = log_probability(logits, new)
            column = (turns == turn) & on[:, None]
            counts = counts + on
            on = on & (new[:, None] != stop).all(1) & (counts < limit)
            if self.reread_at:
                on = on & (start + turn + 1 != self.reread_at)
            return (
                turn + 1, new, counts, on, torch.where(column, new[:, None], tokens),
                torch.where(column, logprob[:, None], logprobs), seen, *new_carried,
            )  # fmt: skip

        zero = torch.zeros_like(start)
        tokens = torch.full((batch, self.turns), -1, dtype=torch.int64, device=ids.device)
        begin = (zero[0].clone(), ids[:, 0].clone(), zero, limit > 0, tokens, tokens * 0.0, self.seen[slot], *tail, *states)
        _, _, counts, _, tokens, logprobs, seen, *carried = while_loop(unfinished, step, begin, others, self, self._read_in_loops())
        self._keep(carried, Lanes(start, counts, pages), slot)
        self.seen[slot] = seen & (limit > 0)[:, None]
        return {"tokens": tokens, "logprobs": logprobs, "count": counts} | self._reread(start + counts)

    def _reread(self, place: Tensor) -> Result:
        """Returns `reread`: whether the text must be read again from its start, with its new length, before its token `place`."""
        return {"reread": place == self.reread_at} if self.reread_at else {}

    def _cache(self) -> tuple[list[Tensor], list[Tensor]]:
        keys, values = [[self.get_buffer(f"{name}_{layer}") for layer in range(len(self.layers))] for name in ("keys", "values")]
        return keys, values

    def _read_in_loops(self) -> dict[str, Tensor]:
        """Returns the parameters and buffers that a token needs: those of the network, keys and values."""
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        return {name: tensor for name, tensor in tensors.items() if name.startswith(("network.", "keys_", "values_"))}

    def _tail(self, batch: int, turns: int) -> list[Tensor]:
        """Returns zeros for the keys and values of `turns` tokens of every lane, layer by layer."""
        return [
            pool.new_zeros(batch, pool.shape[1], turns, pool.shape[3]) for pair in zip(*self._cache(), strict=True) for pool in pair
        ]

    def _states(self, start: Tensor, slot: Tensor) -> list[Tensor]:
        """Returns the states of every lane, zeros at the start of a text."""
        states = [self.get_buffer(f"state_{number}")[slot] for number in range(len(self.kept.states))]
        return [where_lanes(start > 0, state, torch.zeros_like(state)) for state in states]

    def _keep(self, carried: Sequence[Tensor], lanes: Lanes, slot: Tensor) -> None:
        """Writes the tensors that a loop carried: keys and values to the pages, states to the slots."""
        tail, states = carried[: 2 * len(self.layers)], carried[2 * len(self.layers) :]
        for cache, rows in zip([pool for pair in zip(*self._cache(), strict=True) for pool in pair], tail, strict=True):
            write(cache, rows.transpose(1, 2), lanes)
        self._keep_states(states, lanes, slot)

    def _keep_states(self, states: Sequence[Tensor], lanes: Lanes, slot: Tensor) -> None:
        for number, state in enumerate(states):
            self.get_buffer(f"state_{number}")[slot] = where_lanes(lanes.count > 0, state, torch.zeros_like(state))

    def _turn(
        self, ids: Tensor, start: Tensor, turn: Tensor, on: Tensor, pages: Tensor, carried: Sequence[Tensor], on_gpu: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the logits after one token of each lane, `ids` (batch, 1), in iteration `turn` of a loop.  Also returns the new
        carried tensors: the tail of every layer, and states, which change only in lanes that are `on`."""
        tail, states = carried[: 2 * len(self.layers)], carried[2 * len(self.layers) :]
        tokens = Loop(*self._cache(), self.layers, tail, pages, start, turn, on_gpu)
        places = torch.where(on, start + turn, 0)[:, None]
        if not self.kept.by_lane:
            return self.logits(ids, places, tokens, torch.arange(ids.shape[0], device=ids.device)), tokens.tail
        cache = LaneCache(tokens, self.kept, states)
        logits = self.lane_logits(ids, places, cache, None)
        # torch 2.11 refuses a loop that returns an operand unchanged, as a layer without attention does
        kept = [new.clone() if new is old else new for new, old in zip(tokens.tail, tail, strict=True)]
        return logits, kept + [where_lanes(on, *pair) for pair in zip(cache.states, states, strict=True)]

    def _read(self, ids: Tensor, lanes: Lanes, slot: Tensor, length: Tensor | None) -> Tensor:
        """Runs the network of `prefill` if it takes one row for each lane.  Returns its logits.

        A state depends on all tokens of its row, also on padding.  So models with states read tokens one by one.
        """
        seq = ids.shape[1]
        states = self._states(lanes.start, slot)
        if states and seq > 1:
            return self._read_one_by_one(ids, lanes, slot, states)
        step = (torch.arange(seq, device=ids.device) + (lanes.count - seq)[:, None]).clamp(min=0)
        cache = LaneCache(Pages(*self._cache(), self.layers, lanes, seq), self.kept, states)
        logits = self.lane_logits(ids.gather(1, step), lanes.start[:, None] + step, cache, length)
        self._keep_states(cache.states, lanes, slot)
        return logits

    def _read_one_by_one(self, ids: Tensor, lanes: Lanes, slot: Tensor, states: Sequence[Tensor]) -> Tensor:
        (batch, seq), on_gpu = ids.shape, ids.device.type != "cpu"

        def unfinished(turn: Tensor, *values: Tensor) -> Tensor:
            *_, count, _pages = values
            return turn < count.max()

        def step(turn: Tensor, logits: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
            *carried, ids, start, count, pages = values
            on = turn < count
            token = ids.index_select(1, turn.view(1))
            new, new_carried = self._turn(token, start, turn, on, pages, carried, on_gpu)
            return turn + 1, torch.where(on[:, None], new, logits), *new_carried

        logits = torch.zeros(batch, self.vocabulary, device=ids.device)
        begin = (torch.zeros_like(lanes.start[0]), logits, *self._tail(batch, seq), *states)
        others = (ids, lanes.start, lanes.count, lanes.pages)
        _, logits, *carried = while_loop(unfinished, step, begin, others, self, self._read_in_loops())
        self._keep(carried, lanes, slot)
        return logits

    def lane_logits(self, ids: Tensor, places: Tensor, cache: LaneCache, length: Tensor | None) -> Tensor:
        """ids and positions (batch, seq), padded on the left -> logits of each lane's last token, float32 (batch, vocabulary)."""
        if self.by_length:
            places = with_length(places, length)
        values = {
            "input_ids": ids, "position_ids": places, "past_key_values": cache, "cache_params": cache, "use_cache": False,
            "logits_to_keep": 1, "attention_mask": cache.mask() if self.kept.numbers else None,
        }  # fmt: skip
        output = self.network(**{name: value for name, value in values.items() if name in self.takes})
        return output.logits[:, -1].float()

    def logits(
        self, ids: Tensor, places: Tensor, cache: Pages | Loop | Probe, rows: Tensor, length: Tensor | None = None
    ) -> Tensor:
        """ids and positions (batch, seq) -> logits, float32 (len(rows), vocabulary), of tokens at `rows` in the concatenated lanes.

        `length` (batch,): of the prompts, as in `prefill`.
        """
        if self.by_length:
            places = with_length(places, length)
        output = self.network(
            input_ids=ids.reshape(1, -1), position_ids=places.reshape(1, -1), use_cache=False, logits_to_keep=rows, cache=cache
        )
        return (output.logits[0] if "logits_to_keep" in self.takes else output.logits[0][rows]).float()


def where_lanes(on: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Returns rows of `new` (batch, ...) for lanes that are on, bool (batch,), else of `old`."""
    return torch.where(on.view(-1, *[1] * (new.dim() - 1)), new, old)
