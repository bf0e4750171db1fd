"""A decoder with Llama's architecture on several GPUs, split as in Megatron-LM: two all_reduces per layer.

Each rank has a share of the heads and of the hidden width; the outputs of attention and MLP are summed over all ranks.  The
vocabulary is split too, and the scores are gathered.  Keys and values of earlier tokens are state: each rank stores those of its
heads.

    cgcompile build examples/tensor_parallel.py --world 2 --target sm_90 --sizes 1,8
    program = cgbundle.load("tensor_parallel.cgb", devices=[0, 1])
    scores = program(tokens, positions)

The weights are random here, and the same for every number of ranks.  To use your weights, let `weight` read a part of a checkpoint.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as collectives

LAYERS, WIDTH, HIDDEN, HEADS, KV_HEADS, VOCABULARY = map(int, os.environ.get("SHAPE", "2,256,512,8,4,1024").split(","))
SLOTS, LENGTH, HEAD = 8, 128, WIDTH // HEADS
DTYPE = torch.bfloat16


def weight(name: str, rows: int, columns: int, rank: int, world: int, split: int) -> nn.Parameter:
    """Returns a rank's part of a matrix: of its rows (split 0) or columns (1), or all of it (-1)."""
    generator = torch.Generator().manual_seed(hash_of(name))
    matrix = torch.randn(rows, columns, generator=generator) * columns**-0.5
    part = matrix if split < 0 else matrix.chunk(world, split)[rank]
    return nn.Parameter(part.to(DTYPE).clone(), requires_grad=False)


def hash_of(name: str) -> int:
    """Returns a number that is the same in every process."""
    return int.from_bytes(name.encode(), "little") % (1 << 62)


def summed(partial: torch.Tensor, world: int) -> torch.Tensor:
    return collectives.all_reduce(partial, "sum", dist.group.WORLD) if world > 1 else partial


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=DTYPE), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (WIDTH,), eps=1e-5).to(DTYPE) * self.weight


class Attention(nn.Module):
    def __init__(self, name: str, rank: int, world: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.world = HEADS // world, KV_HEADS // world, world
        self.query = weight(f"{name}.q", WIDTH, WIDTH, rank, world, 0)
        self.key = weight(f"{name}.k", KV_HEADS * HEAD, WIDTH, rank, world, 0)
        self.value = weight(f"{name}.v", KV_HEADS * HEAD, WIDTH, rank, world, 0)
        self.out = weight(f"{name}.o", WIDTH, WIDTH, rank, world, 1)
        for cache in ("keys", "values"):
            self.register_buffer(cache, torch.zeros(SLOTS, LENGTH, self.kv_heads, HEAD, dtype=DTYPE))
        self.register_buffer("turns", 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        batch = x.shape[0]
        query = self.turned(F.linear(x, self.query).view(batch, self.heads, HEAD), positions)
        key = self.turned(F.linear(x, self.key).view(batch, self.kv_heads, HEAD), positions)
        value = F.linear(x, self.value).view(batch, self.kv_heads, HEAD)
        rows = torch.arange(batch, device=x.device)
        self.keys[rows, positions] = key
        self.values[rows, positions] = value
        keys, values = self.keys[:batch], self.values[:batch]
        query = query.view(batch, self.kv_heads, -1, HEAD)
        scores = torch.einsum("bkgh,blkh->bkgl", query.float(), keys.float()) * HEAD**-0.5
        seen = torch.arange(LENGTH, device=x.device) <= positions[:, None]
        scores = scores.masked_fill(~seen[:, None, None, :], -torch.inf).softmax(-1)
        attention = torch.einsum("bkgl,blkh->bkgh", scores, values.float()).to(DTYPE).reshape(batch, -1)
        return summed(F.linear(attention, self.out), self.world)

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Applies rotary position embeddings."""
        angles = positions[:, None, None] * self.turns
        first, second = x.float().chunk(2, -1)
        sine, cosine = angles.sin(), angles.cos()
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).to(DTYPE)


class Layer(nn.Module):
    def __init__(self, name: str, rank: int, world: int) -> None:
        super().__init__()
        self.before, self.between, self.world = Norm(), Norm(), world
        self.attention = Attention(name, rank, world)
        self.gate = weight(f"{name}.gate", HIDDEN, WIDTH, rank, world, 0)
        self.up = weight(f"{name}.up", HIDDEN, WIDTH, rank, world, 0)
        self.down = weight(f"{name}.down", WIDTH, HIDDEN, rank, world, 1)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x), positions)
        wide = self.between(x)
        wide = F.silu(F.linear(wide, self.gate)) * F.linear(wide, self.up)
        return x + summed(F.linear(wide, self.down), self.world)


class Decoder(nn.Module):
    """One decoding step: from a token and its position for each row to the scores of the next token."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.world = world
        self.embedding = weight("embedding", VOCABULARY, WIDTH, 0, 1, -1)
        self.layers = nn.ModuleList([Layer(f"layer{number}", rank, world) for number in range(LAYERS)])
        self.last = Norm()
        self.head = weight("head", VOCABULARY, WIDTH, rank, world, 0)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding[tokens]
        for layer in self.layers:
            x = layer(x, positions)
        scores = F.linear(self.last(x), self.head)
        if self.world > 1:
            scores = collectives.all_gather_tensor(scores, 1, dist.group.WORLD)
        return scores.float()


def model(rank: int, world: int) -> nn.Module:
    return Decoder(rank, world).eval()


def inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, VOCABULARY, (batch,)), torch.zeros(batch, dtype=torch.int64)
