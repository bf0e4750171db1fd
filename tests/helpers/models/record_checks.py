"""Models with their own classes as inputs and outputs, and checks of their bundles against eager PyTorch on a CPU and a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cgbundle
from tests.helpers.models.state_checks import near

LAYERS, HEADS, WIDTH, VOCABULARY = 1, 2, 32, 64


def causal() -> nn.Module:
    """Returns a causal language model of transformers that returns its cache."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    assert model.config.use_cache
    return model


def prompt(batch: int, seq: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns (args, kwargs) of the first call."""
    ids = torch.randint(0, VOCABULARY, (batch, seq))
    return (ids,), {"attention_mask": torch.ones(batch, seq, dtype=torch.int64)}


def step(batch: int, past: int) -> dict[str, Any]:
    """Returns the arguments of the next call, with a cache of `past` tokens."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer in range(LAYERS):
        cache.update(*torch.randn(2, batch, HEADS, past, WIDTH // HEADS), layer)
    return {"input_ids": torch.randint(0, VOCABULARY, (batch, 1)), "past_key_values": cache}


@dataclass(frozen=True)
class Batch:
    """An input with tensors and a number."""

    x: torch.Tensor
    mask: torch.Tensor
    scale: float = 2.0


@dataclass
class Found:
    """An output with nested records and a field that is None."""

    total: torch.Tensor
    parts: dict[str, Batch]
    rest: torch.Tensor | None = None


class DataclassModel(nn.Module):
    """Takes a dataclass, positional and keyword arguments; returns nested dataclasses."""

    def forward(self, batch: Batch, *more: torch.Tensor, bias: torch.Tensor, **named: torch.Tensor) -> Found:
        x = (batch.x * batch.scale + bias).relu() * batch.mask
        return Found((x + more[0]).sum(1), {"first": Batch(x, named["own"], 1.0)})


def dataclass_inputs(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns (args, kwargs) for `DataclassModel`."""
    record = Batch(torch.randn(batch, 8), torch.ones(batch, 8))
    return (record, torch.randn(batch, 8)), {"bias": torch.randn(8), "own": torch.randn(batch, 8)}


def check_prompt_and_step(first: Path, then: Path, device: str, batch: int, seq: int) -> None:
    """Passes the cache from the bundle of the prompt to the bundle of the next token; both must equal eager PyTorch."""
    model = causal()
    (ids,), kwargs = prompt(batch, seq)
    token = torch.randint(0, VOCABULARY, (batch, 1))
    with cgbundle.load(first) as prefill, cgbundle.load(then) as decode, torch.no_grad():
        output = prefill(ids.to(device), **{name: value.to(device) for name, value in kwargs.items()})
        expected = model(ids, **kwargs)
        near_output(output, expected)
        again = decode(token.to(device), past_key_values=output.past_key_values)
        near_output(again, model(token, past_key_values=expected.past_key_values))


def check_step(path: Path, device: str, batch: int, past: int) -> None:
    """Checks that the bundle takes transformers' cache as an object or as a dict of dicts, and returns it as a record."""
    model, kwargs = causal(), step(batch, past)
    cache = kwargs["past_key_values"]
    layers = [{"keys": layer.keys.clone().to(device), "values": layer.values.clone().to(device)} for layer in cache.layers]
    ids = kwargs["input_ids"].to(device)
    with cgbundle.load(path) as program, torch.no_grad():
        output = program(input_ids=ids, past_key_values={"layers": layers})
        moved = step(batch, past)["past_key_values"]
        for layer, tensors in zip(moved.layers, layers, strict=True):
            layer.keys, layer.values = tensors["keys"], tensors["values"]
        again = program(input_ids=ids, past_key_values=moved)
        expected = model(**kwargs)
        for actual in (output, again, program(input_ids=ids, past_key_values=moved)):
            near_output(actual, expected)


def near_output(actual: Any, expected: Any) -> None:
    """Checks logits and cache of an output, which can be read in the same ways as transformers' output."""
    assert list(actual) == list(expected.keys()) and type(actual).__name__ == type(expected).__name__ and actual.loss is None
    assert actual[0] is actual["logits"] is actual.logits and type(actual.past_key_values).__name__ == "DynamicCache"
    near(actual.logits, expected.logits)
    for layer, other in zip(actual.past_key_values.layers, expected.past_key_values.layers, strict=True):
        near(layer.keys, other.keys)
        near(layer.values, other.values)


def check_dataclasses(path: Path, device: str) -> None:
    """Checks that dataclass inputs can be passed as dataclasses or as dicts, and the returned record."""
    with cgbundle.load(path) as program, torch.no_grad():
        for batch in (1, 3, 4):
            (record, *more), kwargs = dataclass_inputs(batch)
            expected = DataclassModel()(record, *more, **kwargs)
            moved = Batch(record.x.to(device), record.mask.to(device))
            rest, named = [tensor.to(device) for tensor in more], {name: value.to(device) for name, value in kwargs.items()}
            for argument in (moved, {"x": moved.x, "mask": moved.mask, "scale": 2.0}):
                output = program(argument, *rest, **named)
                near(output.total, expected.total)
                near(output.parts["first"].x, expected.parts["first"].x)
                assert output.rest is None and output.parts["first"].scale == 1.0
                assert repr(output).startswith("Found(total=tensor(")
