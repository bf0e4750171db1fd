"""Finds out in one small call what each layer passes to attention: heads, dims, and which tokens its mask shows.

In transformers only masks define which tokens a token sees: sliding windows, chunks, prefixes.  Attention over pages has no masks.
So the probe replaces the functions for attention and masks.  It reads the rule of each layer's mask, and refuses unsupported rules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)

from ...errors import ModelError
from ..architectures.text_half import model_class
from .refusal import error_text, refusal

TOKENS = 3
"""Tokens of the probe's call: more than one, because models handle a single token differently."""

HARMLESS = {
    "dropout", "sliding_window", "position_ids", "use_cache", "is_causal", "output_attentions", "cache_position",
    "output_router_logits", "output_hidden_states", "return_dict", "logits_to_keep", "layer_idx",
}  # fmt: skip
"""Additional arguments of attention that have no effect, or whose effect is read from the mask."""

PLAIN = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Types of layers that keep only keys and values."""

ANOTHER = "serve it with transformers; attention over pages is causal, in sliding windows or in chunks"


class Layer(NamedTuple):
    """A layer: its key `heads`, the `dim` of its keys and values, and the earlier tokens that a token sees: the last `window`, or
    those of its `chunk`; 0 for all."""

    heads: int
    dim: int
    window: int
    chunk: int


class MaskRule:
    """Replaces a mask, and contains the function of (batch, head, query, key) from which transformers makes it.  Model code that
    computes with the mask gets a TypeError or AttributeError."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function


def mask_rule(*, mask_function: Callable[..., Tensor], **_: object) -> MaskRule:
    """The function that transformers calls to make a mask, during the probe."""
    return MaskRule(mask_function)


class Probe:
    """Replaces a cache and records what every layer would store.  Each token attends only to itself."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        self.layers: dict[int, Layer] = {}
        self.rules: dict[MaskRule, tuple[int, int]] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, others: dict[str, Any]) -> Tensor:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise refusal(self.config, f"{type(module).__name__} has no number of its layer (layer_idx)", ANOTHER)
        if layer in self.layers:
            raise refusal(self.config, f"layer {layer} attends twice, which takes two caches", ANOTHER)
        unknown = sorted(name for name, value in others.items() if value is not None and name not in HARMLESS)
        if unknown:
            raise refusal(self.config, f"{type(module).__name__} gives attention its own {', '.join(unknown)}", ANOTHER)
        window, chunk = self.seen(layer, mask)
        self.layers[layer] = Layer(key.shape[1], max(key.shape[-1], value.shape[-1]), window, chunk)
        groups = query.shape[1] // value.shape[1]
        mixed = value + key.mean(-1, keepdim=True)
        return (mixed.repeat_interleave(groups, 1) + query.mean(-1, keepdim=True)).transpose(1, 2).contiguous()

    def seen(self, layer: int, mask: Any) -> tuple[int, int]:
        """Returns the window and the chunk of a layer's mask."""
        if not isinstance(mask, MaskRule):
            problem = "no mask" if mask is None else "a mask of its own"
            raise refusal(self.config, f"layer {layer} attends with {problem}, and not with one of transformers' masks", ANOTHER)
        if mask not in self.rules:
            context = getattr(self.config.get_text_config(), "max_position_embeddings", None) or 4096
            seen = window_and_chunk(mask.function, context)
            if seen is None:
                problem = "neither causal, nor causal in a sliding window or in chunks (a prefix or blocks, say)"
                raise refusal(self.config, f"the mask of layer {layer} is {problem}", ANOTHER)
            self.rules[mask] = seen
        return self.rules[mask]


