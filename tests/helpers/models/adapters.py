"""LoRA adapters with random factors in PEFT's layout, and models with a merged adapter."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

PREFIX = "base_model.model."


def write_adapter(
    folder: Path, network: nn.Module, rank: int, seed: int, targets: tuple[str, ...] = (), dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:  # fmt: skip
    """Writes an adapter. `targets` are the last parts of the layers' paths; () means all linear layers except the head. `config`
    extends the configuration. The factors are large enough to change the generated texts."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for path, layer in network.named_modules():
        name = path.rpartition(".")[2]
        if not isinstance(layer, nn.Linear | Conv1D) or name == "lm_head" or (targets and name not in targets):
            continue
        inputs, outputs = layer.weight.shape if isinstance(layer, Conv1D) else reversed(layer.weight.shape)
        pair = torch.randn(rank, inputs, generator=generator) / inputs**0.5, torch.randn(outputs, rank, generator=generator) * 0.3
        for kind, factor in zip("AB", pair, strict=True):
            tensors[f"{PREFIX}{path}.lora_{kind}.weight"] = factor.to(dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    defaults = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "modules_to_save": None, "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(defaults | config))
    return folder


def factors_of(folder: Path) -> tuple[float, Mapping[str, tuple[Tensor, Tensor]]]:
    """Returns the scale of an adapter, and its float32 factors by layer path."""
    config, tensors = json.loads((folder / "adapter_config.json").read_text()), load_file(folder / "adapter_model.safetensors")
    rank, down = config["r"], ".lora_A.weight"
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    names = [name.removesuffix(down) for name in tensors if name.endswith(down)]
    pairs = [(tensors[f"{name}.lora_A.weight"].float(), tensors[f"{name}.lora_B.weight"].float()) for name in names]
    return scale, {name.removeprefix(PREFIX): pair for name, pair in zip(names, pairs, strict=True)}


def merged(network: Any, folder: Path) -> Any:
    """Returns a copy of a network with `scale * up @ down` added to its weights."""
    network_copy, (scale, factors) = copy.deepcopy(network), factors_of(folder)
    for path, (down, up) in factors.items():
        layer = network_copy.get_submodule(path)
        more = scale * up @ down
        layer.weight.data += more.T if isinstance(layer, Conv1D) else more
    return network_copy
