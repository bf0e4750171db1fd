"""`python -m tests.bench.gpu_kernels.all_reduce`: compares all_reduce between two GPUs by cgcompile's kernels and by NCCL, in
graphs.

bf16, 8 KB to 64 MB; microseconds per all_reduce, 100 in a graph, best of 8 replays. Then a million all_reduces (`--count N` changes
this number) of random sizes, with every element checked. For NCCL the program starts itself with `--only nccl` under
torch.distributed.run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from random import Random

import torch

SIZES = [1 << power for power in range(13, 27)]
TIMES, REPLAYS = 100, 8

RANDOM, LARGEST, ROOM = 400, 2 << 20, 32 << 20
"""For graphs of random sizes: the largest number of all_reduces, the largest size in bytes, and the bytes of all together."""


def nccl() -> None:
    """Prints `bytes microseconds` for every size."""
    from torch import distributed

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl")
    begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for size in SIZES:
        values = torch.zeros(size // 2, device="cuda", dtype=torch.bfloat16)
        distributed.all_reduce(values)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(TIMES):
                distributed.all_reduce(values)
        best = float("inf")
        for _ in range(REPLAYS):
            distributed.barrier()
            torch.cuda.synchronize()
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            best = min(best, begin.elapsed_time(end) * 1000 / TIMES)
        if rank == 0:
            print(size, best, flush=True)
    os._exit(0)  # NCCL's threads do not end while graphs with NCCL exist


def measured_nccl() -> dict[int, float]:
    """Returns microseconds by bytes; empty if NCCL did not run."""
    port = str(29000 + os.getpid() % 1000)  # other runs may use the machine
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    command = [*start, "-m", "tests.bench.gpu_kernels.all_reduce", "--only", "nccl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    rows = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]
    if not rows:
        print(done.stderr[-2000:])
    return {int(size): float(best) for size, best in rows}


def ours(nccl_times: dict[int, float]) -> None:
    """Measures cgcompile's kernels and prints the table; `nccl_times` are NCCL's microseconds by bytes."""
    from cgcompile.targets.collectives.exchange_memory import ExchangeMemory
    from cgcompile.targets.collectives.launches import collective_launch
    from tests.gpu.helpers.ranks import Collective, Ranks

    ranks = Ranks(ExchangeMemory(world=2, packets=4 << 20, buffers=SIZES[-1]))
    drawn = [torch.randn(SIZES[-1] // 2, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(2)]
    right = (drawn[0].float() + drawn[1].float()).bfloat16()
    inputs = [values.to(f"cuda:{rank}") for rank, values in enumerate(drawn)]
    outputs = [torch.empty_like(values) for values in inputs]
    for size in SIZES:
        launch = collective_launch(size)
        collective = Collective(launch, "bfloat16", [one.data_ptr() for one in inputs], [one.data_ptr() for one in outputs])
        for output in outputs:
            output.fill_(float("nan"))
        graphs = ranks.graph([collective] * TIMES)
        best = min(ranks.replay(graphs) for _ in range(REPLAYS)) * 1000 / TIMES
        equal = all(torch.equal(output[: size // 2].cpu(), right[: size // 2]) for output in outputs)
        other = nccl_times.get(size, float("nan"))
        how = f"{launch.way} {launch.blocks} x {launch.threads}, {'right' if equal else 'WRONG'}"
        print(f"{size >> 10:6} KB  ours {best:7.2f} us  NCCL {other:7.2f}  {other / best:5.2f} times  {how}", flush=True)


def many(count: int) -> None:
    """Runs all_reduces of random sizes. Every replay has new numbers, and is one of six graphs."""
    from cgcompile.targets.collectives.exchange_memory import ExchangeMemory
    from cgcompile.targets.collectives.launches import collective_launch
    from tests.gpu.helpers.ranks import Collective, Ranks

    random = Random(1)
    ranks = Ranks(ExchangeMemory(world=2, packets=1 << 20, buffers=LARGEST))
    inputs = [torch.empty(ROOM // 2, dtype=torch.bfloat16, device=f"cuda:{rank}") for rank in range(2)]
    outputs = [torch.empty_like(values) for values in inputs]
    graphs, spans = [], []
    for _ in range(6):
        listed: list[Collective] = []
        at = 0
        while at <= ROOM - LARGEST and len(listed) < RANDOM:
            size = 16 * random.randrange(1, random.choice((1 << 10, 16 << 10, 128 << 10, 128 << 10, LARGEST)) // 16)
            read, written = [[values.data_ptr() + at for values in tensors] for tensors in (inputs, outputs)]
            listed.append(Collective(collective_launch(size), "bfloat16", read, written))
            at += size
        graphs.append(ranks.graph(listed))
        spans.append((len(listed), at // 2))
    done, wrong, begin = 0, 0, time.perf_counter()
    while done < count:
        number = random.randrange(len(graphs))
        (length, end), seed, right = spans[number], random.getrandbits(40), []
        for rank in range(2):  # each GPU draws the numbers of both: equal seeds give equal numbers
            torch.cuda.set_device(rank)
            generator = torch.Generator(f"cuda:{rank}")
            both = [torch.empty(end, dtype=torch.bfloat16, device=f"cuda:{rank}") for _ in range(2)]
            for other, values in enumerate(both):
                values.normal_(generator=generator.manual_seed(seed + other))
            inputs[rank][:end].copy_(both[rank])
            outputs[rank].fill_(float("nan"))
            right.append((both[0].float() + both[1].float()).bfloat16())
            torch.cuda.synchronize(rank)
        ranks.replay(graphs[number])
        for rank in range(2):
            torch.cuda.set_device(rank)
            wrong += not torch.equal(outputs[rank][:end], right[rank])
        done += length
    took = time.perf_counter() - begin
    print(f"{done} all_reduces in random sizes, {wrong} graphs wrong, {took:.1f} s, status {ranks.status()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("nccl",))
    parser.add_argument("--count", type=int, default=1_000_000)
    options = parser.parse_args()
    if options.only:
        nccl()
    else:
        ours(measured_nccl())
        many(options.count)


if __name__ == "__main__":
    main()
