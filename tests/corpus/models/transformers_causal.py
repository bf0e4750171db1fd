"""Causal language models of transformers with two layers: most without a cache, a few with one."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..case import Case, Made
from .shared import TOKENS, VOCABULARY, ids, only_ids, tokens, transformer

GPT = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False}
LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def causal(name: str, base: str, config: dict[str, Any], **more: Any) -> Case:
    """A causal language model by its base name, `Llama` or `GPT2LMHead`, whose input is token ids."""
    model = f"{base}Model" if base.endswith("LMHead") else f"{base}ForCausalLM"
    short = {"Gemma3": "Gemma3Text"}.get(base, base.removesuffix("LMHead"))
    return transformer(f"causal/{name}", model, f"{short}Config", only_ids(), **{**config, **more})


STATE = ("keys", "values", "cumulative_length")
"""Attributes of a layer of a static cache."""


class Decoder(torch.nn.Module):
    """Decodes one token at a time into a static cache that the module holds, as causal models are served."""

    def __init__(self, network: torch.nn.Module, batch: int, length: int) -> None:
        super().__init__()
        from transformers import StaticCache

        self.network = network
        cache = StaticCache(config=network.config, max_cache_len=length)
        heads = getattr(network.config, "num_key_value_heads", None) or network.config.num_attention_heads
        width = getattr(network.config, "head_dim", None) or network.config.hidden_size // network.config.num_attention_heads
        cache.early_initialization(batch, heads, width, torch.float32, torch.device("cpu"))
        self.cache = cache
        for index, layer in enumerate(cache.layers):
            for name in STATE:
                if isinstance(getattr(layer, name, None), torch.Tensor):  # the length is a tensor
                    self.register_buffer(f"{name}_{index}", getattr(layer, name).clone())

    def forward(self, input_ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the next token; `position`, int64 [1], is the position of `input_ids` [batch, 1]."""
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        for index, layer in enumerate(cache.layers):
            for name in STATE:
                if hasattr(self, f"{name}_{index}"):
                    setattr(layer, name, getattr(self, f"{name}_{index}"))
            layer.device = layer.keys.device  # the layer creates its positions there
        return self.network(
            input_ids=input_ids, position_ids=position[None], cache_position=position, past_key_values=cache, use_cache=True
        ).logits


def with_cache_returned(name: str, base: str, config: dict[str, Any]) -> Case:
    """An unchanged model, whose outputs include its cache."""
    return causal(name, base, {**config, "use_cache": True})


