"""Reads LoRA adapters of PEFT (adapter_config.json, adapter_model.safetensors) for a bundle's bank, which holds several adapters.
Uses only the standard library and cgbundle."""

from __future__ import annotations

import json
import re
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from cgbundle.errors import CgbundleError
from cgbundle.format.file_names import entry_named
from cgbundle.format.safetensors_files import Mapped
from cgbundle.format.schema import Manifest
from cgbundle.tensors.tensor import Tensor

ENTRY = "load_adapter"
"""The bundle's entry that stores an adapter in its bank (cgcompile/language_models/architectures/adapters.py)."""

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
"""Parts of the names of an adapter's tensors."""

READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights", "target_modules", "exclude_modules",
    "base_model_name_or_path", "auto_mapping", "revision", "task_type", "inference_mode", "lora_dropout", "fan_in_fan_out",
    "layers_to_transform", "layers_pattern", "peft_version", "megatron_core", "qalora_group_size", "eva_config",
}  # fmt: skip
"""Fields of the configuration that are read, or that repeat what the tensors show.  Other fields must be null, false or empty."""

CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Kinds of `init_lora_weights` that also change the weights of the base model."""

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Factors = Mapping[str, tuple[Tensor, Tensor]]


class AdapterError(ValueError):
    """An adapter cannot be loaded; the text is one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Layers whose factors the bundle stores in one tensor.  Their paths differ only in the layer's number, `first` to `last`; -1
    for one layer without a number."""

    name: str
    before: str
    first: int
    last: int
    behind: str
    inputs: int
    outputs: int

    @property
    def paths(self) -> list[str]:
        """The path of each layer, in order."""
        return [f"{self.before}{number}{self.behind}" if number >= 0 else self.name for number in range(self.first, self.last + 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bank:
    """A bundle's bank: `count` adapters with a rank of at most `rank`, for the layers of `groups`."""

    count: int
    rank: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterWeights:
    """The inputs of the entry for an adapter: float32 factors with the bank's rank, and the scale of the second factor."""

    scale: float
    factors: Factors


def bank_of(manifest: Manifest) -> Bank | None:
    """Returns the bank of a bundle, or None."""
    widths = {weight.name: weight.shape for weight in manifest.weights if weight.name.startswith("adapters.")}
    if not widths or all(entry.name != ENTRY for entry in manifest.entries):
        return None
    shapes: dict[str, Any] = {spec.name: spec.shape for spec in entry_named(manifest, ENTRY).inputs}
    names = [name[len("factors.") : -len(".0")] for name in shapes if name.startswith("factors.") and name.endswith(".0")]
    count = widths[f"adapters.{names[0]}.down"][1]
    groups = []
    for name in names:
        layers, rank, inputs = shapes[f"factors.{name}.0"]
        outputs = shapes[f"factors.{name}.1"][1]
        match = re.fullmatch(r"(.*\.)(\d+)-\d+(\..*)", name)
        before, number, behind = match.groups() if match else (name, "-1", "")
        first, last = int(number), int(number) + layers - 1
        groups.append(Group(name=name, before=before, first=first, last=last, behind=behind, inputs=inputs, outputs=outputs))
    return Bank(count=count, rank=rank, groups=tuple(groups))


def read_adapter(folder: Path, bank: Bank) -> AdapterWeights:
    """Reads the adapter in a folder.  Raises AdapterError if it does not fit the bank, or is not a plain LoRA of linear layers."""
    rank, scale = read_config(folder / CONFIG)
    if rank > bank.rank:
        raise AdapterError(f"{folder}: rank {rank}; the bundle takes {bank.rank} (cgcompile build --adapter-rank {rank})")
    path = folder / WEIGHTS
    if not path.is_file():
        if (folder / PICKLED).is_file():
            raise AdapterError(f"{folder}: its weights are pickled ({PICKLED}); write {WEIGHTS} with save_pretrained()")
        raise AdapterError(f"{folder}: no {WEIGHTS}")
    try:
        file = Mapped(str(path), str(path))
    except (CgbundleError, OSError) as error:
        raise AdapterError(" ".join(str(error).split())) from None
    try:
        return AdapterWeights(scale=scale, factors=read_factors(file, path, bank, rank))
    finally:
        file.close()


