"""The cache of a call whose lanes lie side by side, as transformers' own code reads it: for models that compute attention
themselves, and for those with layers that keep a state instead of keys and values.

transformers batches texts of different lengths by padding them on the left.  So does this: the last token of every lane is last in
its row, and what the model's code finds in the cache are the keys of its lane in their order, with the newest last.  The attention
mask says which are padding.  A state has a row for every slot; a text that begins has zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from ..attention import Loop, Pages
from ..comparison.probe import Layer
from ..settings import PAGE


class State(NamedTuple):
    """What a layer carries from token to token: the last inputs of a convolution (`kind` "conv") or a sum of all tokens
    ("recurrent"); the `number`-th of its kind in the layer; its shape for one lane."""

    kind: str
    layer: int
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Kept(NamedTuple):
    """What a model keeps of the tokens before: `layers` with keys, `numbers` of these by their number among all layers, and
    `states`.  `by_lane`: it is called with a row for every lane, and a LaneCache; else with all tokens in one row.

    An index of tokens, by which a layer chooses those that it attends to, has a number as ("index", layer): one half of its keys
    lies among the keys, the other among the values.
    """

    layers: list[Layer]
    numbers: Mapping[int | tuple[str, int], int]
    states: list[State]
    by_lane: bool


class LayerStates(NamedTuple):
    """The states of a layer by number, where transformers before get_conv_state() reads them (5.17; 5.23 has it)."""

    conv_states: dict[int, Tensor]
    recurrent_states: dict[int, Tensor]
    record_past: bool = False
    is_compileable: bool = False


class LaneCache(Cache):
    """transformers' cache for one call of the network, which leaves the new states in `states`.

    `tokens`: where keys and values go.
    """

    def __init__(self, tokens: Pages | Loop, kept: Kept, states: Sequence[Tensor]) -> None:
        self.tokens, self.numbers = tokens, kept.numbers
        self.rows = {(state.kind, state.layer, state.number): row for row, state in enumerate(kept.states)}
        self.states = [state.clone() for state in states]  # which the model's code writes to
        self.depth = max([0, *[state.layer + 1 for state in kept.states]])  # Dynamo takes no default
        self.width = tokens.pages.shape[1] * PAGE

    @property
    def layers(self) -> list[LayerStates]:
        layers = [LayerStates({}, {}) for _ in range(self.depth)]
        for (kind, layer, number), row in self.rows.items():
            (layers[layer].conv_states if kind == "conv" else layers[layer].recurrent_states)[number] = self.states[row]
        return layers

    def mask(self) -> Tensor:
        """Which of the last `width` tokens of every lane there are, int64 (batch, width); a lane that is off has one."""
        step = torch.arange(self.width, device=self.tokens.start.device)
        return ((step >= self.width - self.tokens.ends()[:, None]) | (step == self.width - 1)).long()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        number = self.numbers[layer_idx]
        return self.tokens.put("keys", number, key_states), self.tokens.put("values", number, value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        number = self.numbers["index", layer_idx]
        halves = [
            self.tokens.put(kind, number, half[:, None])
            for kind, half in zip(("keys", "values"), indexer_key_states.chunk(2, -1), strict=True)
        ]
        return torch.cat(halves, -1)[:, 0]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.states[self.rows["conv", layer_idx, state_idx]]

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        row = self.rows["conv", layer_idx, state_idx]
        old = self.states[row]
        full = torch.cat([old, conv_states], -1)
        self.states[row] = full[..., -old.shape[-1] :]
        return full

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.states[self.rows["recurrent", layer_idx, state_idx]]

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        row = self.rows["recurrent", layer_idx, state_idx]
        self.states[row] = recurrent_states.to(self.states[row].dtype)
        return self.states[row]

    def get_linear_cache(self, layer_idx: int) -> Tensor:
        """MiniMax's name of it."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.width - self.tokens.seq

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.width - self.tokens.seq

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.width, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1