def decoder_step(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a token at position 3."""
    return ids(1)(batch), torch.full((1,), 3)


def llama_static_cache() -> Made:
    """Llama with one token at a time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return Decoder(LlamaForCausalLM(LlamaConfig(**{**LLAMA, "use_cache": True})), batch=2, length=16), decoder_step


def llama_executorch() -> Made:
    """Llama with one token at a time, by transformers' export recipe."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    network = LlamaForCausalLM(LlamaConfig(**{**LLAMA, "use_cache": True})).eval()
    network.generation_config.use_cache, network.generation_config.cache_implementation = True, "static"

    def inputs(batch: int) -> dict[str, torch.Tensor]:
        return {"input_ids": ids(1)(batch), "cache_position": torch.full((1,), 3)}

    return TorchExportableModuleWithStaticCache(network, batch_size=2, max_cache_len=16), inputs


class CacheGiven(torch.nn.Module):
    """Passes the cache as inputs and outputs, so that the caller keeps it."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: torch.Tensor, past: Any) -> Any:
        """Returns logits and the extended cache, [batch, heads, length, width] per layer and kind."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for index, (keys, values) in enumerate(past):
            cache.update(keys, values, index)
        output = self.network(input_ids=input_ids, past_key_values=cache, use_cache=True)
        return output.logits, [(layer.keys, layer.values) for layer in output.past_key_values.layers]


def past(batch: int) -> tuple[Any, ...]:
    """Returns two tokens after eight cached ones."""
    return ids(2)(batch), [(torch.randn(batch, 2, 8, 16), torch.randn(batch, 2, 8, 16)) for _ in range(2)]


def llama_cache_given() -> Made:
    """Llama with the cache as inputs and outputs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return CacheGiven(LlamaForCausalLM(LlamaConfig(**{**LLAMA, "use_cache": True}))), past


def gpt2_published() -> Made:
    """GPT-2 at its published size, with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False)), only_ids(TOKENS)


NEEDS = ("transformers",)
CASES = [
    causal("gpt2", "GPT2LMHead", GPT),
    causal("llama", "Llama", LLAMA),
    causal("mixtral", "Mixtral", LLAMA, num_local_experts=4, num_experts_per_tok=2),
    with_cache_returned("llama-cache-returned", "Llama", LLAMA),
    Case(name="transformers/causal/llama-static-cache", make=llama_static_cache, sizes={"batch": (2,)}, needs=NEEDS),
    Case(name="transformers/causal/llama-executorch", make=llama_executorch, sizes={"batch": (2,)}, needs=NEEDS),
    Case(name="transformers/causal/llama-cache-given", make=llama_cache_given, needs=NEEDS),
    causal("mistral", "Mistral", LLAMA, sliding_window=8),
    causal("qwen2", "Qwen2", LLAMA),
    causal("qwen3", "Qwen3", LLAMA, head_dim=16),
    causal("qwen3-moe", "Qwen3Moe", LLAMA, head_dim=16, **MOE),
    causal("gemma2", "Gemma2", LLAMA, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    causal("gemma3", "Gemma3", LLAMA, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    causal("phi", "Phi", LLAMA),
    causal("phi3", "Phi3", LLAMA),
    causal("mamba", "Mamba", {"vocab_size": VOCABULARY, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2,
        "use_cache": False}),
    causal("mamba2", "Mamba2", {"vocab_size": VOCABULARY, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2,
        "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8, "use_cache": False}),
    causal("gpt-neo", "GPTNeo", {"vocab_size": VOCABULARY, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "window_size": 8,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64, "use_cache": False}),
    causal("gpt-neox", "GPTNeoX", LLAMA),
    causal("gptj", "GPTJ", GPT, rotary_dim=8),
    causal("falcon", "Falcon", LLAMA, multi_query=True, alibi=False),
    causal("falcon-alibi", "Falcon", LLAMA, multi_query=False, alibi=True),
    causal("bloom", "Bloom", {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4, "use_cache": False}),
    causal("opt", "OPT", {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "ffn_dim": 128, "max_position_embeddings": 64, "word_embed_proj_dim": 64, "use_cache": False}),
    causal("mpt", "Mpt", {"vocab_size": VOCABULARY, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64,
        "use_cache": False}),
    causal("codegen", "CodeGen", GPT, rotary_dim=8),
    causal("starcoder2", "Starcoder2", LLAMA),
    causal("gpt-bigcode", "GPTBigCode", GPT),
    causal("stablelm", "StableLm", LLAMA),
    causal("olmo2", "Olmo2", LLAMA),
    causal("olmoe", "Olmoe", LLAMA, num_experts=4, num_experts_per_tok=2),
    causal("cohere", "Cohere", LLAMA),
    causal("granite", "Granite", LLAMA),
    causal("rwkv", "Rwkv", {"vocab_size": VOCABULARY, "hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 2,
        "context_length": 64, "use_cache": False}),
    causal("deepseek-v3", "DeepseekV3", LLAMA, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, moe_intermediate_size=32, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=16, first_k_dense_replace=1, n_shared_experts=1),
    causal("gpt-oss", "GptOss", LLAMA, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    causal("glm4", "Glm4", LLAMA, head_dim=16),
    causal("persimmon", "Persimmon", LLAMA),
    causal("xglm", "XGLM", {"vocab_size": VOCABULARY, "d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 128,
        "max_position_embeddings": 64, "use_cache": False}),
    causal("openai-gpt", "OpenAIGPTLMHead", GPT),
    causal("ctrl", "CTRLLMHead", {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "dff": 128,
        "use_cache": False}),
    causal("biogpt", "BioGpt", LLAMA),
    causal("smollm3", "SmolLM3", LLAMA),
    causal("recurrent-gemma", "RecurrentGemma", LLAMA, lru_width=64, attention_window_size=8, head_dim=16,
        block_types=["recurrent", "attention"]),
    causal("jamba", "Jamba", LLAMA, num_experts=2, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8, mamba_dt_rank=8, use_mamba_kernels=False),
    transformer("causal/llama-masked", "LlamaForCausalLM", "LlamaConfig", tokens(), **LLAMA),
    Case(name="transformers/causal/gpt2-published", make=gpt2_published, needs=NEEDS),
]  # fmt: skip
