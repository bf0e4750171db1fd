"""Keeps RecurrentGemma's states in the cache of a call: transformers (5.17, 5.23) keeps them as attributes of its modules."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .lane_cache import Kept, State

BLOCK = "RecurrentGemmaRecurrentBlock"
UNIT = ("num_attention_heads", "block_width", "recurrent_param", "input_gate_weight", "input_gate_bias", "recurrent_gate_weight",
        "recurrent_gate_bias")  # fmt: skip
"""Attributes that the code of a gated linear recurrent unit reads from its module."""


class Unit:
    """Replaces the module of a gated linear recurrent unit for one call of its code, which stores the new state in this object."""

    def __init__(self, module: Any, states: Tensor) -> None:
        for name in UNIT:
            setattr(self, name, getattr(module, name))
        self.code, self.recurrent_states = type(module), states

    def _rnn_scan(self, **options: Any) -> tuple[Tensor, Tensor]:
        return self.code._rnn_scan(self, **options)


def one_token(
    block: Any, input_states: Tensor, position_ids: Tensor, attention_mask: Any, use_cache: bool = False, *,
    past_key_values: Any, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Replaces the block's forward for one token of each lane, input_states (batch, 1, width)."""
    branch = block.act_fn(block.linear_y(input_states))
    rows = past_key_values.update_conv_state(block.linear_x(input_states).transpose(1, 2), block.layer)
    rows = (rows * block.conv_1d.weight[:, 0, :]).sum(-1) + block.conv_1d.bias
    unit = Unit(block.rg_lru, past_key_values.get_recurrent_state(block.layer))
    mixed = unit.code.forward(unit, rows[:, None], position_ids)
    past_key_values.update_recurrent_state(unit.recurrent_states, block.layer)
    return block.linear_out(mixed * branch), None


def states_in_cache(network: nn.Module, contents: Kept) -> Kept:
    """Makes the recurrent blocks use states from the cache.  Returns `contents` with these states."""
    states = list(contents.states)
    blocks = [layer.temporal_block for layer in network.get_decoder().layers]
    for number, block in enumerate(blocks):
        if type(block).__name__ == BLOCK:
            block.layer, block.forward = number, MethodType(one_token, block)
            weight = block.conv_1d.weight
            states.append(State("conv", number, 0, (weight.shape[0], weight.shape[2] - 1), weight.dtype))
            states.append(State("recurrent", number, 0, (weight.shape[0],), torch.float32))
    return contents._replace(states=states)
