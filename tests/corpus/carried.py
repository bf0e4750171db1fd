"""Removes those weights from a bundle that its case can make again. The bundle becomes small enough to copy to another machine."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from cgbundle.format import archive, file_names, safetensors

KEPT = "weights.kept"
"""File that replaces the weights: a line of JSON with the names and ranges left out, then all other bytes in order."""


def draw_alike_everywhere() -> None:
    """Makes truncated normal weights of this process the same on every machine. torch's `erfinv_` is an MKL function, whose code
    depends on the processor's vendor. It is replaced by one in float64."""

    def erfinv_(self: torch.Tensor) -> torch.Tensor:
        return self.copy_(torch.special.ndtri((self.double() + 1) / 2) / math.sqrt(2))

    torch.Tensor.erfinv_ = erfinv_  # type: ignore[method-assign]


def leave_out_weights(bundle: Path, module: torch.nn.Module) -> None:
    """Removes the weights of a bundle in place; it cannot be loaded until `with_weights` has restored them."""
    path, tensors = bundle / file_names.WEIGHTS, _tensors(module)
    with open(path, "rb") as file:
        entries = safetensors.read_header(file, str(path))
    data = memoryview(path.read_bytes())
    left_out = [
        (name, entry.begin, entry.end)
        for name, entry in entries.items()
        if name in tensors and _bytes(tensors[name]) == data[entry.begin : entry.end]
    ]
    with open(bundle / KEPT, "wb") as file:
        file.write(json.dumps({"size": len(data), "left_out": left_out}).encode() + b"\n")
        place = 0
        for _, begin, end in left_out:
            file.write(data[place:begin])
            place = end
        file.write(data[place:])
    path.unlink()


def with_weights(bundle: Path, module: torch.nn.Module, into: Path) -> Path:
    """Returns the bundle, or a copy in the folder `into` with its weights. Raises ValueError if the module's weights differ."""
    if not (bundle / KEPT).exists():
        return bundle
    bundle_copy, tensors = into / bundle.name, _tensors(module)
    shutil.copytree(bundle, bundle_copy, ignore=shutil.ignore_patterns(KEPT))
    line, _, rest = (bundle / KEPT).read_bytes().partition(b"\n")
    about, parts, place, used = json.loads(line), [], 0, 0
    for name, begin, end in [*about["left_out"], ("", about["size"], about["size"])]:
        parts += [rest[used : used + begin - place], _bytes(tensors[name]) if name else b""]
        used, place = used + begin - place, end
    data = b"".join(parts)
    (bundle_copy / file_names.WEIGHTS).write_bytes(data)
    files = {file.path: file.sha256 for file in archive.read_manifest(str(bundle_copy)).files}
    if hashlib.sha256(data).hexdigest() != files[file_names.WEIGHTS]:
        raise ValueError(f"{bundle}: the case makes other weights here")
    return bundle_copy


def _tensors(module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def _bytes(tensor: torch.Tensor) -> bytes:
    """Returns the row-major bytes of a tensor."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