def window_and_chunk(function: Callable[..., Tensor], longest: int) -> tuple[int, int] | None:
    """Returns the window and chunk of a mask's rule, at least one of them 0; None for another rule.  A window longer than the
    `longest` text counts as none."""
    longest = min(max(longest, 4096), 1 << 20)

    def shows(query: Tensor, key: Tensor) -> Tensor:
        return function(0, 0, query, key).expand(torch.broadcast_shapes(query.shape, key.shape))

    try:
        size = int(shows(torch.arange(longest, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu")).sum())
        generator = torch.Generator("cpu").manual_seed(0)
        sample = torch.randint(longest, (60,), generator=generator, device="cpu")
        marks = torch.tensor([0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 3 * size, longest - 1], device="cpu")
        query = torch.cat([marks, sample, sample // size * size]).clamp(0, longest - 1)
        near = [query + step for step in (-size - 1, -size, -size + 1, -1, 0, 1)]
        key = torch.cat([*near, query // size * size - 1, query // size * size]).clamp(0, longest - 1)
        query = query[:, None]
        shown, causal = shows(query, key), key <= query
        if torch.equal(shown, causal) and size == longest:
            return 0, 0
        if torch.equal(shown, causal & (key > query - size)):
            return size, 0
        if torch.equal(shown, causal & (key // size == query // size)):
            return 0, size
    except (IndexError, ZeroDivisionError, RuntimeError):  # the rule works only for the tokens of one call
        pass
    return None


def probe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, cache: Probe | None = None,
    scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The function that transformers calls for attention, during the probe."""
    if cache is None:
        problem = f"{type(module).__name__} does not receive the model's keyword arguments, because the layers do not pass them on"
        raise refusal(module.config, problem, ANOTHER)
    return cache.attend(module, query, key, value, attention_mask, others), None


AttentionInterface.register("paged_probe", probe_attention)
AttentionMaskInterface.register("paged_probe", mask_rule)


def probe_layers(network: PreTrainedModel) -> list[Layer]:
    """Returns the layers of a network, from a call of TOKENS tokens.  Raises language-model-refused for unsupported attention."""
    config = network.config
    probe = Probe(config)
    places = torch.arange(TOKENS, device=next(network.parameters()).device)[None]
    implementation = config._attn_implementation
    try:
        network.set_attn_implementation("paged_probe")
        with torch.no_grad():
            network(input_ids=places, position_ids=places, use_cache=False, cache=probe)
    except ModelError:
        raise
    except Exception as error:
        problem = "it computes with its mask" if "MaskRule" in str(error) else "its code does not work with a paged cache"
        raise refusal(config, f"{problem}: {error_text(error)}", ANOTHER) from error
    finally:
        network.set_attn_implementation(implementation)
    check_all(config, probe.layers)
    return [probe.layers[layer] for layer in range(len(probe.layers))]


def check_kind(config: PretrainedConfig) -> None:
    """Raises language-model-refused if class or configuration show that the model is not supported.  Needs no weights."""
    try:
        config.get_text_config()
    except ValueError as error:
        raise refusal(config, f"it has no one text model: {error_text(error)}", ANOTHER) from error
    kind = model_class(config)
    if kind is None:
        raise refusal(config, "transformers has no causal language model of this type (AutoModelForCausalLM)", ANOTHER)
    prepare = kind.prepare_inputs_for_generation.__code__
    if "original_max_position_embeddings" in prepare.co_names and "next_sequence_length" not in prepare.co_consts:
        problem = "transformers' generate drops earlier tokens when a text exceeds original_max_position_embeddings"
        raise refusal(config, problem, "try a later version of transformers: there is no right text to compare with")


def takes_paged(config: PretrainedConfig) -> bool:
    """Returns whether every layer of a model can use another attention function instead of its own."""
    kind = model_class(config)
    if kind is None or not set(getattr(config.get_text_config(), "layer_types", None) or ()) <= PLAIN:
        return False
    return hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS") or kind._supports_attention_backend


def check_all(config: PretrainedConfig, layers: Mapping[int, Layer]) -> None:
    """Raises language-model-refused unless every layer attends over pages."""
    text = config.get_text_config()
    count = max(getattr(text, "num_hidden_layers", 0), *layers, 1)
    missing = [layer for layer in range(count) if layer not in layers]
    if missing:
        problem = f"layers {', '.join(map(str, missing))} do not call attention with keys"
        raise refusal(config, problem, "serve it with transformers; a paged cache holds no state of a layer but keys and values")


def check_windows(config: PretrainedConfig, layers: Sequence[Layer]) -> None:
    """Raises language-model-refused if `generate` drops tokens that a layer's mask shows."""
    for number, cache in enumerate(DynamicCache(config=config.get_text_config()).layers):
        window = getattr(cache, "sliding_window", None)
        if window and number < len(layers) and window != (layers[number].window or layers[number].chunk):
            problem = f"the cache of layer {number} keeps {window} tokens, and its mask shows {layers[number].window or 'all'}"
            raise refusal(config, problem, ANOTHER)
