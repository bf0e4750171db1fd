"""Bundles that tests of this folder share: built once per run, with eager PyTorch as reference."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

import cgcompile
from cgbundle.format import archive
from cgbundle.format.schema import Manifest
from cgcompile.bundle import manifest_text
from tests.gpu.helpers.models import GPT, mlp
from tests.helpers.bundles import tiny_bundle
from tests.helpers.bundles.shared_builds import shared_build

SIZES = (1, 4)
TOKENS, VOCABULARY, WIDTH = 16, 256, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A bundle, and the model of the bundle, on the GPU."""

    path: Path
    network: nn.Module
    inputs: Callable[[int], tuple[torch.Tensor]]
    tolerance: float

    def draw(self, batch: int, seed: int = 0) -> torch.Tensor:
        """Returns a random input on the GPU, the same one for the same batch and seed."""
        with torch.random.fork_rng():
            torch.manual_seed(1000 * batch + seed)
            return self.inputs(batch)[0].cuda()

    def eager(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the output of eager PyTorch."""
        with torch.no_grad():
            return self.network(value.cuda())

    def check(self, got: torch.Tensor, value: torch.Tensor) -> None:
        """Raises AssertionError unless `got` is the model's output for `value` within the dtype's tolerance."""
        want = self.eager(value)
        assert got.shape == want.shape and got.dtype == want.dtype
        error = (got.cuda().double() - want.double()).abs().max() / want.double().abs().max()
        assert error <= self.tolerance, float(error)


def build_gpt() -> Case:
    """Builds a GPT with two layers, bf16, by Inductor."""
    torch.manual_seed(0)
    network = GPT(2, WIDTH, 2, VOCABULARY, TOKENS).bfloat16().eval()

    def inputs(batch: int) -> tuple[torch.Tensor]:
        return (torch.randint(0, VOCABULARY, (batch, TOKENS)),)

    def build(folder: Path) -> None:
        cgcompile.build(network, inputs, sizes=list(SIZES), out=folder / "gpt.cgb", target="auto", lower="inductor")

    return Case(path=shared_build("gpt", build) / "gpt.cgb", network=network.cuda(), inputs=inputs, tolerance=4e-2)


def build_mlp() -> Case:
    """Builds an MLP, fp32, with PyTorch's own kernels."""
    torch.manual_seed(0)
    network = mlp(WIDTH).eval()

    def inputs(batch: int) -> tuple[torch.Tensor]:
        return (torch.randn(batch, WIDTH),)

    def build(folder: Path) -> None:
        cgcompile.build(network, inputs, sizes=list(SIZES), out=folder / "mlp.cgb", target="auto", lower="eager")

    return Case(path=shared_build("mlp", build) / "mlp.cgb", network=network.cuda(), inputs=inputs, tolerance=1e-4)


def altered(bundle: Path, folder: Path, change: Callable[[Path, Manifest], Manifest | None]) -> Path:
    """Returns a copy of a bundle that `change` edits. If `change` returns a manifest, all hashes are recomputed."""
    copy = folder / "altered.cgb"
    shutil.copytree(bundle, copy)
    manifest = change(copy, archive.read_manifest(str(copy)))
    if manifest is not None:
        tiny_bundle.seal(copy, replace(manifest, files=manifest_text.describe_files(str(copy))))
    return copy
