"""A cache for calls with one row per lane, with the interface of transformers' Cache.  It serves models that compute attention in
their own code, and layers that keep a state instead of keys and values.

transformers pads texts of different lengths on the left, and so does this module: the last token of every lane is last in its row.
The model reads from the cache the keys of its lane in order, the newest last.  The attention mask marks the padding.  A state has a
row for every slot, and zeros for a new text.
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
    """The state of a layer from token to token: the last inputs of a convolution (`kind` "conv") or a sum over all tokens
    ("recurrent"). `number`: its index among the layer's states of that kind; `shape`: for one lane."""

    kind: str
    layer: int
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Kept(NamedTuple):
    """What a model keeps of earlier tokens: `layers` with keys; `numbers`, which maps numbers of all layers to indices in `layers`;
    and `states`. `by_lane`: whether calls have a row for every lane and a LaneCache; otherwise one row holds the tokens
    of all lanes.

    In `numbers`, the indexer of a layer with sparse attention has the key ("index", layer).  One half of the indexer's keys is
    stored as keys, the other half as values.
    """

    layers: list[Layer]
    numbers: Mapping[int | tuple[str, int], int]
    states: list[State]
    by_lane: bool


class LayerStates(NamedTuple):
    """The states of a layer by number, for transformers without get_conv_state() (5.17; 5.23 has it)."""

    conv_states: dict[int, Tensor]
    recurrent_states: dict[int, Tensor]
    record_past: bool = False
    is_compileable: bool = False


class LaneCache(Cache):
    """transformers' cache for one call of the network.  Afterwards `states` contains the new states.

    `tokens`: where keys and values are written.
    """

    def __init__(self, tokens: Pages | Loop, kept: Kept, states: Sequence[Tensor]) -> None:
        self.tokens, self.numbers = tokens, kept.numbers
        self.rows = {(state.kind, state.layer, state.number): row for row, state in enumerate(kept.states)}
        self.states = [state.clone() for state in states]  # the model's code writes to them
        self.depth = max([0, *[state.layer + 1 for state in kept.states]])  # Dynamo does not support max(..., default=0)
        self.width = tokens.pages.shape[1] * PAGE

    @property
    def layers(self) -> list[LayerStates]:
        layers = [LayerStates({}, {}) for _ in range(self.depth)]
        for (kind, layer, number), row in self.rows.items():
            (layers[layer].conv_states if kind == "conv" else layers[layer].recurrent_states)[number] = self.states[row]
        return layers

    def mask(self) -> Tensor:
        """Returns the attention mask, int64 (batch, width): 1 at the tokens of a lane's text, which are last; at the last
        position if the lane is off."""
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
        """The name of get_recurrent_state() in MiniMax's code."""
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
