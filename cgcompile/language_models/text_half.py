"""The text half of a model that also reads images or sound: its decoder and its head, in the code of the whole model.

A causal language model of the same decoder may give other logits: that of Cohere 2 scales them, and Aya Vision, which has this
decoder, does not.  So transformers makes and loads the whole model, from which all other parts are taken away.
"""

from __future__ import annotations

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

WHOLE = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)


def has_other_parts(config: PretrainedConfig) -> bool:
    """Whether the text model is a part of what the configuration describes."""
    return "text_config" in config.sub_configs and any(type(config) in mapping for mapping in WHOLE)


def model_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class of transformers that writes text for this configuration; None where there is none."""
    for mapping in (*WHOLE, MODEL_FOR_CAUSAL_LM_MAPPING) if has_other_parts(config) else (MODEL_FOR_CAUSAL_LM_MAPPING,):
        if type(config) in mapping:
            kind = mapping[type(config)]
            return kind[0] if isinstance(kind, tuple) else kind
    return None


def without_other_parts(network: PreTrainedModel) -> PreTrainedModel:
    """The model without what reads images and sound."""
    if not has_other_parts(network.config):
        return network
    kept = {network.get_decoder(), network.get_output_embeddings()}
    inner = getattr(network, network.base_model_prefix, network)
    for name, part in list(inner.named_children()):
        if inner not in kept and not kept & set(part.modules()):
            setattr(inner, name, None)
    return network
