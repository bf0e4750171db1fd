"""Finds out with one small call what a model's cache must contain: keys and values by layer, and states.

States, and attention in a model's own code, are read from transformers' cache after the call (architectures/lane_cache.py).
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
    """Probes a call with paged attention if the model supports it, else with the model's own attention.  Raises
    language-model-refused for a model without a cache, or whose cache has other data than keys, values and states."""
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
    """Describes the contents of transformers' cache after a call of the model with its own attention."""
    config = network.config
    cache = filled_cache(network)
    cache_layers = getattr(cache, "layers", None)
    if cache_layers is None:
        kept = "no cache of earlier tokens" if cache is None else f"a {type(cache).__name__} instead of a Cache"
        raise refusal(config, f"{type(network).__name__} has {kept}: pages and slots can hold only a Cache of transformers", SERVE)
    layers: list[Layer] = []
    states: list[State] = []
    numbers: dict[int | tuple[str, int], int] = {}
    for number, layer in enumerate(cache_layers):
        if type(layer).__module__ != Cache.__module__:
            problem = f"layer {number} keeps a {type(layer).__name__}, which is more than keys, values and states"
            raise refusal(config, problem, SERVE)
        states += layer_states(number, layer)
        keys, values, index = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
        if isinstance(keys, Tensor) and keys.numel():
            numbers[number] = len(layers)
            layers.append(layer_of(config, number, keys, values))
        if isinstance(index, Tensor):
            numbers["index", number] = len(layers)
            layers.append(Layer(1, -(-index.shape[-1] // 2), 0, 0))
    for number, state in enumerate(getattr(cache, "linear_cache", ())):
        if isinstance(state, Tensor):
            states.append(State("recurrent", number, 0, tuple(state.shape[1:]), state.dtype))
    # a server reads the number of pages and their size from a tensor of keys, so there must be one
    contents = Kept(layers or [Layer(1, 1, 0, 0)], numbers, states, True)
    return states_in_cache(network, contents) if config.model_type == "recurrent_gemma" else contents


def filled_cache(network: PreTrainedModel) -> Any:
    """Returns transformers' cache after a call of TOKENS tokens, or None."""
    config, ids = network.config, torch.arange(TOKENS, device=next(network.parameters()).device)[None]
    given_cache = DynamicCache(config=config) if config.model_type == "recurrent_gemma" else None  # its output has no cache
    try:
        with torch.no_grad():
            output = network(input_ids=ids, use_cache=True, **({} if given_cache is None else {"past_key_values": given_cache}))
    except Exception as error:
        raise refusal(config, f"its code does not run: {error_text(error)}", SERVE) from error
    for cache in (given_cache, getattr(output, "past_key_values", None), getattr(output, "cache_params", None)):
        if cache is not None:
            return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return None


def layer_states(number: int, layer: Any) -> list[State]:
    """Returns the states of a layer of transformers' cache."""
    return [
        State(kind, number, index, tuple(state.shape[1:]), state.dtype)
        for kind, name in (("conv", "conv_states"), ("recurrent", "recurrent_states"))
        for index, state in (getattr(layer, name, None) or {}).items()
        if isinstance(state, Tensor)
    ]


def layer_of(config: PretrainedConfig, number: int, keys: Tensor, values: Any) -> Layer:
    """Returns the number of key heads of a layer, and the larger dim of its keys and values.  Raises language-model-refused."""
    if keys.dim() != 4 or not isinstance(values, Tensor) or values.shape[:2] != keys.shape[:2]:
        problem = f"layer {number} keeps keys of {tuple(keys.shape)}, and values of another number of heads"
        raise refusal(config, problem, SERVE)
    return Layer(keys.shape[1], max(keys.shape[-1], values.shape[-1]), 0, 0)
