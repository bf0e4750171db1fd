"""python -m tests.sequences: builds random modules, and calls every bundle and a new eager model with the same random sequences.

Prints wrong results and errors, then the numbers of right, refused and wrong modules. Exit status 1 if a bundle was wrong, an error
was not a refusal, or a module was refused that has only features in FAITHFUL (drawn.py).
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

import cgbundle
import cgcompile
from cgbundle.errors import CallError, CgbundleError
from cgcompile.model.load import load_source

from .drawn import Drawn, draw

CALLS = 12
TOLERANCE = 1e-4


def outcome(drawn: Drawn, folder: Path, target: str, seed: int) -> str:
    """Returns "right", "refused: ...", or a text about the error."""
    path = folder / f"model_{seed}.py"
    path.write_text(drawn.text)
    try:
        built = cgcompile.build(str(path), sizes=drawn.sizes, out=folder / f"model_{seed}.cgb", target=target)
    except CgbundleError as error:
        return f"refused: {error.code}: {error}"
    return compared(path, built.path, drawn, target, seed)


def compared(path: Path, bundle: Path, drawn: Drawn, target: str, seed: int) -> str:
    """Compares a random sequence of calls of a bundle with a new model, at declared sizes and others."""
    chance = random.Random(seed)
    weights = load_source(str(path)).model.state_dict()
    device = torch.device("cpu" if target == "cpu" else "cuda")
    with cgbundle.load(str(bundle)) as program, torch.no_grad(), device:
        model = load_source(str(path)).model
        model.load_state_dict(weights)
        for number in range(CALLS):
            key = tuple(
                [chance.randint(1, sizes[-1]) if chance.random() < 0.4 else chance.choice(sizes) for sizes in drawn.sizes.values()]
            )
            x = torch.randn(*key, 8, generator=torch.Generator().manual_seed(chance.randrange(1 << 30)), device="cpu").to(device)
            try:
                got = torch.as_tensor(program(x))
            except CallError:  # the size is not recorded and cannot be padded
                if key in program.int_keys:
                    raise
                continue
            wanted = model(x)
            error = float((wanted - got).abs().max() / wanted.abs().max().clamp(min=1e-6))
            if not error <= TOLERANCE:
                return f"wrong: call {number} at {key}: {error:.1e}"
    return "right"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="modules")
    parser.add_argument("--seed", type=int, default=0, help="the first module's seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--unfaithful", type=float, default=0.08, help="share of modules whose results no bundle can have")
    arguments = parser.parse_args()
    if arguments.jobs > 1:
        return _in_processes(arguments)
    counts: Counter[str] = Counter()
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seed, arguments.seed + arguments.count):
            drawn = draw(seed, arguments.unfaithful)
            said = outcome(drawn, Path(folder), arguments.target, seed)
            kind = said.partition(":")[0] + ("" if drawn.faithful else " (unfaithful)")
            counts[kind] += 1
            if kind not in ("right", "refused (unfaithful)"):
                bad += kind != "right (unfaithful)"
                print(f"{seed} {', '.join(drawn.features)}: {said}", flush=True)
    for kind, count in sorted(counts.items()):
        print(f"= {kind}: {count}", flush=True)
    return int(bad > 0)


def _in_processes(arguments: argparse.Namespace) -> int:
    share = -(-arguments.count // arguments.jobs)
    begins = range(arguments.seed, arguments.seed + arguments.count, share)
    options = ["-m", "tests.sequences", "--target", arguments.target, "--unfaithful", str(arguments.unfaithful)]
    running = [
        subprocess.Popen(
            [sys.executable, *options, "--seed", str(begin), "--count", str(min(share, arguments.seed + arguments.count - begin))],
            stdout=subprocess.PIPE,
            text=True,
        )
        for begin in begins
    ]
    counts: Counter[str] = Counter()
    failed = False
    for process in running:
        said, _ = process.communicate()
        failed |= process.returncode != 0
        for line in said.splitlines():
            if line.startswith("= "):
                kind, _, count = line.removeprefix("= ").rpartition(": ")
                counts[kind] += int(count)
            else:
                print(line)
    for kind, count in sorted(counts.items()):
        print(f"{kind}: {count}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
