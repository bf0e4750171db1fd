"""Builds PyTorch's samples of its operators for the CPU, and compares them with eager PyTorch (needs the package expecttest).

    python -m tests.operators --jobs 2 --results operators.jsonl
    python -m tests.operators --only 'fft|linalg' --dtype bfloat16

A module has several operators; if it is not right, its operators are tried again one by one. When a module ends, its row is written
to the results file; samples that have a row are skipped.  Exit status 1 if a result was wrong, or an unexpected error was raised.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.corpus.results import CRASHED, FAILED, REFUSED, RIGHT, TIMEOUT, WRONG

from .samples import Sample, group, parsed, samples

EAGER = "eager PyTorch fails"
SECONDS = 60.0
"""Time limit in seconds of a module, and of each of its operators when it is tried again."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.operators", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="of the names of the operators")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--together", type=int, default=8, help="operators of a module")
    parser.add_argument("--results", type=Path, default=Path("operators.jsonl"), metavar="FILE", help="a row a line, added to")
    parser.add_argument("--judge", nargs="+", metavar="SAMPLE", help="one module, in this process: its row as JSON, last line")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    dtype: torch.dtype = getattr(torch, options.dtype)
    if options.judge:
        print("\n" + json.dumps(judged([parsed(text) for text in options.judge], dtype)), flush=True)
        return 0
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    done = {text for line in lines for text in json.loads(line)["samples"]}
    left = [sample for sample in samples(dtype) if str(sample) not in done and re.search(options.only, sample.name)]
    count = -(-len(left) // options.together)
    with ThreadPoolExecutor(options.jobs) as pool, open(options.results, "a") as file:

        def run(chosen: Sequence[Sample]) -> None:
            row = _process(chosen, options.dtype)
            if row["verdict"] != RIGHT and len(chosen) > 1:
                run(chosen[: len(chosen) // 2])
                run(chosen[len(chosen) // 2 :])
                return
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{row['verdict']:20}  {' '.join(row['names'])}  {row['message'][:200]}", flush=True)

        for future in [pool.submit(run, left[number::count]) for number in range(count)]:
            future.result()
    rows = [json.loads(line) for line in options.results.read_text().splitlines()]
    counts = Counter([row["verdict"] for row in rows for _ in row["names"]])
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    return 1 if counts.keys() & {WRONG, CRASHED, TIMEOUT, FAILED} else 0


def _process(chosen: Sequence[Sample], dtype: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.operators", "--dtype", dtype, "--judge", *map(str, chosen)]
    known = {"samples": [str(sample) for sample in chosen], "names": [sample.name for sample in chosen]}
    begun = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS * (1 + len(chosen)), check=False)
    except subprocess.TimeoutExpired:
        return {**known, "verdict": TIMEOUT, "message": ""}
    last = done.stdout.strip().rpartition("\n")[2]
    row = json.loads(last) if last.startswith("{") else {"verdict": CRASHED, "message": done.stderr[-300:]}
    return {**known, **row, "seconds": round(time.perf_counter() - begun, 1)}


def judged(chosen: Sequence[Sample], dtype: torch.dtype) -> dict[str, str]:
    """Returns the outcome of a module of some samples. Raises unexpected errors."""
    import cgbundle
    import cgcompile
    from cgbundle.errors import CgbundleError
    from cgcompile.util.tolerance import compare, tolerance

    module, tensors = group(chosen, dtype)

    def inputs() -> tuple[torch.Tensor, ...]:
        return tuple([tensor.clone() for tensor in tensors])

    try:
        with torch.no_grad():
            wanted = module(*inputs())
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return {"verdict": EAGER, "message": str(error)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = cgcompile.build(module, inputs, out=Path(folder) / "group.cgb", target="cpu").path
            with cgbundle.load(path) as program:
                outputs = program(*inputs())
        except CgbundleError as error:
            return {"verdict": REFUSED if error.exit_code == 1 else FAILED, "message": f"{error.code}: {error}"}
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    for number, (want, have) in enumerate(zip(wanted, results, strict=True)):
        difference = compare(want, have)
        if difference.error > tolerance(want.dtype):
            return {"verdict": WRONG, "message": f"result {number}: {difference.text}"}
    return {"verdict": RIGHT, "message": ""}


if __name__ == "__main__":
    sys.exit(main())
