"""Makes a small copy of a model's configuration: few layers, small widths, and windows, chunks and contexts of a few tokens.

The copy has every feature of the model.  So a short text with the copy tests what a long text would test with the model.
"""

from __future__ import annotations

import copy
import math
from typing import Any

from transformers import PretrainedConfig

WINDOW, CHUNK, CONTEXT = 8, 12, 24
"""Tokens of a sliding window, of a chunk of attention, and of the original context of a scaled rope."""

DIM, VOCABULARY = 16, 160

FIXED: dict[str, int] = {
    **dict.fromkeys(("sliding_window", "window_size", "local_window_size", "sliding_window_size", "swa_window_size"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "floor_scale"), CHUNK),
    "original_max_position_embeddings": CONTEXT,
    **dict.fromkeys(
        (
            "head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "global_head_dim", "swa_head_dim",
            "hidden_size_per_layer_input", "swa_v_head_dim", "index_head_dim", "kv_channels", "indexer_head_dim",
            "linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim",
        ),
        DIM,
    ),
    "qk_head_dim": 2 * DIM,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 32),
}  # fmt: skip
"""New values of numbers in a configuration, by name."""

MOST: dict[str, int] = {
    **dict.fromkeys(
        (
            "intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner",
            "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff", "ffn_hidden_size", "expert_ffn_hidden_size",
            "moe_shared_expert_intermediate_size", "shared_intermediate_size", "dense_intermediate_size",
        ),
        64,
    ),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "chunk_size", "mamba_chunk_size"), 16),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups", "linear_num_key_heads", "n_mamba_heads"), 2),
    **dict.fromkeys(("mamba_num_heads", "linear_num_value_heads", "time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group", "n_shared_experts", "zero_expert_num", "num_expert_groups"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "kv_n_heads": 2, "rotary_dim": DIM, "max_window_layers": 1, "num_nextn_predict_layers": 0, "index_topk": 8, "index_n_heads": 16,
}  # fmt: skip
"""Maximum values of numbers in a configuration, by name."""

HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size", "embed_dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "depth")
INDEXES = ("mlp_only_layers", "moe_layers", "attn_layer_indices", "full_attn_idxs", "kv_shared_layers", "hybrid_layer_ids")
"""Lists of layer numbers, which do not have a value for each layer."""


def small_copy(config: PretrainedConfig) -> PretrainedConfig:
    """Returns a configuration with small sizes.  Raises the errors of the configuration's class if sizes do not fit together."""
    values = shrunk(config.to_dict())
    return type(config)(**{name: value for name, value in values.items() if name not in ("transformers_version", "dtype")})


def shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """Reduces the values of a configuration and of its parts."""
    values = copy.deepcopy(values)
    for name, value in values.items():
        if isinstance(value, dict) and name not in ("rope_parameters", "rope_scaling", "per_layer_config"):
            values[name] = shrunk(value)
    text = values.get("text_config")
    for part in values.values():
        if isinstance(text, dict) and isinstance(part, dict):  # an image encoder has outputs of the text model's width
            part |= {
                name: text["hidden_size"]
                for name in ("out_hidden_size", "adapter_out_dim")
                if name in part and "hidden_size" in text
            }
    parts = [values.get(name) or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    split_head = all(parts) and sum(parts) == values.get("head_dim")
    values = fewer_layers(values)
    values = fewer_heads(values)
    for name, value in values.items():
        if not isinstance(name, str):
            continue
        if type(value) is int and name in FIXED:
            values[name] = FIXED[name]
        elif type(value) is int and name.endswith(("vocab_size", "vocab_size_per_layer_input")):
            values[name] = VOCABULARY
        elif type(value) is int and name in MOST:
            values[name] = min(value, MOST[name])
        elif type(value) is int and name.endswith(("token_id", "token_index", "_token")) and value >= VOCABULARY:
            values[name] = 3
        elif name in ("pad_token_id", "bos_token_id", "eos_token_id") and isinstance(value, list):
            values[name] = 2
    if split_head:
        values["head_dim"] = 2 * DIM
    if isinstance(layers := values.get("per_layer_config"), dict):  # overrides for some layers
        values["per_layer_config"] = {layer: shrunk_layer(changes) for layer, changes in layers.items()}
    return small_context(values)


def shrunk_layer(changes: dict[str, Any]) -> dict[str, Any]:
    """Reduces the overrides of one layer, so that they still differ from other layers."""
    other = {"head_dim": 2 * DIM} | ({} if "num_attention_heads" in changes else dict.fromkeys(KEY_HEADS, 1))
    return {name: other.get(name, shrunk({name: value})[name]) for name, value in changes.items()}


def fewer_heads(values: dict[str, Any]) -> dict[str, Any]:
    """Keeps at most two key heads, each with at most three query heads, of DIM dims.  Sets matching widths."""
    minimum = 4 if values.get("model_type") == "codegen" else 1  # its projection is split into four
    for prefix in ("", "swa_"):
        heads = next((values[prefix + name] for name in HEADS if isinstance(values.get(prefix + name), int)), 0)
        if not heads:
            continue
        key_heads = next((values[prefix + name] for name in KEY_HEADS if isinstance(values.get(prefix + name), int)), heads)
        few, groups = max(minimum, min(key_heads, 2)), min(max(1, heads // key_heads), 3)
        small = dict.fromkeys(HEADS, few * groups) | dict.fromkeys(KEY_HEADS, few)
        small |= {} if prefix else dict.fromkeys(WIDTHS, few * groups * DIM)
        values |= {prefix + name: size for name, size in small.items() if isinstance(values.get(prefix + name), int)}
    if not any(isinstance(values.get(name), int) for name in HEADS):
        values |= {name: 2 * DIM for name in WIDTHS if isinstance(values.get(name), int)}
    width = next((values[name] for name in WIDTHS if isinstance(values.get(name), int)), 0)
    if "mamba_n_heads" in values:
        values |= {"mamba_n_heads": 4, "mamba_d_head": values.get("mamba_expand", 2) * width // 4, "mamba_d_ssm": None}
    heads = next((values[name] for name in HEADS if isinstance(values.get(name), int)), 0)
    derived = {
        "lru_width": width, "mamba_headdim": values.get("mamba_expand", 2) * width // 2,
        "attention_hidden_size": 2 * width if "attention_head_dim" in values else width,
        "attention_head_dim": 2 * width // max(1, heads), "num_query_groups": heads,
    }  # fmt: skip
    values |= {name: value for name, value in derived.items() if isinstance(values.get(name), int)}
    if values.get("model_type") == "mamba2":  # its `num_heads` are heads of the state, not of attention
        values |= {"num_heads": values["expand"] * width // DIM}
    return values


def fewer_layers(values: dict[str, Any]) -> dict[str, Any]:
    """Keeps one layer of every kind, and at least two layers."""
    count = next((values[name] for name in LAYERS if isinstance(values.get(name), int)), 0)
    lists = {
        name: value for name, value in values.items() if isinstance(value, list) and len(value) == count and name not in INDEXES
    }
    overrides = {int(layer): value for layer, value in (values.get("per_layer_config") or {}).items()}
    producers = count - (values.get("num_kv_shared_layers") or 0)  # the last layers use keys of other layers
    kinds: dict[tuple[str, ...], int] = {}
    for layer in range(count):
        kind = [repr(value[layer]) for value in lists.values()]
        kind += [str(layer in values[name]) for name in INDEXES if isinstance(values.get(name), list)]
        kinds.setdefault((*kind, repr(overrides.get(layer)), str(layer < producers)), layer)
    layers = sorted(kinds.values()) if len(kinds) > 1 else list(range(min(count, 2)))
    if any("hybrid" in value for value in lists.values()):  # such layers may share weights with each other
        kind = next(value for value in lists.values() if "hybrid" in value)
        layers = sorted({*layers, count - 1 - kind[::-1].index("hybrid")})
    if "attn_layer_period" in values and not lists:
        values |= {"attn_layer_period": 2, "attn_layer_offset": 1}
        layers = list(range(2))
    if isinstance(pattern := values.get("block_types"), list):
        layers = list(range(len(pattern)))
    if isinstance(values.get("num_layers_per_stack"), int):  # stacks of layers that are applied several times
        values |= {"num_layers_per_stack": 1}
        layers = list(range(values["H_cycles"] * (values["L_cycles"] + 1)))
    for name in LAYERS:
        if isinstance(values.get(name), int):
            values[name] = len(layers)
    for name, value in lists.items():
        values[name] = [value[layer] for layer in layers]
    for name in INDEXES:
        if isinstance(values.get(name), list):
            values[name] = [number for number, layer in enumerate(layers) if layer in values[name]]
    if overrides:
        values["per_layer_config"] = {number: overrides[layer] for number, layer in enumerate(layers) if layer in overrides}
    if values.get("num_kv_shared_layers"):
        values["num_kv_shared_layers"] = sum(layer >= producers for layer in layers)
    return values


def small_context(values: dict[str, Any]) -> dict[str, Any]:
    """Sets the original context of scaled ropes to CONTEXT tokens, and keeps their factors."""
    ropes = values.get("rope_parameters") or values.get("rope_scaling")
    if not isinstance(ropes, dict):
        return values
    longest = values.get("max_position_embeddings")
    for rope in [ropes] if "rope_type" in ropes or "type" in ropes else [rope for rope in ropes.values() if isinstance(rope, dict)]:
        kind = rope.get("rope_type", rope.get("type"))
        before = rope.get("original_max_position_embeddings") or longest
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = CONTEXT
        if kind == "dynamic":
            values["max_position_embeddings"] = CONTEXT
        elif kind == "longrope" and longest and before:
            values["max_position_embeddings"] = max(CONTEXT, CONTEXT * longest // before)
        if int(DIM * rope.get("partial_rotary_factor", 1.0)) % 2:
            rope["partial_rotary_factor"] = (int(DIM * rope["partial_rotary_factor"]) + 1) / DIM
        angles = int(DIM * rope.get("partial_rotary_factor", 1.0)) // 2
        for name in ("short_factor", "long_factor"):
            if name in rope:
                rope[name] = [rope[name][len(rope[name]) * number // angles] for number in range(angles)]
        if values.get("model_type", "").startswith(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "paddleocr", "glm4v", "glm_ocr")):
            rope.setdefault("mrope_section", [1, 1, 1])  # the default is for the original widths
        if "mrope_section" in rope:
            rope["mrope_section"] = sections(rope["mrope_section"], angles)
    return values


def sections(counts: list[int], total: int) -> list[int]:
    """Distributes `total` in proportion to `counts`."""
    shares = [max(1, math.floor(count * total / sum(counts))) for count in counts]
    shares[0] += total - sum(shares)
    return shares
