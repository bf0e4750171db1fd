"""Times the swap of a LoRA adapter: `adapter_swap.py [--layers N] [--width N] [--rank N]`.

Builds examples/lora.py (float16; by default adapters of 100 MB) for this machine's GPU. Swaps adapters by `program.load` from NumPy
arrays, pinned memory and GPU tensors, and by `program.update` of merged weights. The time of a swap includes the next call, until
its answer; such a call alone is timed too. The driver's copies are timed for comparison. Prints medians and ranges in milliseconds.
Exit status 1 if an answer is not that of the adapter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cgbundle
from cgbundle.gpu import streams
from tests.bench.common import children

ROUNDS = 12
TOLERANCE = 2e-2
"""float16 over 48 layers."""


def main() -> int:
    """Prints a line per kind of swap."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("layers", 48), ("width", 2048), ("rank", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    os.environ |= {"LORA_LAYERS": str(options.layers), "LORA_WIDTH": str(options.width), "LORA_RANK": str(options.rank)}
    os.environ |= {"LORA_SLOTS": "4", "LORA_DTYPE": "float16"}
    sys.path.insert(0, str(children.ROOT / "examples"))
    import lora

    import cgcompile

    torch.manual_seed(0)
    adapters = [lora.adapter() for _ in range(3)]
    size = sum(tensor.nbytes for tensor in adapters[0])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lora.cgb")
        begun = time.perf_counter()
        cgcompile.build(children.ROOT / "examples" / "lora.py", sizes=[1, 8], out=path)
        print(f"built in {time.perf_counter() - begun:.0f} s; an adapter has {size / 1e6:.1f} MB", flush=True)
        right = True
        for copies in ("threads", "driver"):
            if copies == "driver":
                streams.LARGE = 1 << 62
            with cgbundle.load(path) as program:
                print(f"large copies by {'the driver alone' if copies == 'driver' else copies}:", flush=True)
                right = measure(lora, program, adapters) and right
    return 0 if right else 1


def measure(lora: Any, program: Any, adapters: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Times every kind of swap. Returns whether the answers are right."""
    x = (torch.randn(1, lora.TOKENS, lora.WIDTH) / 16).to(lora.DTYPE).cuda()  # 48 layers multiply its size by a thousand
    slot = torch.tensor([2])
    network = lora.model().cuda()
    weights = {name: value.cpu() for name, value in network.state_dict().items()}
    expected = []
    with torch.no_grad():
        for down, up in adapters:
            network.load(slot, down.cuda(), up.cuda())
            expected.append(network(x, slot.cuda()))
    on_gpu = slot.cuda()
    pinned = [tuple(tensor.pin_memory() for tensor in row) for row in adapters]
    gpu_adapters = [tuple(tensor.cuda() for tensor in row) for row in adapters]
    merged = [lora.merged(weights, *row) for row in adapters]
    none = torch.zeros_like(on_gpu)
    variants: dict[str, tuple[Callable[[int], Any], torch.Tensor]] = {
        "load, NumPy": (lambda n: program.load(slot.numpy(), *[tensor.numpy() for tensor in adapters[n]]), on_gpu),
        "load, pinned": (lambda n: program.load(slot, *pinned[n]), on_gpu),
        "load, on the GPU": (lambda n: program.load(on_gpu, *gpu_adapters[n]), on_gpu),
        "update, merged": (lambda n: program.update(merged[n], partial=True), none),
    }
    call = times(lambda n: program(x, on_gpu))
    print(f"  a call alone: {shown(call)}", flush=True)
    right = True
    for name, (swap, rows) in variants.items():
        answers: list[torch.Tensor] = []

        def once(number: int, swap: Callable[[int], Any] = swap, rows: torch.Tensor = rows) -> None:
            swap(number)
            answers.append(program(x, rows))  # noqa: B023

        durations = times(once)
        worst = max(float((got - expected[n % 3]).abs().max() / expected[n % 3].abs().max()) for n, got in enumerate(answers))
        right = right and worst < TOLERANCE
        print(f"  {name}: {shown(durations)}; largest error {worst:.1e}", flush=True)
    return right


def times(run: Callable[[int], Any]) -> list[float]:
    """Returns the milliseconds of each round except the first."""
    milliseconds = []
    for number in range(ROUNDS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run(number % 3)
        torch.cuda.synchronize()
        milliseconds.append((time.perf_counter() - begun) * 1e3)
    return milliseconds[1:]


def shown(milliseconds: list[float]) -> str:
    """Returns a text such as `5.2 ms (5.0 - 6.1)`."""
    return f"{statistics.median(milliseconds):.2f} ms ({min(milliseconds):.2f} - {max(milliseconds):.2f})"


if __name__ == "__main__":
    sys.exit(main())
