"""The text model of a checkpoint that also reads images or sound: its configuration, its class, and the names of its weights.

Most have a causal language model of their own in transformers, which takes the checkpoint's weights under other names.  Others, as
Qwen-VL, have none: then it is the whole model, from which all parts but the decoder and the head are taken away.
"""

from __future__ import annotations

from collections.abc import Iterable

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

WHOLE = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)

NAMES = {
    r"^(model\.)?(language_model|text_model|llm)\.model\.": "model.",
    r"^(model\.)?(language_model|text_model|llm)\.lm_head\.": "lm_head.",
    r"^model\.(language_model|text_model|llm)\.": "model.",
    r"^thinker\.": "",
}
"""How a text model's weights are called in a checkpoint with other parts, and in one of their own."""


def text_configuration(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a configuration that describes a causal language model of transformers, else the configuration."""
    try:
        text = config.get_text_config(decoder=True)
    except ValueError:  # several
        return config
    if text is config or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING or not is_multimodal(config):
        return config
    text.tie_word_embeddings = config.tie_word_embeddings
    return text


def is_multimodal(config: PretrainedConfig) -> bool:
    """Whether transformers has a model of this configuration that reads more than text."""
    return any(type(config) in mapping for mapping in WHOLE)


def model_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class of transformers that writes text for this configuration; None where there is none."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, *WHOLE):
        if type(config) in mapping:
            kind = mapping[type(config)]
            return kind[0] if isinstance(kind, tuple) else kind
    return None


def with_own_head(names: Iterable[str]) -> bool:
    """Whether a checkpoint with these tensors has a head that is not the table of embeddings."""
    return any(name.endswith("lm_head.weight") for name in names)


def without_other_parts(network: PreTrainedModel) -> PreTrainedModel:
    """The model without what reads images and sound."""
    if type(network.config) in MODEL_FOR_CAUSAL_LM_MAPPING or not is_multimodal(network.config):
        return network
    decoder = network.get_decoder()
    inner = getattr(network, network.base_model_prefix, network)
    if inner is not decoder:
        for name, part in list(inner.named_children()):
            if part is not decoder and not any(module is decoder for module in part.modules()):
                setattr(inner, name, None)
    return network
