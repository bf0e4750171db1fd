"""`python -m tests.bench.world.measure FOLDER [--shapes 1b,8b] [--only build,measure]`: measures a decoder over two GPUs.

Builds the bundles of a shape without a GPU into FOLDER, for two GPUs and for one. Then measures them, and eager PyTorch captured by
hand on one GPU and, with NCCL, on two. Measured are: process start to the first output of both sizes; microseconds per token at
batch 1 and 8; the difference of all scores from those on one GPU; and whether both ranks have the same bits. Prints each line at
once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SERVE = HERE / "serve.py"

SHAPES = {
    "tiny": "2,256,512,8,4,1024",
    "1b": "16,2048,8192,32,8,128256",
    "8b": "32,4096,14336,32,8,128256",
    "8b/2": "16,4096,14336,32,8,128256",
    "8b/4": "8,4096,14336,32,8,128256",
    "mid": "8,1024,4096,16,4,32000",
}
"""Arguments of examples/tensor_parallel.py. 8b/2 and 8b/4 have layers of the same size, but fewer of them."""

REPEAT = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", default="1b")
    parser.add_argument("--only", choices=("build", "measure"))
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--bundles", default="two,one,layers")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for shape in options.shapes.split(","):
        if options.only != "measure":
            build(options.folder, shape, options.target, options.bundles.split(","))
        if options.only != "build":
            measure(options.folder, shape)


BUILDS = (
    ("two", "bundle, two GPUs", "0,1", "shares.py", ("--world", "2")),
    ("one", "bundle, one GPU", "0", "whole.py", ()),
    ("layers", "bundle, layers on two GPUs", "0,1", "whole.py", ("--world", "2", "--split", "layers")),
)
"""The bundles of a shape: name, title, devices, model, options."""


def path_of(folder: Path, shape: str, name: str) -> Path:
    return folder / f"{shape.replace('/', '_')}.{name}.cgb"


def environment(shape: str, **more: str) -> dict[str, str]:
    """Returns the environment of a process that uses the shape."""
    return os.environ | {"SHAPE": SHAPES[shape], "PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}:{ROOT / 'bundles'}", **more}


def build(folder: Path, shape: str, target: str, names: Sequence[str]) -> None:
    """Builds the bundles in parallel, without proofs: their scores are compared on GPUs later."""
    began = time.perf_counter()
    with ExitStack() as stack:
        started = []
        for name, _, _, model, more in BUILDS:
            if name not in names:
                continue
            path = path_of(folder, shape, name)
            command = [
                sys.executable, "-m", "cgcompile_cli", "build", str(HERE / model), "--sizes", "1,8", "--target", target,
                "--record", "cross-compile", "--prove", "none", "--force", "-v", "-o", str(path), *more,
            ]  # fmt: skip
            log = stack.enter_context(open(path.with_suffix(".log"), "w"))
            process = subprocess.Popen(command, env=environment(shape, CUDA_VISIBLE_DEVICES=""), stdout=log, stderr=log)
            started.append((path, process))
        for path, process in started:
            print(f"{shape}: {path.name} built: {process.wait() == 0}, {time.perf_counter() - began:.1f} s", flush=True)


def measure(folder: Path, shape: str) -> None:
    two, one = [path_of(folder, shape, name) for name in ("two", "one")]
    score_files = {}
    for short, name, devices, *_ in BUILDS:
        path = path_of(folder, shape, short)
        if not (path / "manifest.json").exists():
            print(f"{shape}: {name}: not built", flush=True)
            continue
        cold = [start(shape, "bundle", path, devices) for _ in range(REPEAT + 1)][1:]
        show("cold", shape, name, [row["seconds"] for row in cold if "seconds" in row] or cold[0])
        score_files[name] = folder / f"{path.name}.scores"
        show("us", shape, name, start(shape, "calls", path, devices, score_files[name]))
    if (two / "manifest.json").exists():
        meeting = folder / f"meeting{os.getpid()}"
        rows = together(shape, [("rank", two, rank, meeting) for rank in range(2)])
        same = [row.get("hashes") for row in rows]
        print(f"{shape}: both ranks the same bits: {same[0] == same[1] and same[0] is not None} {hint(rows)}", flush=True)
    for name, world, path in (("torch, NCCL, two GPUs", 2, two), ("torch, one GPU", 1, one)):
        if (path / "manifest.json").exists():
            score_files[name], port = folder / f"{path.name}.torch", 29000 + os.getpid() % 1000
            rows = together(shape, [("torch", path, rank, world, port, score_files[name]) for rank in range(world)])
            show("cold", shape, name, [max(row["seconds"] for row in rows)] if all("us" in row for row in rows) else rows[0])
            show("us", shape, name, rows[0])
    compare(shape, {name: path for name, path in score_files.items() if path.exists()})


def start(shape: str, *arguments: object) -> dict[str, Any]:
    return together(shape, [arguments])[0]


def together(shape: str, commands: list[tuple[object, ...]]) -> list[dict[str, Any]]:
    """Returns the rows of processes that run in parallel; `seconds` is the time from their start to their `clock`."""
    began = time.clock_gettime(time.CLOCK_MONOTONIC)
    running = [
        subprocess.Popen(
            [sys.executable, str(SERVE), *map(str, arguments)],
            env=environment(shape, OMP_NUM_THREADS="2"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for arguments in commands
    ]
    rows = []
    for process in running:
        try:
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            for other in running:
                other.kill()
            out, err = process.communicate()
        lines = [line for line in out.splitlines() if line.startswith("{")]
        row: dict[str, Any] = json.loads(lines[-1]) if lines else {"error": err.strip()[-200:]}
        rows.append(row | ({"seconds": row["clock"] - began} if "clock" in row else {}))
    return rows


def show(kind: str, shape: str, name: str, measured: Any) -> None:
    if kind == "cold" and isinstance(measured, list):
        text = f"process start to first outputs {statistics.median(measured):.2f} s (best {min(measured):.2f})"
    elif kind == "us" and "us" in measured:
        text = "us a token: " + ", ".join(f"batch {batch} {us:.0f}" for batch, us in measured["us"].items())
    else:
        text = f"{kind} FAILED: {measured.get('error', measured)!r}"
    print(f"{shape}: {name}: {text}", flush=True)


def hint(rows: list[dict[str, Any]]) -> str:
    return " ".join([repr(row["error"]) for row in rows if "error" in row])


def compare(shape: str, score_files: dict[str, Path]) -> None:
    """Compares every variant's scores with those of eager PyTorch on one GPU, or of the first variant."""
    import torch

    scores = {name: torch.load(path) for name, path in score_files.items()}
    if not scores:
        return
    like = "torch, one GPU" if "torch, one GPU" in scores else next(iter(scores))
    want = scores[like]
    for name, score in scores.items():
        if name != like:
            error = float(((score - want).norm(dim=-1) / want.norm(dim=-1)).max())
            share = float((score.argmax(-1) == want.argmax(-1)).float().mean())
            print(f"{shape}: {name} beside {like}: largest relative error {error:.1e}, the same token in {share:.1%}", flush=True)


if __name__ == "__main__":
    main()
