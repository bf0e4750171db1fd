"""Child: `make_inputs.py MODEL FOLDER SIZE...` writes the example's seeded inputs and prints `file:dtype:shape` of each."""

from __future__ import annotations

import json
import sys

import torch

from tests.bench.cpu.serve_torch import example


def main(model: str, folder: str, *sizes: str) -> None:
    """Writes one raw file per input."""
    torch.manual_seed(1)
    texts = []
    for index, value in enumerate(example(model).inputs(*map(int, sizes))):
        array = value.numpy()
        path = f"{folder}/input{index}.bin"
        array.tofile(path)
        texts.append(f"{path}:{array.dtype}:{'x'.join(map(str, array.shape))}")
    print(json.dumps(texts))


if __name__ == "__main__":
    main(*sys.argv[1:])
