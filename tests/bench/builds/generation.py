"""Benchmarks greedy generation with a static KV cache: a bundle without torch, eager PyTorch and torch.compile.

    generation.py [BUNDLE]          builds the bundle of examples/decoder.py if none is given

Every variant runs in its own process and generates the same 200 tokens after a prompt of 64.  Calls that warm up a variant are not
timed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
TOKENS, PROMPT, BATCHES = 200, 64, (1, 8)
WAYS = ("eager", "compile")


def main(bundle: str | None) -> int:
    """Prints a line of JSON and a table. Returns 1 if a token differs."""
    with tempfile.TemporaryDirectory() as scratch:
        if bundle is None:
            import cgcompile

            bundle = str(Path(scratch, "decoder.cgb"))
            sizes = {"prefill": {"batch": BATCHES, "seq": (PROMPT,)}, "decode": {"batch": BATCHES}}
            cgcompile.build(str(EXAMPLES / "decoder.py"), sizes=sizes, out=bundle, target="cuda")
        measurements: dict[str, dict[int, Any]] = {"bundle": {}, **{variant: {} for variant in WAYS}}
        for batch in BATCHES:
            counts = ["--batch", str(batch), "--prompt", str(PROMPT), "--tokens", str(TOKENS)]
            measurements["bundle"][batch] = run([str(EXAMPLES / "generate.py"), bundle, *counts])
            for variant in WAYS:
                measurements[variant][batch] = run([__file__, "--one", variant, str(batch)])
    same = True
    for batch in BATCHES:
        rows = measurements["bundle"][batch]["rows"]
        for variant in ("bundle", *WAYS):
            measurement = measurements[variant][batch]
            equal = measurement.pop("rows") == rows
            same = same and equal
            measurement["tokens_per_second"] = batch * TOKENS / measurement["seconds"]
            print(
                f"batch {batch}, {variant}: {measurement['tokens_per_second']:.0f} tokens/s, {'same' if equal else 'OTHER'} tokens"
            )
    print(json.dumps(measurements))
    return 0 if same else 1


def run(arguments: list[str]) -> dict[str, Any]:
    """Runs a Python process and returns the last line of its stdout, parsed as JSON."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr.strip().splitlines()[-1:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def one(variant: str, batch: int) -> None:
    """Generates with torch and prints the result."""
    import torch

    sys.path.insert(0, str(EXAMPLES))
    import decoder

    network = decoder.model().to("cuda" if torch.cuda.is_available() else "cpu")
    device = network.length.device
    call = network if variant == "eager" else torch.compile(network, mode="reduce-overhead", dynamic=False)
    rows = [[(7 + 31 * row + 17 * place) % decoder.VOCABULARY for place in range(PROMPT)] for row in range(batch)]
    prompt = torch.tensor(rows, device=device)

    def generate() -> list[list[int]]:
        for buffer in network.buffers():
            buffer.zero_()
        tokens = []
        with torch.no_grad():
            ids = prompt
            for _ in range(TOKENS):
                ids = call(ids)[0].clone()  # the next replay of torch.compile's graph overwrites the tensor
                tokens.append(ids)
        return torch.cat(tokens, 1).tolist()

    for _ in range(3 if variant == "compile" else 1):
        generate()
    begun = time.perf_counter()
    sequences = generate()
    print(json.dumps({"rows": sequences, "seconds": time.perf_counter() - begun}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
