"""What transformers' own cache of a model holds after one small call: keys and values by layer, and states.

For models that compute attention in code of their own, or have layers with a state (architectures/lane_cache.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, PretrainedConfig, PreTrainedModel

from ...errors import ModelError
from ..architectures.lane_cache import Kept, State
from ..architectures.recurrent_gemma import states_in_cache
from .probe import TOKENS, Layer, check_windows, probe_layers
from .refusal import error_text, refusal

SERVE = "serve it with transformers"


def probe_cache(network: PreTrainedModel) -> Kept:
    """By a call of `paged` attention where the model has that, else of its own.  Raises language-model-refused for a model that
    keeps something else than keys, values and states, or nothing."""
    config = network.config
    if config._attn_implementation != "eager":
        try:
            layers = probe_layers(network)
        except ModelError as error:
            network.set_attn_implementation("eager")
            if config._attn_implementation != "eager":
                raise error
        else:
            check_windows(config, layers)
            return Kept(layers, {number: number for number in range(len(layers))}, [], False)
    return kept_by_lane(network)


def kept_by_lane(network: PreTrainedModel) -> Kept:
    """What transformers' cache has after a call."""
    config = network.config
    cache = filled_cache(network)
    kept = getattr(cache, "layers", None)
    if kept is None:
        what = "keeps nothing of the tokens before" if cache is None else f"keeps a {type(cache).__name__} instead of a Cache"
        raise refusal(config, f"{type(network).__name__} {what}, so that no pages or slots can hold it", SERVE)
    layers: list[Layer] = []
    states: list[State] = []
    numbers: dict[int | tuple[str, int], int] = {}
    for number, layer in enumerate(kept):
        if type(layer).__module__ != Cache.__module__:
            what = f"layer {number} keeps a {type(layer).__name__}, which is more than keys, values and states"
            raise refusal(config, what, SERVE)
        states += layer_states(number, layer)
        keys, values, index = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
        if isinstance(keys, Tensor) and keys.numel():
            numbers[number] = len(layers)
            layers.append(layer_of(config, number, keys, values))
        if isinstance(index, Tensor):
            numbers["index", number] = len(layers)
            layers.append(Layer(1, -(-index.shape[-1] // 2), 0, 0))
    for number, state in enumerate(getattr(cache, "linear_cache", ())):  # MiniMax's
        if isinstance(state, Tensor):
            states.append(State("recurrent", number, 0, tuple(state.shape[1:]), state.dtype))
    # whoever serves the model finds in a table of keys how many pages there are, and how many tokens in each
    contents = Kept(layers or [Layer(1, 1, 0, 0)], numbers, states, True)
    return states_in_cache(network, contents) if config.model_type == "recurrent_gemma" else contents


def filled_cache(network: PreTrainedModel) -> Any:
    """transformers' cache after a call of TOKENS tokens, None where there is none."""
    config, ids = network.config, torch.arange(TOKENS, device=next(network.parameters()).device)[None]
    before = DynamicCache(config=config) if config.model_type == "recurrent_gemma" else None  # which does not give it back
    try:
        with torch.no_grad():
            output = network(input_ids=ids, use_cache=True, **({} if before is None else {"past_key_values": before}))
    except Exception as error:
        raise refusal(config, f"its code does not run: {error_text(error)}", SERVE) from error
    for cache in (before, getattr(output, "past_key_values", None), getattr(output, "cache_params", None)):
        if cache is not None:
            return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return None


def layer_states(number: int, layer: Any) -> list[State]:
    """The states of a layer of transformers' cache."""
    return [
        State(kind, number, place, tuple(state.shape[1:]), state.dtype)
        for kind, name in (("conv", "conv_states"), ("recurrent", "recurrent_states"))
        for place, state in (getattr(layer, name, None) or {}).items()
        if isinstance(state, Tensor)
    ]


def layer_of(config: PretrainedConfig, number: int, keys: Tensor, values: Any) -> Layer:
    """The heads and the dim of a layer's keys."""
    if keys.dim() != 4 or not isinstance(values, Tensor) or values.shape[:2] != keys.shape[:2]:
        what = f"layer {number} keeps keys of {tuple(keys.shape)}, and values of another number of heads"
        raise refusal(config, what, SERVE)
    return Layer(keys.shape[1], max(keys.shape[-1], values.shape[-1]), 0, 0)
