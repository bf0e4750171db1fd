"""`python -m tests.soak.rebuilds --rebuilds 1000 --readers 4`: replaces a bundle repeatedly while processes load and call it. No
load may fail, and every answer must come from the loaded bundle. Exit status 1 otherwise.

A thousand builds would take hours. So a few models with different widths and answers are built once. Then they replace one another
at one path with `staged(..., replace=True)`, as in `cgcompile build --force`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import cgbundle
import cgcompile
from cgcompile.bundle.publish import staged
from tests.soak.reader import answer

MODEL = """
import torch
from torch import nn


def model() -> nn.Module:
    torch.manual_seed({number})
    return nn.Sequential(nn.Linear(6, {hidden}), nn.Tanh(), nn.Linear({hidden}, {outputs})).eval()


def inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 6),)
"""

SHOWN = 10
"""Number of failure reasons that are printed."""


def build(folder: Path, count: int) -> list[Path]:
    """Builds models of different widths as `variant0.cgb` and so on; existing bundles are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(count):
        source = folder / f"variant{number}.py"
        paths.append(source.with_suffix(".cgb"))
        if not paths[-1].exists():
            print(f"building {paths[-1].name}", flush=True)
            source.write_text(MODEL.format(number=number, hidden=16 << number, outputs=3 + 5 * number))
            cgcompile.build(str(source), sizes=[2], out=paths[-1], target="cpu")
    return paths


def answers(variants: list[Path]) -> dict[str, str]:
    """Returns the answer of each bundle by name, while no bundle is replaced."""
    by_name = {}
    for path in variants:
        with cgbundle.load(path, check="full") as program:
            by_name[program.manifest.name] = answer(program)
    assert len(set(by_name.values())) == len(variants), "the models must differ"
    return by_name


def publish(variant: Path, destination: Path) -> None:
    """Publishes a bundle as `--force` does."""
    with staged(destination, replace=True) as stage:
        shutil.copytree(variant, stage, dirs_exist_ok=True)


def start(path: Path, expected: dict[str, str]) -> subprocess.Popen[str]:
    """Starts a reader, and waits until it has loaded the bundle once."""
    command = [sys.executable, "-m", "tests.soak.reader", str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    tell(process, json.dumps(expected))
    assert process.stdout.readline() == "ready\n", "a reader did not start"
    return process


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def soak(variants: list[Path], folder: Path, rebuilds: int, readers: int) -> bool:
    """Replaces a bundle in `folder` while several readers use it, and prints the counts. Returns whether nothing was wrong."""
    path, expected = folder / "model.cgb", answers(variants)
    publish(variants[0], path)
    processes = [start(path, expected) for _ in range(readers)]
    for process in processes:
        tell(process, "go")
    began = last_print = time.monotonic()
    for number in range(1, rebuilds + 1):
        publish(variants[number % len(variants)], path)
        if time.monotonic() - last_print > 5:
            last_print = time.monotonic()
            print(f"{number} rebuilds, {number / (last_print - began):.1f} per second", flush=True)
    seconds = time.monotonic() - began
    counts, seen, failures, died = Counter[str](), Counter[str](), Counter[str](), 0
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    for process in processes:
        assert process.stdout is not None
        output = process.stdout.read()
        process.wait()
        if process.returncode:
            died += 1
            continue
        row = json.loads(output)
        counts.update(row["counts"])
        seen.update(row["seen"])
        failures.update(row["failures"])
    leftovers = sorted(child.name for child in folder.iterdir() if child != path)
    print(f"{rebuilds} rebuilds in {seconds:.1f} s, {rebuilds / seconds:.1f} per second, beside {readers} readers")
    print(f"{counts['loads']} loads, {counts['loads'] / seconds:.1f} per second")
    print(f"{counts['calls']} calls, {counts['calls'] / seconds:.1f} per second")
    print(f"{counts['failed']} failed loads and calls, {counts['mixed']} mixed answers")
    print(f"loads by bundle: {dict(sorted(seen.items()))}; readers that died: {died}; leftovers: {leftovers or 'none'}")
    for reason, times in failures.most_common(SHOWN):
        print(f"{times:6d} x {reason}")
    return not (counts["failed"] or counts["mixed"] or died or leftovers) and len(seen) == len(variants)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.rebuilds", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rebuilds", type=int, default=1000)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--variants", type=int, default=3, help="models that are built, 2 at least")
    parser.add_argument("--built", type=Path, help="a folder that keeps the built models for another run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        variants = build(options.built or Path(scratch, "variants"), options.variants)
        folder = Path(scratch, "published")
        folder.mkdir()
        return 0 if soak(variants, folder, options.rebuilds, options.readers) else 1


if __name__ == "__main__":
    sys.exit(main())
