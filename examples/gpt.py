"""A GPT (12 layers, width 768, 12 heads, vocabulary 50257) with seeded weights: from 64 tokens per row to the next token's logits.

    cgcompile build examples/gpt.py --sizes 1,8,32 -o gpt.cgb
    GPT_DTYPE=bfloat16 cgcompile build examples/gpt.py --sizes 1,8,32 --target cuda -o gpt.cgb

GPT_DTYPE is float32 (default), bfloat16 or float16.
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

LAYERS = 12
WIDTH = 768
HEADS = 12
VOCABULARY = 50257
TOKENS = 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Block(nn.Module):
    """Attention, then an MLP, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) -> the same shape."""
        batch, tokens, width = x.shape
        split = (batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(self.attention_norm(x)).view(split).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Token ids (batch, tokens) -> logits of the next token (batch, vocabulary)."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Computes only the logits of the last position, which generation needs."""
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, -1]))


def model() -> nn.Module:
    """Returns the network in eval mode, with the same random weights in every process."""
    name = os.environ.get("GPT_DTYPE", "float32")
    if name not in DTYPES:
        raise ValueError(f"GPT_DTYPE: expected one of {', '.join(DTYPES)}, got {name!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(LAYERS, WIDTH, HEADS, VOCABULARY, TOKENS).to(DTYPES[name]).eval()


def inputs(batch: int) -> tuple[torch.Tensor]:
    """Returns `batch` rows of 64 token ids."""
    return (torch.randint(0, VOCABULARY, (batch, TOKENS)),)
