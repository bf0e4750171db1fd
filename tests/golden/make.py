"""Adds golden bundles of the current format version below tests/golden/; never replaces one: `make golden`.

    PYTHONPATH=.:cli:bundles python tests/golden/make.py [NAME...] [--out FOLDER]

A machine with a GPU adds `gpt_two` and `mlp` (bf16, Inductor), one without adds `cpu_mlp`.  What a golden's recording needs to be
bit-identical to is in its own exam.  All are tiny: the tests of every later version read them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / folder) for folder in ("bundles", ".")]

LIMIT = 500_000
"""Bytes of all goldens of one target together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Golden:
    """`make` gives (module, inputs); `gpu`: for a GPU, else for the cpu."""

    make: Callable[[], tuple[torch.nn.Module, Callable[[int], tuple[torch.Tensor, ...]]]]
    sizes: tuple[int, ...]
    gpu: bool


def gpt_two() -> tuple[torch.nn.Module, Callable[[int], tuple[torch.Tensor, ...]]]:
    """Two layers, width 32, vocabulary 96."""
    import torch

    from tests.gpu.models import GPT

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randint(0, 96, (batch, 8)),)

    return GPT(2, 32, 2, 96, 8).bfloat16(), inputs


def mlp() -> tuple[torch.nn.Module, Callable[[int], tuple[torch.Tensor, ...]]]:
    """Two layers, bf16."""
    import torch

    network, _ = cpu_mlp()

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, 16, dtype=torch.bfloat16),)

    return network.bfloat16(), inputs


def cpu_mlp() -> tuple[torch.nn.Module, Callable[[int], tuple[torch.Tensor, ...]]]:
    """Two layers, fp32."""
    import torch
    from torch import nn

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, 16),)

    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), inputs


GOLDENS = {
    "gpt_two": Golden(make=gpt_two, sizes=(1, 4), gpu=True),
    "mlp": Golden(make=mlp, sizes=(1, 4), gpu=True),
    "cpu_mlp": Golden(make=cpu_mlp, sizes=(1, 4), gpu=False),
}


def add(name: str, folder: Path) -> str:
    """Builds a golden into `folder`; says what it did.  Raises a CgbundleError when the build fails."""
    out = folder / f"{name}.cgb"
    if out.exists():
        return f"{out}: there already, left alone"
    import torch

    import cgcompile

    golden = GOLDENS[name]
    if golden.gpu and not torch.cuda.is_available():
        return f"{out}: needs a GPU"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network, inputs = golden.make()
    target = "auto" if golden.gpu else "cpu"
    built = cgcompile.build(network.eval(), inputs, sizes=list(golden.sizes), out=out, target=target, lower="inductor")
    size = sum(file.bytes for file in built.manifest.files) + (out / "manifest.json").stat().st_size
    return f"{out}: added, {size:,} bytes, {built.manifest.target.arch}, exam by {built.manifest.exam.compare}"


def main() -> int:
    """0 when all goldens of this machine's kind are there and small."""
    import torch

    from cgbundle.errors import CgbundleError
    from cgbundle.schema import FORMAT_VERSION

    fitting = [name for name, golden in GOLDENS.items() if golden.gpu == torch.cuda.is_available()]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(GOLDENS)} (default: this machine's)")
    parser.add_argument("--out", type=Path, default=HERE / f"v{FORMAT_VERSION}", help="folder (default: %(default)s)")
    options = parser.parse_args()
    if set(options.names) - set(GOLDENS):
        parser.error(f"expected names among {', '.join(GOLDENS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        for name in options.names or fitting:
            print(add(name, options.out), flush=True)
    except CgbundleError as error:
        print(f"golden: {error}", file=sys.stderr)
        return 1
    total = sum(os.path.getsize(Path(folder, name)) for folder, _, names in os.walk(options.out) for name in names)
    print(f"{options.out}: {total:,} bytes in all")
    return 0 if total <= 2 * LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
