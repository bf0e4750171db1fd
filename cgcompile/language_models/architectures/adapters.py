"""LoRA adapters for a language model.  A *bank* in the state holds them.  Each lane of a call selects an adapter, 0 for none.

    y = layer(x) + up[adapter] @ (down[adapter] @ x)

A layer multiplies by the factors of all adapters, `adapters * rank` rows, and a mask keeps the rows of the lane's adapter.  This
takes two matrix products and no gather.  They add (in + out) * adapters * rank operations to the in * out of the layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..causal_lm import CausalLM, Result
from ..comparison.refusal import refusal
from ..kernels.int8 import Int8Linear
from ..sampling import Sampling

LANES, TOKENS = 2, 3
"""Lanes and tokens per lane of the call that shows which layers see all tokens."""

Factors = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(slots=True, eq=False)
class Choice:
    """The adapters of the last call.  `mask`: (batch, adapters * rank), 1 at the rows of the lane's adapter, else 0.  It is None
    before the first call, and layers then use no adapters."""

    mask: Tensor | None = None


class Share:
    """A layer's part of the bank: `bank` contains the factors of several layers, and this layer has index `number`."""

    def __init__(self, bank: nn.Module, number: int, choice: Choice) -> None:
        self.bank, self.number, self.choice = bank, number, choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Alike:
    """Layers whose factors are stored in one tensor: they have the same shape, and their paths differ only in the number of the
    decoder's layer.  `name`: their path with the first and the last number, as in model.layers.0-29.self_attn.q_proj."""

    name: str
    paths: tuple[str, ...]
    inputs: int
    outputs: int


class AdaptedLM(CausalLM):
    """A CausalLM with an adapter for each lane: its entries take `adapter`, int64 (batch,), after `slot`; 0 is none.

    Buffers in addition to those of CausalLM: `adapters.NAME.down` and `.up`, (layers, adapters, rank, in) and (..., out), with NAME
    as in Alike.  Adapter number n has index n - 1.
    """

    def __init__(self, network: Any, pages: int, slots: int, turns: int, adapters: int, rank: int) -> None:
        """`adapters`: how many adapters the bank holds, each with a rank of at most `rank`.  Raises language-model-refused."""
        super().__init__(network, pages, slots, turns)
        self.count, self.rank, self.choice = adapters, rank, Choice()
        self.alike = alike_layers(network)
        self.adapters = nn.Module()
        weight = next(network.parameters())
        for layers in self.alike:
            bank = submodule(self.adapters, layers.name)
            for name, width in (("down", layers.inputs), ("up", layers.outputs)):
                zeros = weight.new_zeros(len(layers.paths), adapters, rank, width)
                bank.register_buffer(name, zeros, persistent=False)
            for number, path in enumerate(layers.paths):
                layer = network.get_submodule(path)
                layer.share = Share(bank, number, self.choice)
                layer.forward = MethodType(with_adapters, layer)

    def prefill(  # type: ignore[override]
        self, ids: Tensor, count: Tensor, start: Tensor, pages: Tensor, slot: Tensor, adapter: Tensor, sampling: Sampling,
        length: Tensor | None = None,
    ) -> Result:  # fmt: skip
        """Runs `CausalLM.prefill` with the adapter of each lane."""
        self._choose(adapter)
        return super().prefill(ids, count, start, pages, slot, sampling, length)

    def decode(  # type: ignore[override]
        self, ids: Tensor, count: Tensor, start: Tensor, pages: Tensor, slot: Tensor, adapter: Tensor, sampling: Sampling
    ) -> Result:
        """Runs `prefill` for one token of each lane."""
        return self.prefill(ids, count, start, pages, slot, adapter, sampling)

    def generate(  # type: ignore[override]
        self, ids: Tensor, start: Tensor, pages: Tensor, slot: Tensor, adapter: Tensor, sampling: Sampling, stop: Tensor,
        limit: Tensor,
    ) -> Result:  # fmt: skip
        """Runs `CausalLM.generate` with the adapter of each lane."""
        self._choose(adapter)
        return super().generate(ids, start, pages, slot, sampling, stop, limit)

    def load_adapter(self, adapter: Tensor, scale: Tensor, factors: Factors) -> dict[str, Tensor]:
        """Stores factors in the bank as number `adapter`, int64 (1,); 0 stores nothing.  `factors`, float32, by the names of Alike:
        down (layers, rank, in) and up (layers, out, rank), as PEFT's lora_A and lora_B; pad a smaller rank with zeros.  `scale`,
        float32 (1,), is multiplied into `up`.

        Returns `finite`, bool (): False if a factor is not finite in the bank's dtype; the adapter is then set to zeros.
        """
        row, enabled = (adapter - 1).clamp(min=0), adapter > 0
        rows = []
        for name, (down, up) in factors.items():
            bank = self.adapters.get_submodule(name)
            rows += [(bank.down, down.to(bank.down.dtype)), (bank.up, (up.transpose(1, 2) * scale).to(bank.up.dtype))]
        finite = torch.stack([new.isfinite().all() for _, new in rows]).all()
        for old, new in rows:
            new = torch.where(finite, new, 0).unsqueeze(1)
            old[:, row] = torch.where(enabled.view(1, -1, 1, 1), new, old[:, row])
        return {"finite": finite}

    def _choose(self, adapter: Tensor) -> None:
        owner = 1 + torch.arange(self.count * self.rank, device=adapter.device) // self.rank
        self.choice.mask = (adapter[:, None] == owner).to(self.keys_0.dtype)


