"""8-bit weights for a network of transformers on CPUs: linear layers, and embeddings, which still share weights with the head if
they did before.  Activations, norms and the cache stay float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...errors import ModelError
from ...model.quantization.stored_weights import Quantization
from ..comparison.refusal import error_text, refusal
from .int8 import Int8Linear, quantize_rows

TOKENS = 64
"""Tokens of a random text whose logits are compared."""


class Int8Embedding(nn.Module):
    """An embedding with 8-bit weights: `weight` int8 (tokens, width), `scale` float32 (tokens,)."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids].float() * self.scale[ids][..., None]


def int8_network(network: PreTrainedModel) -> PreTrainedModel:
    """Quantizes the model in place.  Layers other than plain linear layers and embeddings keep their weights: experts in one
    tensor, scaled embeddings.  Weights shared by several layers stay one tensor."""
    rounded_weights: dict[int, tuple[Tensor, Tensor]] = {}
    originals = []  # keeps them alive, so that their data_ptr is not reused
    for name, module in list(network.named_modules()):
        plain = type(module) is nn.Embedding and module.max_norm is None
        if not isinstance(module, nn.Linear | Conv1D) and not plain:
            continue
        originals.append(module.weight)
        weight = module.weight.T if isinstance(module, Conv1D) else module.weight
        if weight.data_ptr() not in rounded_weights:
            rounded_weights[weight.data_ptr()] = quantize_rows(weight)
        int8_weight, scale = rounded_weights[weight.data_ptr()]
        parent, _, leaf = name.rpartition(".")
        layer = Int8Embedding(int8_weight, scale) if plain else Int8Linear(int8_weight, scale, module.bias)
        setattr(network.get_submodule(parent), leaf, layer)
    return network


def quantized(network: PreTrainedModel) -> tuple[PreTrainedModel, Quantization]:
    """Quantizes the model in place, and returns how much its logits change.  Raises language-model-refused if it does not run with
    such weights."""
    ids = torch.randint(4, network.config.get_text_config().vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    before, exact = sum(size(tensor) for tensor in tensors(network)), logits(network, ids)
    config = network.config
    try:
        int8 = logits(int8_network(network), ids)
    except ModelError:
        raise
    except Exception as error:
        raise refusal(config, f"its code does not run over int8 weights: {error_text(error)}", "leave --weights out") from error
    equal = int((int8.argmax(-1) == exact.argmax(-1)).sum())
    share = float((int8 - exact).norm() / (exact - exact.mean(-1, keepdim=True)).norm())
    distance = f"the logits of {TOKENS} random tokens differ by {share:.1%} of their spread, {equal} likeliest tokens are the same"
    return network, Quantization(
        stored="int8", before=before, after=sum(size(tensor) for tensor in tensors(network)), error=distance
    )


def logits(network: PreTrainedModel, ids: Tensor) -> Tensor:
    """Returns the logits of every token, with transformers' own attention."""
    network.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            token_logits: Tensor = network(input_ids=ids, use_cache=False).logits[0].float()
            return token_logits
    finally:
        network.set_attn_implementation("paged")


def tensors(network: nn.Module) -> Iterator[Tensor]:
    """Yields all parameters and buffers."""
    yield from network.parameters()
    yield from network.buffers()


def size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
