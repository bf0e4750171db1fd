"""Makes example inputs of a language model's entries, with which a build exports, records and verifies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from .causal_lm import STOPS
from .positions import depends_on_length
from .sampling import BIASES, Restriction, Sampling, words_of
from .settings import PAGE

EXAMPLE_TURNS = 5
"""Maximum number of tokens of an example of `generate`: a build runs it in eager PyTorch, and all iterations are alike."""

UNREAD = 2
"""An example lane has at most a page of earlier tokens, plus this number for each new token.  Keys and values of earlier tokens are
zeros in the first call.  Hundreds of zeros increase rounding errors a hundredfold (SmolLM2: 5e-4 of the log-probabilities, without
zeros 2e-5)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleInputs:
    """Makes inputs for a CausalLM with this configuration, `pages`, `slots` and `turns`; for an AdaptedLM if there are
    `adapters`."""

    config: PretrainedConfig
    pages: int
    slots: int
    turns: int
    adapters: int = 0

    def entries(self) -> dict[str, Callable[..., tuple[object, ...]]]:
        """Maps the entries of a CausalLM to functions that make their inputs; without `generate` if `turns` is 0."""
        makers: dict[str, Callable[..., tuple[object, ...]]] = {
            "prefill": self.prefill, "decode": self.decode, "choose": self.choose,
        }  # fmt: skip
        return makers | ({"generate": self.generate} if self.turns else {})

    def prefill(self, batch: int, seq: int, blocks: int) -> tuple[object, ...]:
        """Makes chunks of up to `seq` tokens for `batch` lanes with tables of `blocks` pages."""
        ids, count, start, *others = self._chunks(batch, seq, blocks)
        length = [start + count + torch.randint(0, blocks * PAGE, (batch,))] if depends_on_length(self.config) else []
        return ids, count, start, *others, *length

    def decode(self, batch: int, blocks: int) -> tuple[object, ...]:
        """Makes a token for each lane."""
        return self._chunks(batch, 1, blocks)

    def generate(self, batch: int, blocks: int) -> tuple[object, ...]:
        """Makes the token of each lane after which `generate` continues, and the number of tokens to generate."""
        ids, _, start, pages, *others = self._chunks(batch, 1, blocks)
        capacity = (pages > 0).sum(1) * PAGE
        limit = torch.minimum(capacity - start, torch.randint(1, min(self.turns, EXAMPLE_TURNS) + 1, (batch,))).clamp(min=0)
        return ids, start, pages, *others, torch.full((batch, STOPS), -1), limit

    def choose(self, batch: int) -> tuple[object, ...]:
        """Makes masks that allow half of all tokens."""
        vocabulary, slots = self.config.get_text_config().vocab_size, self.slots - 1
        slot = (1 + torch.randperm(slots)[torch.arange(batch) % slots]) * (torch.arange(batch) < slots)
        mask = torch.randint(-(1 << 31), 1 << 31, (batch, words_of(vocabulary)), dtype=torch.int32)
        token = torch.randint(0, vocabulary, (batch, BIASES))
        restriction = Restriction(mask=mask, token=token, bias=token.sin(), fresh=torch.arange(batch) % 2)
        return slot, torch.randint(0, 1 << 20, (batch,)), sampling_of(batch), restriction

    def _chunks(self, batch: int, seq: int, blocks: int) -> tuple[Tensor, Tensor, Tensor, Tensor, *tuple[object, ...]]:
        """Returns the inputs of `prefill` and `decode` for every model: ids, count, start, pages, slot, adapter if there are any,
        and sampling."""
        vocabulary = self.config.get_text_config().vocab_size
        ids, (count, start, pages, slot) = torch.randint(0, vocabulary, (batch, seq)), self._lanes(batch, blocks, seq)
        adapter = [torch.randint(0, self.adapters + 1, (batch,))] if self.adapters else []
        return ids, count, start, pages, slot, *adapter, sampling_of(batch)

    def _lanes(self, batch: int, blocks: int, seq: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns (count, start, pages, slot) of lanes that share no page, with earlier tokens and up to `seq` new ones.  If there
        are too few pages or slots, the last lanes are off."""
        share = max(1, min(blocks, (self.pages - 1) // batch))
        number = torch.arange(batch)
        on = (number < self.slots - 1) & ((number + 1) * share < self.pages)
        permutation = 1 + torch.randperm(self.pages - 1)
        pages = permutation[(number[:, None] * share + torch.arange(blocks)) % (self.pages - 1)]
        pages = torch.where(on[:, None] & (torch.arange(blocks) < share), pages, 0)
        count = torch.randint(1, min(seq, share * PAGE) + 1, (batch,))
        room = torch.minimum(share * PAGE - count, UNREAD * count + PAGE)
        start = (torch.rand(batch) * (room + 1)).long()
        return count * on, start * on, pages, (1 + torch.randperm(self.slots - 1)[number % (self.slots - 1)]) * on


def sampling_of(batch: int) -> Sampling:
    """Returns parameters for lanes that are greedy and lanes that sample with all filters, alternately."""
    warm = torch.arange(batch) % 2
    return Sampling(
        temperature=warm * 0.8, top_k=warm * 20, top_p=1 - warm * 0.1, penalty=1 + warm * 0.1,
        seed=torch.randint(0, 1 << 62, (batch,)), alternatives=1 - warm, min_p=warm * 0.05, deferred=1 - warm,
    )  # fmt: skip
