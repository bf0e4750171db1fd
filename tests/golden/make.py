"""Adds golden bundles of the current format version below tests/golden/; never replaces one: `make golden`.

    PYTHONPATH=.:cli:bundles python tests/golden/make.py [NAME...] [--out FOLDER]

A machine with a GPU adds `gpt_two`, `mlp` (bf16) and `state`, one without adds `cpu_mlp`, `cpu_cache`, `cpu_state`, `cpu_records`,
`cpu_entries`, `cpu_lanes`, `cpu_chains`, `cpu_fixed`, `traced_entries`, `traced_chains`, `traced_state`, `traced_branches`,
`traced_switch`, `traced_fixed` and `traced_tables`.  All are tiny, because the tests of every later version read them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).absolute().parent
sys.path[:0] = [str(HERE.parents[1] / folder) for folder in ("bundles", ".")]


TRITON_ONLY = (("TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS", "TRITON"),)
"""Matrix products by Triton: an image of cuBLAS is 1.5 MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Golden:
    """A function of models.py, and the bytes that it may take: all goldens for a GPU stay below 500 KB together.

    `gpu`: whether the machine that makes it has one.  `target`: never `cpu`, whose code runs only on processors like the builder's.
    """

    sizes: tuple[Any, ...]
    gpu: bool
    limit: int
    target: str = "x86-64-v3"
    level: str = "inductor"
    environment: tuple[tuple[str, str], ...] = ()
    donations: tuple[tuple[str, str], ...] = ()


PAIRS = (("encode", "step.hidden"), ("step.0", "step.hidden"))

GOLDENS = {
    "gpt_two": Golden(sizes=(4,), gpu=True, limit=380_000, target="auto"),
    "mlp": Golden(sizes=(1, 4), gpu=True, limit=120_000, target="auto", level="max-autotune", environment=TRITON_ONLY),
    "cpu_mlp": Golden(sizes=(1, 4), gpu=False, limit=280_000),
    "cpu_cache": Golden(sizes=(1, 4), gpu=False, limit=500_000),
    "cpu_state": Golden(sizes=(1, 4), gpu=False, limit=500_000),
    "cpu_records": Golden(sizes=(1, 4), gpu=False, limit=330_000),
    "state": Golden(sizes=(1, 4), gpu=True, limit=250_000, target="auto", level="max-autotune", environment=TRITON_ONLY),
    "cpu_entries": Golden(sizes=("batch=1,4", "fill:rows=2"), gpu=False, limit=700_000),
    "traced_entries": Golden(sizes=("batch=1,4", "fill:rows=2"), gpu=False, limit=110_000, target="sm_90"),
    "cpu_lanes": Golden(sizes=("prefill:seq=64,256", "decode:batch=1,8"), gpu=False, limit=1_250_000),
    "cpu_chains": Golden(sizes=("encode:batch=1,4", "step:batch=4"), gpu=False, limit=550_000, donations=PAIRS),
    "traced_chains": Golden(sizes=("encode:batch=1,4", "step:batch=4"), gpu=False, limit=110_000, target="sm_90", donations=PAIRS),
    "traced_state": Golden(sizes=(1, 4), gpu=False, limit=110_000, target="sm_90"),
    "traced_branches": Golden(sizes=(4,), gpu=False, limit=80_000, target="sm_90"),
    "traced_switch": Golden(sizes=(4,), gpu=False, limit=80_000, target="sm_90"),
    "cpu_fixed": Golden(sizes=(4,), gpu=False, limit=300_000),
    "traced_fixed": Golden(sizes=(4,), gpu=False, limit=80_000, target="sm_90"),
    "traced_tables": Golden(sizes=(4, 6), gpu=False, limit=80_000, target="sm_90"),
}


def add(name: str, folder: Path) -> bool:
    """Builds a golden into `folder` and says so; False when it is too large.  Raises a CgbundleError when the build fails."""
    golden, out = GOLDENS[name], folder / f"{name}.cgb"
    if out.exists():
        print(f"{out}: there already, left alone")
        return True
    with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as scratch:
        bundle_path = Path(scratch, f"{name}.cgb")
        about = build(name, golden, bundle_path)
        size = bytes_below(bundle_path)
        print(f"{name}: {size:,} bytes ({golden.limit:,} allowed), {about}", flush=True)
        for path in sorted(bundle_path.rglob("*"), key=lambda path: -path.stat().st_size)[:6]:
            print(f"    {path.stat().st_size:>9,} {path.relative_to(bundle_path)}")
        for path in telling(bundle_path):
            print(f"    names this machine's folders: {path.relative_to(bundle_path)}")
        if size <= golden.limit:
            bundle_path.rename(out)
            return True
    return False


def build(name: str, golden: Golden, out: Path) -> str:
    """One build; what it is in a few words."""
    import torch

    import cgcompile
    from tests.golden import models

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network, inputs = getattr(models, name)()
    os.environ.update(golden.environment)
    built = cgcompile.build(
        network.eval(),
        inputs,
        sizes=list(golden.sizes),
        out=out,
        target=golden.target,
        lower=golden.level,
        donations=golden.donations,
    )
    return f"{built.manifest.target.arch}, self-test by {built.manifest.entries[0].self_test.compare}"


def telling(folder: Path) -> list[Path]:
    """Files that hold the place of the tree or of the home folder."""
    secrets = [os.path.realpath(HERE.parents[1]).encode(), os.path.realpath(Path.home()).encode() + b"/"]
    paths = []
    for path in sorted(folder.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        if any(secret in data for secret in secrets):
            paths.append(path)
    return paths


def bytes_below(folder: Path) -> int:
    """Of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> int:
    """0 when all goldens of this machine's kind are there."""
    import torch

    from cgbundle.errors import CgbundleError
    from cgbundle.format.schema import VERSION

    fitting = [name for name, golden in GOLDENS.items() if golden.gpu == torch.cuda.is_available()]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(GOLDENS)} (default: this machine's)")
    parser.add_argument("--out", type=Path, default=HERE / f"v{VERSION}", help="folder (default: %(default)s)")
    options = parser.parse_args()
    for name in options.names:
        if name not in fitting:
            parser.error(f"{name}: this machine can make {', '.join(fitting)}")
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        done = [add(name, options.out) for name in options.names or fitting]
    except CgbundleError as error:
        print(f"golden: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {bytes_below(options.out):,} bytes in all")
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
