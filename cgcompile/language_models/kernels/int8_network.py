"""A network of transformers with weights of 8 bits, for processors: linear layers, and embeddings, which share a head's weights
where they did before.  Activations, norms and the cache stay float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...errors import ModelError
from ...model.quantization.stored_weights import Quantization
from ..comparison.refusal import error_text, refusal
from .int8 import Int8Linear, rounded

TOKENS = 64
"""Of a random text, on which the logits are compared."""


class Int8Embedding(nn.Module):
    """An embedding over weights of 8 bits: `weight` int8 (tokens, width), `scale` float32 (tokens,)."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids].float() * self.scale[ids][..., None]


def int8_network(network: PreTrainedModel) -> PreTrainedModel:
    """The model, changed in place.  What is no plain linear layer or embedding keeps its weights: experts in one tensor, scaled
    embeddings.  Weights that several layers share stay one tensor."""
    rounded_weights: dict[int, tuple[Tensor, Tensor]] = {}
    kept = []  # else the memory of one that is replaced could become another's
    for name, module in list(network.named_modules()):
        plain = type(module) is nn.Embedding and module.max_norm is None
        if not isinstance(module, nn.Linear | Conv1D) and not plain:
            continue
        kept.append(module.weight)
        weight = module.weight.T if isinstance(module, Conv1D) else module.weight
        if weight.data_ptr() not in rounded_weights:
            rounded_weights[weight.data_ptr()] = rounded(weight)
        eight, scale = rounded_weights[weight.data_ptr()]
        parent, _, leaf = name.rpartition(".")
        layer = Int8Embedding(eight, scale) if plain else Int8Linear(eight, scale, module.bias)
        setattr(network.get_submodule(parent), leaf, layer)
    return network


def quantized(network: PreTrainedModel) -> tuple[PreTrainedModel, Quantization]:
    """The model, changed in place, and how far its logits are from those that it had.  Raises language-model-refused where it does
    not run over such weights."""
    ids = torch.randint(4, network.config.get_text_config().vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    before, exact = sum(size(tensor) for tensor in tensors(network)), logits(network, ids)
    config = network.config
    try:
        near = logits(int8_network(network), ids)
    except ModelError:
        raise
    except Exception as error:
        raise refusal(config, f"its code does not run over int8 weights: {error_text(error)}", "leave --weights out") from error
    same = int((near.argmax(-1) == exact.argmax(-1)).sum())
    share = float((near - exact).norm() / (exact - exact.mean(-1, keepdim=True)).norm())
    distance = f"the logits of {TOKENS} random tokens differ by {share:.1%} of their spread, {same} likeliest tokens are the same"
    return network, Quantization(
        stored="int8", before=before, after=sum(size(tensor) for tensor in tensors(network)), error=distance
    )


def logits(network: PreTrainedModel, ids: Tensor) -> Tensor:
    """Of every token, by transformers' own attention."""
    network.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            token_logits: Tensor = network(input_ids=ids, use_cache=False).logits[0].float()
            return token_logits
    finally:
        network.set_attn_implementation("paged")


def tensors(network: nn.Module) -> Iterator[Tensor]:
    """All weights, each once."""
    yield from network.parameters()
    yield from network.buffers()


def size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
