"""Configurations to compare: the default one of every model type, and features of real models that no default has."""

from __future__ import annotations

from typing import Any

DECODER = {"is_decoder": True}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
HEADS = {"head_dim": 128}


def long_rope(angles: int) -> dict[str, Any]:
    """Returns a `longrope` for this number of angles."""
    return {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + 0.1 * angle for angle in range(angles)],
        "long_factor": [1.0 + 0.7 * angle for angle in range(angles)],
    }  # fmt: skip


NEEDED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "bert",
            "bert-generation",
            "big_bird",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
            "reformer",
        ),
        DECODER,
    ),
    **dict.fromkeys(("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe"), HEADS),
    "nemotron": {"num_key_value_heads": 8, **HEADS},
    "lfm2_moe": {"layer_types": ["full_attention"] * 32, "num_hidden_layers": 32},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": ["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 26},
    "xmod": {**DECODER, "default_language": "en_XX"},
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1407},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
}
"""Options that a default configuration needs to make a model, or a decoder."""

FEATURES: dict[str, dict[str, Any]] = {
    "llama, linear rope": {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "llama, dynamic rope": {"model_type": "llama", "rope_parameters": DYNAMIC},
    "llama, yarn rope": {"model_type": "llama", "rope_parameters": YARN},
    "llama, llama3 rope": {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama, long rope": {"model_type": "llama", "max_position_embeddings": 131072, "rope_parameters": long_rope(64)},
    "phi3, long rope": {"model_type": "phi3", "max_position_embeddings": 131072, "rope_parameters": long_rope(48)},
    "phi3, long rope of a part": {
        "model_type": "phi3", "max_position_embeddings": 131072,
        "rope_parameters": {**long_rope(36), "partial_rotary_factor": 0.75},
    },
    "phimoe, long rope": {
        "model_type": "phimoe", "max_position_embeddings": 131072,
        "rope_parameters": {**long_rope(64), "short_mscale": 1.2, "long_mscale": 1.4},
    },
    "minicpm3, long rope": {"model_type": "minicpm3", "max_position_embeddings": 131072, "rope_parameters": long_rope(16)},
    "gpt_neox, dynamic rope": {"model_type": "gpt_neox", "rope_parameters": {**DYNAMIC, "partial_rotary_factor": 0.5}},
    "qwen2, dynamic rope": {"model_type": "qwen2", "rope_parameters": DYNAMIC},
    "qwen2, sliding windows": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 14},
    "qwen3, yarn rope": {"model_type": "qwen3", "rope_parameters": YARN},
    "mistral without a window": {"model_type": "mistral", "sliding_window": None},
    "mixtral, sliding windows": {"model_type": "mixtral", "sliding_window": 4096},
    "phi3, sliding windows": {"model_type": "phi3", "sliding_window": 2047},
    "starcoder2, sliding windows": {"model_type": "starcoder2", "sliding_window": 4096},
    "llama4, chunks of all layers": {"model_type": "llama4_text", "no_rope_layers": [1] * 48},
    "llama4 without temperatures": {"model_type": "llama4_text", "attn_temperature_tuning": False},
    "gemma2 without soft caps": {"model_type": "gemma2", "attn_logit_softcapping": None},
    "gemma3, both directions": {"model_type": "gemma3_text", "use_bidirectional_attention": True},
    "gemma3, linear rope": {
        "model_type": "gemma3_text",
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gpt_oss, yarn rope": {"model_type": "gpt_oss", "rope_parameters": {**YARN, "truncate": False}},
    "ministral3, temperatures": {"model_type": "ministral3", "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    "gpt2, scaled by layer": {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
    "opt, post-norm": {"model_type": "opt", "do_layer_norm_before": False},
    "falcon, biases of distances": {"model_type": "falcon", "alibi": True},
    "gpt_bigcode, heads of their own": {"model_type": "gpt_bigcode", "multi_query": False},
    "lfm2, convolutions": {"model_type": "lfm2", "layer_types": ["conv", "conv", "full_attention"] * 10 + ["conv", "conv"]},
    "minimax_m3, blocks": {"model_type": "minimax_m3_vl_text", "layer_types": ["full_attention", "minimax_m3_sparse"] * 30},
    "deepseek_v3, yarn rope": {"model_type": "deepseek_v3", "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "hrm_text, prefixes": {"model_type": "hrm_text", "prefix_lm": True},
}  # fmt: skip
"""By name: configurations with features of the masks, ropes and caches of real models."""
