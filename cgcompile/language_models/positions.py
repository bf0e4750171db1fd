"""Ropes that depend on the length of the text, and query temperatures that depend on the position.

transformers chooses the factors of `longrope` and `dynamic` ropes by the largest position of a call, which may belong to another
request.  But every text must be that of `generate` for its prompt alone.  For one prompt, `generate` chooses the factors of the
prompt's tokens by the prompt's length, and those of a later token by its position.  So a position id also contains the length of
its text, in the upper 32 bits.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

BY_LENGTH = ("longrope", "dynamic")


def with_length(places: Tensor, length: Tensor | None) -> Tensor:
    """Adds to positions (batch, seq) the length of their text: `length` (batch,), or position + 1 if that is larger."""
    lengths = places + 1
    if length is not None:
        lengths = torch.maximum(lengths, length[:, None])
    return places + (lengths << 32)


def depends_on_length(config: PretrainedConfig) -> bool:
    """Returns whether a rope of the model depends on the length of the text."""
    ropes = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return any(rope.get("rope_type") in BY_LENGTH for rope in (ropes, *ropes.values()) if isinstance(rope, dict))


def reread_length(network: PreTrainedModel) -> int:
    """Returns the length at which transformers' `generate` reads a text again from its start, with other factors; 0 for never."""
    prepare = type(network).prepare_inputs_for_generation.__code__
    config = network.config
    if "original_max_position_embeddings" in prepare.co_names and depends_on_length(config):
        return getattr(config, "original_max_position_embeddings", 0)
    return 0


def ropes_by_length(network: PreTrainedModel) -> PreTrainedModel:
    """Replaces ropes that depend on lengths, in place, by modules that read the lengths from position ids."""
    for name, module in list(network.named_modules()):
        kind = getattr(module, "rope_type", None)
        if kind in BY_LENGTH:
            parent, _, attribute = name.rpartition(".")
            setattr(network.get_submodule(parent), attribute, LongRope(module) if kind == "longrope" else DynamicRope(module))
    return network


class LongRope(nn.Module):
    """`longrope`: one set of factors for texts up to the original context, another one for longer texts."""

    def __init__(self, rope: Any) -> None:
        super().__init__()
        rope.config.standardize_rope_params()
        values = rope.config.rope_parameters
        self.origin, base = values["original_max_position_embeddings"], values["rope_theta"]
        self.scales = (rope.attention_scaling, rope.attention_scaling)
        frequencies = []
        for factors in ("short_factor", "long_factor"):
            scale = torch.tensor(values[factors], dtype=torch.float32, device=rope.inv_freq.device)
            exponents = torch.arange(len(scale), device=scale.device).float() / len(scale)
            frequencies.append(1.0 / (scale * base**exponents))
        if "long_mscale" in inspect.unwrap(type(rope).forward).__code__.co_consts:  # Phi-3.5-MoE: only the scales differ
            self.scales, frequencies[1] = (values["short_mscale"], values["long_mscale"]), frequencies[0]
        self.register_buffer("short", frequencies[0], persistent=False)
        self.register_buffer("long", frequencies[1], persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        place, long = (position_ids & 0xFFFFFFFF)[..., None].float(), ((position_ids >> 32) > self.origin)[..., None]
        return rotation(place * torch.where(long, self.long, self.short), torch.where(long, *reversed(self.scales)), x.dtype)


class DynamicRope(nn.Module):
    """`dynamic` (NTK): beyond the original context, the base grows with the length of the text."""

    def __init__(self, rope: Any) -> None:
        super().__init__()
        config = rope.config
        config.standardize_rope_params()
        self.origin, self.scaling = config.max_position_embeddings, rope.attention_scaling
        self.factor, self.base = config.rope_parameters["factor"], config.rope_parameters["rope_theta"]
        self.register_buffer("place", torch.arange(len(rope.inv_freq), device=rope.inv_freq.device).float(), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        place, length = position_ids & 0xFFFFFFFF, (position_ids >> 32).clamp(min=self.origin)
        dim = 2 * len(self.place)
        base = self.base * ((self.factor * length / self.origin) - (self.factor - 1)) ** (dim / (dim - 2))
        angles = place[..., None].float() / base[..., None] ** (2 * self.place / dim)
        return rotation(angles, self.scaling, x.dtype)


def rotation(angles: Tensor, scale: Tensor | float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of angles (batch, seq, dim / 2), repeated for both halves of a head."""
    both = torch.cat((angles, angles), -1)
    return (both.cos() * scale).to(dtype), (both.sin() * scale).to(dtype)


def temperatures_by_place(network: PreTrainedModel) -> PreTrainedModel:
    """Makes `attention` scale the queries of Llama 4 layers without rope by position, in place.  The model's own code would use the
    index of a token in the call."""
    for module in network.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            module.attn_temperature_tuning = False
            module.temperature = Temperature(module.floor_scale, module.attn_scale)
    return network


class Temperature(NamedTuple):
    """Multiplies queries by 1 + `strength` * log(1 + the number of complete `step`s up to the token)."""

    step: float
    strength: float

    def __call__(self, query: Tensor, places: Tensor) -> Tensor:
        """query (batch, seq, heads, dim), places (batch, seq)."""
        factor = torch.log1p(torch.floor((places.float() + 1.0) / self.step)) * self.strength + 1.0
        return (query * factor[..., None, None]).to(query.dtype)
