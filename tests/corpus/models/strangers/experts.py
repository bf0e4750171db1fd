"""Routers and experts, memories, and layers that replace attention."""

from __future__ import annotations

import torch
from torch import nn

from ...case import Case, Made
from ..shared import ids, noise
from .stranger import Draw, model_case, stranger

WORDS = 50
LENGTH = 16
TEXT = ids(LENGTH, WORDS)
HEADS = {"heads": 2, "dim_head": 8}
ONE_LAYER = {"num_tokens": WORDS, "dim": 16, "depth": 1}
PICTURE = noise(16, 8, 8)
ROWS = noise(12, 16)


def mask(share: float, *shape: int) -> Draw:
    """Draws a bool mask of which `share` are True; the first element of a row always is."""

    def draw(batch: int) -> torch.Tensor:
        drawn = torch.rand(batch, *shape) < share
        drawn[:, 0] = True
        return drawn

    return draw


def layer(name: str, *draws: Draw, **options: object) -> Case:
    """A case of a layer with 16 columns."""
    return stranger("experts", name, *draws, dim=16, **options)


def routed() -> Made:
    """A transformer whose first call initializes its cluster means; that call happens here, before the build."""
    from routing_transformer import RoutingTransformerLM

    model = RoutingTransformerLM(max_seq_len=LENGTH, window_size=8, causal=True, **ONE_LAYER, **HEADS).eval()
    model(TEXT(3))
    return model, lambda batch: (TEXT(batch),)


def hybrid() -> Made:
    """A model with minGRU and attention in parallel."""
    from minGRU_pytorch.hybridLM import hybridLM

    return hybridLM(**ONE_LAYER, **HEADS), lambda batch: (TEXT(batch),)


def min_lm() -> Made:
    """A minGRU language model."""
    from minGRU_pytorch.minLM import minLM

    return minLM(**ONE_LAYER), lambda batch: (TEXT(batch),)


def memory() -> Made:
    """The neural memory of Titans, whose weights are learned from each sequence; returns the retrieved rows."""
    from titans_pytorch import NeuralMemory

    class Retrieved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = NeuralMemory(dim=8, chunk_size=4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = self.memory(x)[0]
            return rows

    return Retrieved(), lambda batch: (torch.randn(batch, 8, 8),)


def mamba() -> Made:
    """Mamba in plain PyTorch."""
    from minimamba import MambaForCausalLM, MambaLMConfig

    model = MambaForCausalLM(MambaLMConfig(vocab_size=WORDS, d_model=16, n_layer=1, d_state=4))
    return model, lambda batch: (TEXT(batch),)


CASES = [
    layer("mixture_of_experts:MoE", ROWS, num_experts=4, second_policy_eval="all"),
    layer("mixture_of_experts:HeirarchicalMoE", ROWS, num_experts=(2, 2), second_policy_eval="all"),
    layer("soft_moe_pytorch:SoftMoE", ROWS, seq_len=12, num_experts=3),
    layer("soft_moe_pytorch:DynamicSlotsSoftMoE", ROWS, mask(0.7, 12), num_experts=3),
    layer("PEER_pytorch:PEER", noise(6, 16), heads=2, num_experts=64, num_experts_per_head=4, dim_key=8),
    layer("agent_attention_pytorch:AgentSelfAttention", ROWS, mask(0.8, 12), num_agent_tokens=4, **HEADS),
    layer("halonet_pytorch:HaloAttention", PICTURE, block_size=4, halo_size=2, **HEADS),
    layer("deformable_attention:DeformableAttention", PICTURE, offset_groups=1, **HEADS),
    layer("glom_pytorch:Glom", noise(3, 16, 16), levels=3, image_size=16, patch_size=4, local_consensus_radius=1),
    layer("isab_pytorch:ISAB", ROWS, heads=2, num_latents=4),
    stranger("experts", "lambda_networks:LambdaLayer", noise(8, 8, 8), dim=8, dim_out=8, r=5, dim_k=4, heads=2),
    stranger("experts", "MEGABYTE_pytorch:MEGABYTE", TEXT, num_tokens=WORDS, dim=(16, 8), depth=(1, 1), max_seq_len=(4, 4),
        **HEADS),
    stranger("experts", "block_recurrent_transformer_pytorch:BlockRecurrentTransformer", TEXT, num_tokens=WORDS, dim=16, depth=2,
        max_seq_len=LENGTH, block_width=8, num_state_vectors=4, recurrent_layers=(2,), **HEADS),
    stranger("experts", "recurrent_memory_transformer_pytorch:RecurrentMemoryTransformer", TEXT, num_memory_tokens=2,
        seq_len=LENGTH, **ONE_LAYER, **HEADS),
    stranger("experts", "gated_state_spaces_pytorch:GatedStateSpacesLM", TEXT, dss_kernel_N=8, dss_kernel_H=8, **ONE_LAYER),
    model_case("experts", "routing_transformer.RoutingTransformerLM", routed),
    model_case("experts", "minGRU_pytorch.hybridLM", hybrid),
    model_case("experts", "minGRU_pytorch.minLM", min_lm),
    model_case("experts", "titans_pytorch.NeuralMemory", memory),
    model_case("experts", "minimamba.MambaForCausalLM", mamba),
]  # fmt: skip
"""The cases of this module."""
