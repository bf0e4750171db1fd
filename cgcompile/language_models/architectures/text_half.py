"""The text half of a model that also reads images or sound: its decoder and its head, in the code of the whole model.

A causal language model of the same decoder may give other logits: that of Cohere 2 scales them, and Aya Vision, which has this
decoder, does not.  So transformers makes and loads the whole model, from which all other parts are taken away.
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
"""What makes models that read more than text."""


def maker(config: PretrainedConfig) -> Any:
    """The class of transformers that makes and loads the model that writes text; None where it has none."""
    kinds = (AutoModelForCausalLM, *(WHOLE if "text_config" in config.sub_configs else ()))
    return next((kind for kind in kinds if type(config) in kind._model_mapping), None)


def model_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class of that model."""
    kind = maker(config)
    wanted = None if kind is None else kind._model_mapping[type(config)]
    return wanted[0] if isinstance(wanted, tuple) else wanted


def without_other_parts(network: PreTrainedModel) -> PreTrainedModel:
    """The model without what reads images and sound."""
    if not any(type(network.config) in kind._model_mapping for kind in WHOLE):
        return network
    kept = {network.get_decoder(), network.get_output_embeddings()}
    inner = getattr(network, network.base_model_prefix, network)
    for name, part in list(inner.named_children()):
        if inner not in kept and not kept & set(part.modules()):
            setattr(inner, name, None)
    return network