def adapter_inputs(alike: Sequence[Alike], adapters: int, rank: int) -> tuple[object, ...]:
    """Returns example inputs of `load_adapter`."""
    factors = {
        layers.name: (
            torch.randn(len(layers.paths), rank, layers.inputs) / layers.inputs**0.5,
            torch.randn(len(layers.paths), layers.outputs, rank) / rank,
        )
        for layers in alike
    }  # fmt: skip
    return torch.randint(1, adapters + 1, (1,)), torch.rand(1), factors


def with_adapters(self: Any, x: Tensor) -> Tensor:
    """Runs the forward of a layer and adds the adapter of each lane.  x: (..., in), the tokens of lane after lane."""
    output: Tensor = type(self).forward(self, x)
    share: Share = self.share
    mask = share.choice.mask
    if mask is None:
        return output
    down, up = share.bank.down[share.number].flatten(0, 1), share.bank.up[share.number].flatten(0, 1)
    inner = F.linear(x, down).reshape(mask.shape[0], -1, mask.shape[1]) * mask[:, None]
    return output + (inner.flatten(0, 1) @ up).view(output.shape)


def alike_layers(network: PreTrainedModel) -> list[Alike]:
    """Groups the layers that get adapters, in the model's order: linear layers that see all tokens of a call, except the head.
    Raises language-model-refused if there are none."""
    runs: dict[tuple[str, str, int, int], list[list[int]]] = {}
    for path, (inputs, outputs) in seen_layers(network).items():
        match = re.match(r"(.*?)\.(\d+)(\..*)", path)
        prefix, number, suffix = match.groups() if match else (path, "-1", "")
        rows = runs.setdefault((prefix, suffix, inputs, outputs), [])
        if rows and rows[-1][-1] == int(number) - 1:
            rows[-1].append(int(number))
        else:
            rows.append([int(number)])
    layer_groups = []
    for (prefix, suffix, inputs, outputs), rows in runs.items():
        for row in rows:
            numbered = row[0] >= 0
            name = f"{prefix}.{row[0]}-{row[-1]}{suffix}" if numbered else prefix
            paths = tuple([f"{prefix}.{number}{suffix}" for number in row]) if numbered else (prefix,)
            layer_groups.append(Alike(name=name, paths=paths, inputs=inputs, outputs=outputs))
    if not layer_groups:
        problem = "no linear layer sees all tokens of a call, so that none can have adapters"
        raise refusal(network.config, problem, "leave --adapters out")
    return layer_groups


def seen_layers(network: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Returns, by path, the widths (in, out) of linear layers that see all tokens of a call, without the head.  Runs a call of
    LANES texts of TOKENS tokens."""
    head, widths, excluded = network.get_output_embeddings(), dict[str, tuple[int, int]](), set[str]()
    layers = {path: module for path, module in network.named_modules() if isinstance(module, nn.Linear | Conv1D | Int8Linear)}

    def watch(path: str, x: Tensor, result: Tensor) -> None:
        widths[path] = x.shape[-1], result.shape[-1]
        if tuple(x.shape[:-1]) not in ((LANES, TOKENS), (LANES * TOKENS,)):
            excluded.add(path)

    hooks = [
        layer.register_forward_hook(lambda _, args, output, path=path: watch(path, args[0], output))
        for path, layer in layers.items()
        if layer is not head
    ]
    implementation = network.config._attn_implementation
    network.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            network(input_ids=torch.arange(LANES * TOKENS, device=next(network.parameters()).device).view(LANES, TOKENS))
    finally:
        network.set_attn_implementation(implementation)
        for hook in hooks:
            hook.remove()
    return {path: pair for path, pair in widths.items() if path not in excluded}


def submodule(root: nn.Module, path: str) -> nn.Module:
    """Returns the module at a path below another one, and creates missing modules."""
    for name in path.split("."):
        if name not in dict(root.named_children()):
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    return root
