"""`python -m tests.bench.gpu.replicas`: measures calls per second of a bundle on one GPU, and of replicas on all GPUs.

First two threads per device call with CPU inputs, so that a call always waits when a replica has finished one. Then one thread per
device calls with GPU inputs. `--seconds N` sets the length of each measurement.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import cgbundle
import cgcompile

WIDTH, LAYERS, BATCH = 4096, 16, 2048


class Layers(nn.Module):
    """Matrix products that take two milliseconds on an H100, with small inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, WIDTH)
        self.layers = nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(batch,) numbers -> (batch,) float16."""
        return self.layers(self.embedding(ids)).mean(-1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Layers().half().eval()


def inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 1000, (batch,)),)


def rate(call: Callable[[int], object], threads: int, seconds: float) -> float:
    """Returns calls per second of `threads` concurrent threads; `call` receives the number of its thread."""
    counts, until = [0] * threads, time.perf_counter() + seconds

    def serve(number: int) -> None:
        while time.perf_counter() < until:
            call(number)
            counts[number] += 1

    workers = [threading.Thread(target=serve, args=(number,)) for number in range(threads)]
    begin = time.perf_counter()
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    return sum(counts) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    seconds = parser.parse_args().seconds
    devices = list(range(torch.cuda.device_count()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "layers.cgb")
        cgcompile.build(model(), inputs, sizes=[BATCH], out=path, target="cuda", lower="eager", record="capture")
        (ids,) = inputs(BATCH)
        copies = [ids.to(f"cuda:{device}") for device in devices]
        streams = [torch.cuda.Stream(device) for device in devices]
        first: dict[str, float] = {}
        for number in (1, len(devices)):
            begin = time.perf_counter()
            with cgbundle.load(path, devices=devices[:number], replicas=True) as replicas:
                loaded = time.perf_counter() - begin
                replicas.warmup()

                def on_gpu(thread: int, replicas: cgbundle.Replicas = replicas) -> None:
                    with torch.cuda.stream(streams[thread]):
                        replicas(copies[thread])
                    streams[thread].synchronize()

                def on_cpu(_: int, replicas: cgbundle.Replicas = replicas) -> None:
                    replicas(ids)

                rates = {
                    "inputs of the CPU": rate(on_cpu, 2 * number, seconds),
                    "inputs of a GPU": rate(on_gpu, number, seconds),
                }
            for name, speed in rates.items():
                times = speed / first.setdefault(name, speed)
                print(f"{number} GPU, {name}: {speed:.1f} calls/s, {times:.2f} times one; loaded in {loaded:.2f} s", flush=True)


if __name__ == "__main__":
    main()
