"""Language models by name: a tiny one of every supported family, and three Llama shapes for benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from cgcompile.language_models.networks import folder_configuration, folder_network, over_pages

TINY: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
PLAIN = {name: value for name, value in TINY.items() if name not in ("num_key_value_heads", "head_dim")}
SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **TINY},
    "qwen2": {"model_type": "qwen2", **TINY, "tie_word_embeddings": True},
    "qwen2-sliding": {"model_type": "qwen2", **TINY, "use_sliding_window": True, **SLIDING},
    "qwen3": {"model_type": "qwen3", **TINY},
    "mistral": {"model_type": "mistral", **TINY, "sliding_window": 24},
    "gemma2": {"model_type": "gemma2", **TINY, **SLIDING, "query_pre_attn_scalar": 8, "tie_word_embeddings": False},
    "gemma3": {"model_type": "gemma3_text", **TINY, **SLIDING, "query_pre_attn_scalar": 8, "tie_word_embeddings": False},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 128, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 512, "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "phi": {"model_type": "phi", **PLAIN, "partial_rotary_factor": 0.5},
    "opt": {
        "model_type": "opt", **PLAIN, "ffn_dim": 96, "word_embed_proj_dim": 48, "do_layer_norm_before": True,
    },
    "mixtral": {"model_type": "mixtral", **TINY, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3-moe": {
        "model_type": "qwen3_moe", **TINY, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "gpt-oss": {
        "model_type": "gpt_oss", **TINY, **SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "llama-125m": {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 8192,
    },
    "llama-1b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    "llama-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0,
    },
}  # fmt: skip
"""Configurations by name. Gemma is not tied: with random tied weights it would repeat its last token forever."""

SPREAD = 0.2
"""Standard deviation of the weights of tiny models: ten times the usual one, so that different texts continue differently."""


def configuration(name: str) -> PretrainedConfig:
    """Returns the configuration of a folder with config.json, or of a name in CONFIGURATIONS."""
    if (Path(name) / "config.json").is_file():
        return folder_configuration(name)
    options = dict(CONFIGURATIONS[name])
    if options["vocab_size"] == TINY["vocab_size"]:
        options["init_std" if options["model_type"] == "opt" else "initializer_range"] = SPREAD
    return AutoConfig.for_model(**options)


def network(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the model in eval mode with paged attention; weights of a folder's safetensors, or random ones with a fixed seed."""
    if name not in CONFIGURATIONS:
        return folder_network(name, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return over_pages(configuration(name), dtype)
