"""Serves the bundle of minilm.py in a new process without torch, and compares it with eager PyTorch in another one: `make demo`.

    python examples/demo.py minilm.cgb

The serving process runs `serve()`, which is all the code that a server needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import minilm

SENTENCES = (
    "The cat sleeps on the windowsill.",
    "A kitten is napping in the sun.",
    "How do I reset my password?",
    "I cannot log in to my account.",
    "The central bank raised rates.",
    "Loans just became more expensive.",
)
SPAWNED = "CGCOMPILE_DEMO_SPAWNED"
"""Environment variable: the start time of the process, on the monotonic clock, which all processes share."""
TOLERANCE = 1e-5


def serve(bundle: str) -> dict[str, Any]:
    """Loads the bundle and computes embeddings.  No torch, no compiler, no warm-up."""
    import cgbundle

    try:
        program = cgbundle.load(bundle)
    except cgbundle.CgbundleError as error:
        raise SystemExit(f"demo: {error}") from None
    ids, mask = minilm.tokenize(SENTENCES)
    return {"embeddings": program(ids, mask), "tokens": ids.shape, "keys": [list(key) for key in program.int_keys]}


def eager(_bundle: str) -> dict[str, Any]:
    """Computes the embeddings with eager PyTorch."""
    import torch

    network = minilm.model()
    ids, mask = minilm.tokenize(SENTENCES)
    with torch.no_grad():
        return {"embeddings": network(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()}


WAYS = {"serve": serve, "eager": eager}


def child(name: str, bundle: str) -> None:
    """Runs `serve` or `eager` in this process and prints the result as JSON."""
    answer = WAYS[name](bundle)
    seconds = time.clock_gettime(time.CLOCK_MONOTONIC) - float(os.environ[SPAWNED])
    answer |= {"embeddings": answer["embeddings"].tolist(), "seconds": seconds, "torch": "torch" in sys.modules}
    print(json.dumps(answer))


def measure(name: str, bundle: str) -> dict[str, Any]:
    """Returns the result of `serve` or `eager` in a new process.  Raises SystemExit with the process's messages if it fails."""
    environment = os.environ | {SPAWNED: repr(time.clock_gettime(time.CLOCK_MONOTONIC))}
    command = [sys.executable, __file__, "--child", name, bundle]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise SystemExit(completed.stderr.strip())
    return json.loads(completed.stdout)


def similarity(embeddings: list[list[float]]) -> list[list[float]]:
    """Returns the cosine of every pair; the embeddings have length 1."""
    return [[sum(a * b for a, b in zip(x, y, strict=True)) for y in embeddings] for x in embeddings]


def report(served: dict[str, Any], reference: dict[str, Any]) -> float:
    """Prints the results in 80 columns; returns the largest difference of an embedding."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=80, highlight=False)
    rows, tokens = served["tokens"]
    keys = ", ".join("x".join(map(str, key)) for key in served["keys"])
    console.print(f"\n[bold]{rows} sentences, {tokens} tokens each, from a bundle of sizes {keys}[/bold]\n")

    similarities = similarity(served["embeddings"])
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("similarity (* most similar other)", no_wrap=True)
    for index in range(rows):
        table.add_column(f"{index + 1} ", justify="right", no_wrap=True)
    for index, sentence in enumerate(SENTENCES):
        best = max(similarities[index][:index] + similarities[index][index + 1 :])
        cells = [Text(f"{value:.2f}*", "bold green") if value == best else f"{value:.2f} " for value in similarities[index]]
        table.add_row(f"{index + 1} {sentence}", *cells)
    console.print(table)

    compared = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for title in ("", "bundle", "eager PyTorch"):
        compared.add_column(title, justify="left" if not title else "right")
    results = (served, reference)
    compared.add_row("torch imported", *("yes" if result["torch"] else "no" for result in results))
    compared.add_row("process start to embeddings", *(f"{result['seconds']:.2f} s" for result in results))
    expected = similarity(reference["embeddings"])
    for row in range(0, rows, 2):
        pair = f"similarity of {row + 1} and {row + 2}"
        compared.add_row(pair, f"{similarities[row][row + 1]:.6f}", f"{expected[row][row + 1]:.6f}")
    console.print(compared)

    pairs = zip(served["embeddings"], reference["embeddings"], strict=True)
    worst = max(abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True))
    ratio = reference["seconds"] / served["seconds"]
    console.print(f"{ratio:.1f} times faster to the first answer; largest difference of an embedding {worst:.1e}\n")
    return worst


def main(arguments: list[str]) -> int:
    """Returns 0 if the bundle agrees with eager PyTorch and the serving process did not import torch."""
    if len(arguments) == 3 and arguments[0] == "--child":
        child(*arguments[1:])
        return 0
    if len(arguments) != 1:
        print("usage: python examples/demo.py BUNDLE", file=sys.stderr)
        return 2
    served = measure("serve", arguments[0])
    reference = measure("eager", arguments[0])
    worst = report(served, reference)
    if worst > TOLERANCE or served["torch"]:
        print(f"demo: expected a difference of at most {TOLERANCE} and no torch in the serving process", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
