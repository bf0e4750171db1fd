"""The models whose products and convolutions are tuned: name -> exported program and the tensors of every size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from cgcompile.export.export import export
from cgcompile.model.load import load_source
from cgcompile.model.source import all_keys, sample
from tests.bench.common import children


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """A model file, its sizes, and its environment."""

    file: str
    sizes: dict[str, tuple[int, ...]]
    environment: dict[str, str] = field(default_factory=dict)


BATCHES: dict[str, tuple[int, ...]] = {"batch": (1, 8, 32)}
MODELS = {
    "gpt-bf16": Tuned(file="examples/gpt.py", sizes=BATCHES, environment={"GPT_DTYPE": "bfloat16"}),
    "gpt-fp32": Tuned(file="examples/gpt.py", sizes=BATCHES, environment={"GPT_DTYPE": "float32"}),
    "minilm": Tuned(file="examples/minilm.py", sizes={"batch": (1, 8), "seq": (32, 128)}),
    "resnet-fp16": Tuned(
        file="examples/resnet.py",
        sizes={"batch": (1, 8)},
        environment={"RESNET_DTYPE": "float16", "RESNET_LAYOUT": "channels_last"},
    ),
    "llama-8b": Tuned(file="tests/bench/tuning/llama_layer.py", sizes={"batch": (8, 32, 128)}, environment={"LLAMA_SHAPE": "8b"}),
    "llama-1b": Tuned(file="tests/bench/tuning/llama_layer.py", sizes={"batch": (8, 32, 128)}, environment={"LLAMA_SHAPE": "1b"}),
    "mlp": Tuned(file="examples/mlp.py", sizes={"batch": (1, 8)}),
}


def calls(name: str) -> Iterator[tuple[torch.export.ExportedProgram, tuple[torch.Tensor, ...]]]:
    """Yields the program with the tensors of each size. `name` is "gpt-bf16", or "gpt-bf16@8,32" for some batch sizes."""
    name, _, picked = name.partition("@")
    tuned = MODELS[name]
    before = dict(os.environ)
    os.environ.update(tuned.environment)
    try:
        source = load_source(str(children.ROOT / tuned.file))
        exported = export(source, tuned.sizes)
        wanted = [key for key in all_keys(tuned.sizes) if not picked or str(key[0]) in picked.split(",")]
        keys = [dict(zip(tuned.sizes, key, strict=True)) for key in wanted]
        tensors = [sample(source, key).tensors for key in keys]
    finally:
        os.environ.clear()
        os.environ.update(before)
    for tensor in tensors:
        yield exported.programs.first, tensor
