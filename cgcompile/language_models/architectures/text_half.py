"""The text part of a model that also reads images or sound: decoder and head, with the code of the whole model.

A causal language model with the same decoder may give other logits: Cohere 2 scales them, and Aya Vision with the same decoder does
not.  So transformers creates and loads the whole model, and all other parts are removed.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)

WHOLE = (AutoModelForImageTextToText, AutoModelForMultimodalLM)
"""Auto classes of models that read more than text."""


def maker(config: PretrainedConfig) -> Any:
    """Returns transformers' auto class that creates and loads the model which generates text, or None."""
    kinds = (AutoModelForCausalLM, *(WHOLE if "text_config" in config.sub_configs else ()))
    return next((kind for kind in kinds if type(config) in kind._model_mapping), None)


def model_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Returns the class of the model that `maker` creates, or None."""
    kind = maker(config)
    model = None if kind is None else kind._model_mapping[type(config)]
    return model[0] if isinstance(model, tuple) else model


def without_other_parts(network: PreTrainedModel) -> PreTrainedModel:
    """Removes the parts that read images and sound."""
    if not any(type(network.config) in kind._model_mapping for kind in WHOLE):
        return network
    kept = {network.get_decoder(), network.get_output_embeddings()}
    inner = getattr(network, network.base_model_prefix, network)
    for name, part in list(inner.named_children()):
        if inner not in kept and not kept & set(part.modules()):
            setattr(inner, name, None)
    return network
