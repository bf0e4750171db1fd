"""Architectures of transformers with two layers and seeded random weights: name -> (module, inputs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH, HEADS, VOCABULARY, TOKENS = 64, 4, 500, 16

Made = tuple[nn.Module, Callable[..., tuple[torch.Tensor, ...]]]


class First(nn.Module):
    """Wraps a network of transformers: takes one tensor and returns the first tensor of the output."""

    def __init__(self, network: nn.Module, **options: Any) -> None:
        super().__init__()
        self.network = network
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns logits or the last hidden state."""
        return self.network(x, return_dict=False, **self.options)[0]


def ids(batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(5, VOCABULARY, (batch, TOKENS)),)


def pictures(side: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, 3, side, side),)

    return inputs


def spectra(batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, 80, 100),)


def bert() -> Made:
    """An encoder with learned positions."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=4 * WIDTH
    )
    return First(BertModel(config, add_pooling_layer=False)), ids


def gpt2() -> Made:
    """A decoder with learned positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=64, use_cache=False)
    return First(GPT2LMHeadModel(config), use_cache=False), ids


def llama() -> Made:
    """A decoder with rotary positions and grouped keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return First(LlamaForCausalLM(config), use_cache=False), ids


def mamba() -> Made:
    """A state-space model, in its sequential implementation."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=8, num_hidden_layers=2, use_cache=False, use_mambapy=False
    )
    return First(MambaForCausalLM(config), use_cache=False), ids


def vit() -> Made:
    """A transformer over image patches."""
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=4 * WIDTH, image_size=32, patch_size=8
    )
    return First(ViTModel(config, add_pooling_layer=False)), pictures(32)


def swin() -> Made:
    """A transformer over shifted windows."""
    from transformers import SwinConfig, SwinModel

    config = SwinConfig(image_size=64, patch_size=4, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4)
    return First(SwinModel(config, add_pooling_layer=False)), pictures(64)


def t5() -> Made:
    """An encoder with relative positions."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=4 * WIDTH, num_layers=2, num_heads=HEADS)
    return First(T5EncoderModel(config)), ids


def whisper() -> Made:
    """An audio encoder that starts with convolutions."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=WIDTH,
        encoder_layers=2,
        encoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * WIDTH,
        num_mel_bins=80,
        max_source_positions=50,
    )
    return First(WhisperEncoder(config)), spectra


ARCHITECTURES: dict[str, Callable[[], Made]] = {
    "BERT": bert,
    "GPT-2": gpt2,
    "Llama": llama,
    "Mamba": mamba,
    "ViT": vit,
    "Swin": swin,
    "T5 encoder": t5,
    "Whisper encoder": whisper,
}


def make(name: str) -> Made:
    """Returns an architecture in eval mode, with the same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, inputs = ARCHITECTURES[name]()
    return module.eval(), inputs
