"""Child: `serve_eager.py LARGEST LENGTH,... DEVICE CALLS HOW` is examples/serve.py with PyTorch behind it instead of a bundle.
HOW is `eager` or `compile`, by torch.compile for any size.

The same HTTP, the same batching by the same lengths.  Eager PyTorch needs no recorded sizes: a batch is as large as it is, and
padded to its longest row only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import minilm
import serve
import torch
from server.batching import Batcher
from server.spans import Spans


def main(largest: str, lengths: str, device: str, calls: str, how: str) -> None:
    """Serves at a free port, which the first line on stderr names."""
    network = minilm.model().to(device)
    run = torch.compile(network, dynamic=True) if how == "compile" else network
    spans = Spans()

    def call(rows: Sequence[Sequence[int]], _: int) -> Sequence[Any]:
        longest = max(map(len, rows))
        with spans.span("tensors", len(rows)):
            ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
            mask = torch.tensor([[*[1] * len(row), *[0] * (longest - len(row))] for row in rows])
        with spans.span("replay", len(rows)), torch.inference_mode():
            made = run(ids.to(device), mask.to(device)).cpu()
        with spans.span("rows", len(rows)):
            return made.tolist()

    for rows in (2, 1):  # a compiler has a case for one row, and may take longer than a request has
        call([[1, 2, 3]] * rows, 3)
    batcher = Batcher(call, [int(length) for length in lengths.split(",")], int(largest), calls=int(calls), spans=spans)
    serve.serve(serve.make_app(batcher, serve.tokenizer(None), {"model": how}), "127.0.0.1", 0, how)


if __name__ == "__main__":
    main(*sys.argv[1:])
