"""Builds bundles for this GPU's architecture in a process that sees no GPU; the tests replay them on the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import cgcompile
from tests.helpers.models import conditional_models, donation_models, entry_models
from tests.helpers.models.state_models import SIZES, draws, looks, pairs, rows, running, singles
from tests.helpers.places import ROOT

STATEFUL = {"running": (running, rows), "draws": (draws, singles), "looks": (looks, pairs)}
"""The models of test_state_traced.py, and functions that make their inputs."""


def built_without_gpu(kind: str, name: str, path: Path) -> Path:
    """Builds the bundle of a model in `arguments` at `path`."""
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-m", __name__, kind, name, str(path), arch], env=environment, cwd=ROOT, check=True)
    return path


def arguments(kind: str, name: str) -> tuple[Any, Any, dict[str, Any]]:
    """Returns the model, its inputs, and options of the build."""
    if kind == "entries":
        return entry_models.lanes(), entry_models.ENTRIES, {"sizes": entry_models.SIZES}
    if kind == "donations":
        return (
            donation_models.donated(),
            donation_models.ENTRIES,
            {"sizes": donation_models.SIZES, "donations": donation_models.DONATIONS},
        )
    if kind == "state":
        make, inputs = STATEFUL[name]
        return make(), inputs, {"sizes": list(SIZES), "train": True}
    make, inputs, _ = conditional_models.MODELS[name]
    torch.manual_seed(1)
    model, examples = make().eval(), inputs()
    return model, lambda: (examples[0],), {}


if __name__ == "__main__":
    kind, name, path, arch = sys.argv[1:]
    assert not torch.cuda.is_available()
    model, inputs, options = arguments(kind, name)
    cgcompile.build(model, inputs, out=path, target=arch, prove="none", **options)
