"""A GPT decoder that keeps keys and values in buffers: it reads a prompt once, then generates one token at a time.

    cgcompile build examples/decoder.py --sizes batch=1,8 --sizes prefill:seq=64 -o decoder.cgb
    python examples/generate.py decoder.cgb --batch 8 --tokens 200

The bundle has two entries, `prefill` and `decode`, with one set of weights and one cache.  The buffers become state of a session.
`generate.py` calls the bundle without torch.
DECODER_DTYPE is float32 (default), bfloat16 or float16; DECODER_LAYERS (default 12) and DECODER_WIDTH (768, heads of 64) set the
size.
"""

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

HEAD = 64
VOCABULARY = 50257
ROWS = 8
PLACES = 288
"""Maximum tokens in a row's cache, prompt and answer together."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Block(nn.Module):
    """Attention to all tokens of the row, then an MLP, each after a LayerNorm and added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.register_buffer("keys", torch.zeros(ROWS, self.heads, PLACES, HEAD), persistent=False)
        self.register_buffer("values", torch.zeros(ROWS, self.heads, PLACES, HEAD), persistent=False)

    def forward(self, x: torch.Tensor, places: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """(batch, seq, width) -> the same shape.  `places`: positions of these tokens in the cache, int64 (seq,); `seen`: the
        positions that each token attends to, bool (seq, PLACES)."""
        batch, tokens, width = x.shape
        query, key, value = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, self.heads, HEAD).unbind(2)
        rows = torch.arange(batch, device=x.device)[:, None]
        self.keys[rows, :, places] = key
        self.values[rows, :, places] = value
        mixed = F.scaled_dot_product_attention(query.transpose(1, 2), self.keys[:batch], self.values[:batch], attn_mask=seen)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """Token ids (batch, seq) -> the likeliest next token of every row, int64 (batch, 1), and its logit (batch, 1)."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(PLACES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("length", torch.zeros(1, dtype=torch.int64), persistent=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads tokens that follow those in the cache."""
        places = self.length + torch.arange(ids.shape[1], device=ids.device)
        seen = torch.arange(PLACES, device=ids.device) <= places[:, None]
        x = self.token(ids) + self.place(places)
        for block in self.blocks:
            x = block(x, places, seen)
        self.length += ids.shape[1]
        best, ids = self.head(self.norm(x[:, -1])).max(-1, keepdim=True)
        return ids, best

    def prefill(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Begins a new text with a prompt, (batch, seq)."""
        self.length.zero_()
        return self(ids)

    def decode(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Continues with a token for each row, (batch, 1)."""
        return self(ids)


def model() -> nn.Module:
    """Returns the network in eval mode, with the same random weights in every process."""
    name = os.environ.get("DECODER_DTYPE", "float32")
    if name not in DTYPES:
        raise ValueError(f"DECODER_DTYPE: expected one of {', '.join(DTYPES)}, got {name!r}")
    layers, width = int(os.environ.get("DECODER_LAYERS", "12")), int(os.environ.get("DECODER_WIDTH", "768"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Decoder(layers, width).to(DTYPES[name]).eval()


def prompts(batch: int, seq: int) -> tuple[torch.Tensor]:
    """Returns `seq` token ids for `batch` rows."""
    return (torch.randint(0, VOCABULARY, (batch, seq)),)


def tokens(batch: int) -> tuple[torch.Tensor]:
    """Returns a token id for each of `batch` rows."""
    return prompts(batch, 1)


def entries() -> dict[str, Callable[..., tuple[torch.Tensor]]]:
    """Returns the methods to call, and the functions that make their inputs."""
    return {"prefill": prompts, "decode": tokens}
