"""Copies bundles to another machine without their weights, which that machine computes again from the model's seed.

    python -m tests.gpu.helpers.carried pack CARRIED MODEL=BUNDLE...      first machine: copies all files except the weights
    python -m tests.gpu.helpers.carried fill CARRIED                      second one: writes the weights; status 1 if they differ

MODEL is a model file, or `architecture:NAME` of tests/bench/builds/architectures.py.  Environment variables that the model reads
must be those of the build. Tensors that are not parameters or buffers of the model (constants of the program) are copied.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from cgbundle.format import safetensors_files
from tests.helpers.places import ROOT

sys.path[:0] = [str(ROOT / folder) for folder in ("bundles", ".")]

from cgbundle.format import archive, file_names  # noqa: E402

EXTRA = "extra.safetensors"


def tensors_of(model: str) -> dict[str, Any]:
    """Returns parameters and buffers of a model by name."""
    import torch

    if model.startswith("architecture:"):
        from tests.bench.builds import architectures

        module, _ = architectures.make(model.partition(":")[2])
    else:
        from cgcompile.model.load import load_source

        with torch.random.fork_rng(devices=[]):
            module = load_source(str(ROOT / model)).model
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def raw(tensor: Any, strides: tuple[int, ...]) -> bytes:
    """Returns the bytes of a tensor in memory order."""
    from cgcompile.targets.weights import contents

    return contents(tensor, strides)


def pack(folder: Path, model: str, bundle: Path) -> None:
    """Copies a bundle into `folder` under its own name, without weights."""
    target = folder / bundle.name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(bundle, target, ignore=shutil.ignore_patterns(file_names.WEIGHTS, file_names.PROGRAM))
    known = tensors_of(model)
    stored = safetensors_files.Mapped(str(bundle / file_names.WEIGHTS), file_names.WEIGHTS)
    extra: dict[str, safetensors_files.Tensor] = {}
    for row in file_names.weight_files(archive.read_manifest(str(bundle)))[file_names.WEIGHTS]:
        if row.tensor == row.name and row.name not in known:
            entry = stored.entries[row.name]
            extra[row.name] = (entry.dtype, entry.shape, partial(bytes, stored.data(row.name)))
    with open(target / EXTRA, "wb") as file:
        safetensors_files.write(file, extra)
    (target / "carried.json").write_text(json.dumps({"model": model}))
    shutil.copy(bundle / file_names.PROGRAM, target / file_names.PROGRAM)
    print(f"{bundle.name}: {sum(f.stat().st_size for f in target.rglob('*') if f.is_file()) / 1e6:.1f} MB, {len(extra)} constants")


def fill(bundle: Path) -> bool:
    """Writes the weights. Returns whether they have the manifest's hash."""
    from cgbundle.format.shapes import memory_order

    model = json.loads((bundle / "carried.json").read_text())["model"]
    known, manifest = tensors_of(model), archive.read_manifest(str(bundle))
    extra = safetensors_files.Mapped(str(bundle / EXTRA), EXTRA)
    stored: dict[str, safetensors_files.Tensor] = {}
    for row in file_names.weight_files(manifest)[file_names.WEIGHTS]:
        if row.tensor != row.name:
            continue
        if row.name in known:
            order = memory_order(row.shape, row.strides)
            stored[row.name] = (row.dtype, tuple(row.shape[a] for a in order), partial(raw, known[row.name], row.strides))
        else:
            entry = extra.entries[row.name]
            stored[row.name] = (entry.dtype, entry.shape, partial(bytes, extra.data(row.name)))
    with open(bundle / file_names.WEIGHTS, "wb") as file:
        safetensors_files.write(file, stored)
    extra.close()
    (bundle / EXTRA).unlink()
    (bundle / "carried.json").unlink()
    (wanted,) = [file.sha256 for file in manifest.files if file.path == file_names.WEIGHTS]
    same = hashlib.sha256((bundle / file_names.WEIGHTS).read_bytes()).hexdigest() == wanted
    print(f"{bundle.name}: weights {'have the same hash' if same else 'HAVE ANOTHER HASH'}", flush=True)
    return same


def main(action: str, folder: str, *pairs: str) -> int:
    if action == "pack":
        for pair in pairs:
            model, _, bundle = pair.rpartition("=")
            pack(Path(folder), model, Path(bundle))
        return 0
    return 0 if all([fill(path) for path in sorted(Path(folder).glob("*.cgb")) if not (path / file_names.WEIGHTS).exists()]) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