def read_config(path: Path) -> tuple[int, float]:
    """Returns the rank and the scale of a configuration.  Raises AdapterError."""
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise AdapterError(f"{path}: {error.strerror}; expected the folder of an adapter of PEFT") from None
    except ValueError:
        raise AdapterError(f"{path}: no JSON") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: expected peft_type LORA")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise AdapterError(f"{path}: r: expected a whole number of 1 or more")
    if not isinstance(alpha, int | float):
        raise AdapterError(f"{path}: lora_alpha: expected a number")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{path}: bias {config['bias']!r}; adapters with biases are not served")
    for name, value in config.items():
        if name not in READ and value not in (None, False) and value != [] and value != {}:
            raise AdapterError(f"{path}: adapters with the option {name} are not supported")
    if str(config.get("init_lora_weights")).startswith(CHANGED_BASE):
        kind = config["init_lora_weights"]
        raise AdapterError(f"{path}: init_lora_weights {kind!r} changes the base model, too; convert it with PEFT first")
    return rank, alpha / (sqrt(rank) if config.get("use_rslora") else rank)


def read_factors(file: Mapped, path: Path, bank: Bank, rank: int) -> Factors:
    """Reads the factors for all layers of the bank, zeros for layers without an adapter.  Raises AdapterError."""
    names = set(file.entries)
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for group in bank.groups:
        paths = group.paths
        down = array("f", bytes(4 * len(paths) * bank.rank * group.inputs))
        up = array("f", bytes(4 * len(paths) * bank.rank * group.outputs))
        for number, layer in enumerate(paths):
            pair = f"{PREFIX}{layer}{DOWN}", f"{PREFIX}{layer}{UP}"
            if not names & set(pair):
                continue
            values = numbers(file, path, pair[0], (rank, group.inputs))
            begin = number * bank.rank * group.inputs
            down[begin : begin + len(values)] = values
            values = numbers(file, path, pair[1], (group.outputs, rank))
            begin, end = number * bank.rank * group.outputs, (number + 1) * bank.rank * group.outputs
            for column in range(rank):
                up[begin + column : end : bank.rank] = values[column::rank]
            names -= set(pair)
        factors[group.name] = (
            Tensor(down.buffer_info()[0], "float32", (len(paths), bank.rank, group.inputs), None, down),
            Tensor(up.buffer_info()[0], "float32", (len(paths), group.outputs, bank.rank), None, up),
        )
    if names:
        name = min(names)
        if name.endswith((DOWN, UP)):
            layer = name.removeprefix(PREFIX).removesuffix(DOWN).removesuffix(UP)
            raise AdapterError(f"{path}: the bundle has no adapters for {layer}")
        raise AdapterError(f"{path}: {name} is no factor of a linear layer; such adapters are not served")
    return factors


def numbers(file: Mapped, path: Path, name: str, shape: tuple[int, int]) -> array[float]:
    """Returns a tensor as float32.  Raises AdapterError if it is missing or has another shape."""
    entry = file.entries.get(name)
    if entry is None:
        raise AdapterError(f"{path}: {name} is missing, but the other factor of its layer exists")
    if entry.shape != shape:
        raise AdapterError(f"{path}: {name} has the shape {list(entry.shape)}, expected {list(shape)}")
    if entry.dtype not in BYTES:
        raise AdapterError(f"{path}: {name} is {entry.dtype}; expected {', '.join(BYTES)}")
    data, count = file.data(name), shape[0] * shape[1]
    if entry.dtype == "float16":
        return array("f", struct.unpack(f"<{count}e", data))
    factor = array("f")
    if entry.dtype == "float32":
        factor.frombytes(data)
        return factor
    wide = bytearray(4 * count)  # a bfloat16 is the upper half of a float32
    wide[2::4], wide[3::4] = data[0::2], data[1::2]
    factor.frombytes(wide)
    return factor
