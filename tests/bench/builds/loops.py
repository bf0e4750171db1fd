"""Compares greedy decoding in one launch (`torch.while_loop`) with one launch per token, after which the host fetches the token.

    loops.py [--target cuda] [--record cross-compile] [--layers 12] [--width 768] [--tokens 128] [--compile]

Both bundles hold the same GPT, batch 1.  LOOP takes the first token and returns all tokens. STEP returns one token per call and
keeps its cache as state.  `--compile` also runs the two modules under `torch.compile(mode="reduce-overhead")`.  Exit status 1 if
the tokens of the bundles differ.  torch's kernels may round differently, so only the number of its equal tokens is printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cgbundle
import cgcompile

HEAD, VOCABULARY, NONE = 64, 50257, -1
ROUNDS = 12

Caches = list[Tensor]


class Layer(nn.Module):
    """Attention over a cache of keys and values (1, heads, places, HEAD), then an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, place: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.qkv(self.attention_norm(x)).view(1, 3, self.heads, 1, HEAD).unbind(1)
        keys, values = keys.index_copy(2, place.view(1), key), values.index_copy(2, place.view(1), value)
        scores = (query @ keys.transpose(-2, -1)).float() / HEAD**0.5
        later = torch.arange(keys.shape[2], device=x.device) > place
        mixed = torch.softmax(scores.masked_fill(later, float("-inf")), -1).to(x.dtype) @ values
        x = x + self.out(mixed.view(1, -1))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)))), keys, values


class Decoder(nn.Module):
    """Computes the most likely next token of one row."""

    def __init__(self, layers: int, width: int, places: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.cache = (1, width // HEAD, places, HEAD)
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(places, width)
        self.layers, self.norm = nn.ModuleList([Layer(width) for _ in range(layers)]), nn.LayerNorm(width)
        self.to(dtype)

    def empty(self, like: Tensor) -> Caches:
        dtype = self.tokens.weight.dtype
        return [torch.zeros(self.cache, dtype=dtype, device=like.device) for _ in range(2 * len(self.layers))]

    def next(self, token: Tensor, place: Tensor, caches: Caches) -> tuple[Tensor, Caches]:
        x, new_caches = self.tokens(token) + self.places(place.view(1)), []
        for index, layer in enumerate(self.layers):
            x, *new = layer(x, place, *caches[2 * index : 2 * index + 2])
            new_caches += new
        return (self.norm(x) @ self.tokens.weight.t()).argmax(-1), new_caches


class Loop(Decoder):
    def forward(self, token: Tensor) -> Tensor:
        count = self.cache[2]

        def more(place: Tensor, token: Tensor, out: Tensor, *caches: Tensor) -> Tensor:
            return (place < count) & (token != NONE).all()

        def turn(place: Tensor, token: Tensor, out: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
            token, new_caches = self.next(token, place, list(caches))
            return place + 1, token, out.index_copy(0, place.view(1), token), *new_caches

        begin = torch.zeros((), dtype=torch.int64, device=token.device)
        out = torch.zeros(count, dtype=torch.int64, device=token.device)
        return torch.while_loop(more, turn, (begin, token.clone(), out, *self.empty(token)))[2]


class Step(Decoder):
    def __init__(self, layers: int, width: int, places: int, dtype: torch.dtype) -> None:
        super().__init__(layers, width, places, dtype)
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))
        for index, value in enumerate(self.empty(torch.zeros(1))):
            self.register_buffer(f"cache{index}", value)

    def forward(self, token: Tensor) -> Tensor:
        kept = [self.get_buffer(f"cache{index}") for index in range(2 * len(self.layers))]
        token, new_caches = self.next(token, self.get_buffer("place"), kept)
        for old, new in zip(kept, new_caches, strict=True):
            old.copy_(new)
        self.get_buffer("place").add_(1)
        return token


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--record", default="cross-compile")
    parser.add_argument("--compile", action="store_true")
    for name, value in (("layers", 12), ("width", 768), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    device = "cuda" if args.target == "cuda" else "cpu"
    record = {"record": args.record, **({"prove": "none"} if args.record == "cross-compile" else {})} if device == "cuda" else {}
    first = torch.tensor([17], device=device)
    with tempfile.TemporaryDirectory() as scratch:
        programs, models = [], []
        for kind in (Loop, Step):
            torch.manual_seed(0)
            model = kind(args.layers, args.width, args.tokens, torch.bfloat16 if device == "cuda" else torch.float32)
            path = Path(scratch, f"{kind.__name__}.cgb")
            cgcompile.build(model.eval(), lambda: (torch.tensor([17]),), out=path, target=args.target, **record)
            programs.append(cgbundle.load(path, outputs="view"))
            torch.manual_seed(0)  # a build may move the model to another device
            models.append(kind(args.layers, args.width, args.tokens, next(model.parameters()).dtype).eval().to(device))
        loop, step = programs

        def looped() -> list[int]:
            return list(loop(first).tensor.tolist())

        def stepped() -> list[int]:
            step.reset()
            generated, token = [], first
            for _ in range(args.tokens):
                token = step(token).tensor
                generated.append(int(token))
                if generated[-1] == NONE:
                    break
            return generated

        (one, all_at_once), (many, by_one) = timed(looped, stepped)
    print(f"one launch: {args.tokens / one:.0f} tokens/s; a launch per token: {args.tokens / many:.0f}; ratio {many / one:.3f}")
    print("same tokens" if all_at_once == by_one else "OTHER tokens", flush=True)
    if args.compile:
        compiled(models[0], models[1], first, args.tokens, by_one)
    return 0 if all_at_once == by_one else 1


def compiled(loop: nn.Module, step: nn.Module, first: Tensor, tokens: int, wanted: list[int]) -> None:
    """Prints the results of torch.compile for the two modules: tokens per second, and seconds until the first tokens."""
    state = {name: value.clone() for name, value in step.named_buffers()}

    def looped() -> list[int]:
        return list(one(first).tolist())

    def stepped() -> list[int]:
        for name, value in step.named_buffers():
            value.copy_(state[name])
        generated, token = [], first
        for _ in range(tokens):
            token = compiled_step(token).clone()
            generated.append(int(token))
            if generated[-1] == NONE:
                break
        return generated

    with torch.no_grad():
        compiled_step = torch.compile(step, mode="reduce-overhead")
        one = torch.compile(loop, mode="reduce-overhead")
        for name, call in (("a call per token", stepped), ("while_loop", looped)):
            begun = time.perf_counter()
            try:
                call()
                ready = time.perf_counter() - begun
                ((seconds, actual),) = timed(call)
            except RuntimeError as error:  # torch could not compile this module; the other module is still measured
                print(f"torch.compile, {name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}", flush=True)
                continue
            same = sum(a == b for a, b in zip(actual, wanted, strict=False))
            rate = f"{tokens / seconds:.0f} tokens/s, first after {ready:.1f} s"
            print(f"torch.compile, {name}: {rate}; {same} of {len(wanted)} tokens are the bundle's", flush=True)


def timed(*calls: Callable[[], list[int]]) -> list[tuple[float, list[int]]]:
    """Returns (median seconds, result) of each call; at the end of a call the host has the tokens. The calls alternate, because the
    GPU's clock frequency changes."""
    outputs = [call() for call in calls]
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for number, call in enumerate(calls):
            begun = time.perf_counter()
            outputs[number] = call()
            seconds[number].append(time.perf_counter() - begun)
    return [(statistics.median(second), tokens) for second, tokens in zip(seconds, outputs, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
