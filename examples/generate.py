"""Generates token ids with the bundle of decoder.py: no torch, no NumPy.

    python examples/generate.py decoder.cgb --batch 8 --tokens 200

Prints the tokens of every row as JSON, and the time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from array import array

import cgbundle
from cgbundle.tensors.tensor import from_bytes

VOCABULARY = 50257


def generate(program: cgbundle.Program, prompt: list[list[int]], tokens: int) -> list[list[int]]:
    """Returns the next `tokens` tokens of every row of the prompt, greedily.  The prompt's shape must be recorded."""
    flat = array("q", [token for row in prompt for token in row])
    ids, _ = program.prefill(from_bytes(flat.tobytes(), "int64", (len(prompt), len(prompt[0]))))
    columns = [ids]
    while len(columns) < tokens:
        ids, _ = program.decode(ids)
        columns.append(ids)
    return [list(row) for row in zip(*[[row[0] for row in column.tolist()] for column in columns], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    begin = time.perf_counter()
    try:
        with cgbundle.load(args.bundle) as program:
            loaded = time.perf_counter()
            prompt = [[(7 + 31 * row + 17 * place) % VOCABULARY for place in range(args.prompt)] for row in range(args.batch)]
            generate(program, prompt, 2)  # warm up memory and code
            start = time.perf_counter()
            rows = generate(program, prompt, args.tokens)
            seconds = time.perf_counter() - start
    except cgbundle.CgbundleError as error:
        raise SystemExit(f"generate: {error}") from None
    print(json.dumps({"rows": rows, "seconds": seconds, "load": loaded - begin, "torch": "torch" in sys.modules}))
    print(f"{args.batch * args.tokens / seconds:.0f} tokens/s; loaded in {loaded - begin:.2f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
