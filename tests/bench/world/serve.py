"""Runs one of four measurements of the decoder, in its own process, for measure.py. Prints a row of JSON.

    python tests/bench/world/serve.py bundle BUNDLE DEVICES        process start to first output, without torch
    python tests/bench/world/serve.py calls BUNDLE DEVICES OUT     microseconds a token, and the scores of STEPS steps
    python tests/bench/world/serve.py rank BUNDLE RANK MEETING     the hashes of a rank's scores, in a process for each rank
    python tests/bench/world/serve.py torch BUNDLE RANK WORLD PORT OUT    eager PyTorch captured by hand, with NCCL over two

SHAPE has the form that shares.py takes.  Times are of batch 1 and 8; scores are of batch 8.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCHES, STEPS, CALLS, WARM = (1, 8), 24, 200, 20


def say(row: dict[str, Any]) -> None:
    """Prints the row and ends the process: NCCL's threads do not end while graphs with NCCL exist."""
    print(json.dumps(row), flush=True)
    os._exit(0)


def tokens(step: int, batch: int) -> array[int]:
    """Returns the token ids of a step, the same in every measurement."""
    return array("q", [(7919 * step + 104729 * row) % 1000 for row in range(batch)])


def bundle(path: str, devices: str) -> None:
    """Measures the first calls, one for each size, with CPU inputs."""
    import cgbundle
    from cgbundle.tensors.tensor import from_bytes

    with opened(cgbundle, path, devices) as program:
        for batch in BATCHES:
            program(from_bytes(tokens(0, batch), "int64", (batch,)), from_bytes(array("q", bytes(8 * batch)), "int64", (batch,)))
        clock = time.clock_gettime(time.CLOCK_MONOTONIC)
    say({"clock": clock, "torch": "torch" in sys.modules})


def opened(cgbundle: Any, path: str, devices: str) -> Any:
    """Loads a program on one GPU or over several."""
    ordinals = [int(device) for device in devices.split(",")]
    where = {"devices": ordinals} if len(ordinals) > 1 else {"device": ordinals[0]}
    return cgbundle.load(path, outputs="view", **where)


def calls(path: str, devices: str, out: str) -> None:
    """Measures calls with inputs on the first GPU, without a wait between calls."""
    import torch

    import cgbundle

    with opened(cgbundle, path, devices) as program:
        torch.save(scores(lambda *inputs: program(*inputs).tensor), out)
        say({"us": {batch: per_call(program, batch) for batch in BATCHES}})


def scores(step: Callable[..., Any]) -> Any:
    """Returns float32 scores (STEPS, 8, vocabulary) on the CPU: one token per row and step, with a growing cache."""
    import torch

    logits = []
    for number in range(STEPS):
        inputs = torch.tensor(tokens(number, 8)), torch.full((8,), number)
        logits.append(step(*[tensor.cuda() for tensor in inputs]).float().cpu())
    return torch.stack(logits)


def per_call(step: Callable[..., Any], batch: int) -> float:
    """Returns microseconds per call: the least of five averages over CALLS calls."""
    import torch

    inputs = torch.tensor(tokens(0, batch)).cuda(), torch.full((batch,), STEPS).cuda()
    for _ in range(WARM):
        step(*inputs)
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(CALLS):
            step(*inputs)
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / CALLS)
    return best * 1e6


def rank(path: str, number: str, meeting: str) -> None:
    """Runs one rank without torch, on the GPU with the rank's number."""
    import cgbundle
    from cgbundle.tensors.tensor import from_bytes

    hashes = []
    with cgbundle.load(path, rank=int(number), rendezvous=meeting, device=int(number)) as program:
        for step in range(STEPS):
            inputs = tokens(step, 8), array("q", [step] * 8)
            output = program(*[from_bytes(values, "int64", (8,)) for values in inputs])
            hashes.append(hashlib.sha256(output.tobytes()).hexdigest())
    say({"hashes": hashes})


def by_hand(path: str, number: str, world: str, port: str, out: str) -> None:
    """Runs the model by hand, with the bundle's weights and in-place NCCL collectives."""
    import torch
    from safetensors.torch import load_file
    from torch import distributed, nn

    own_rank, ranks = int(number), int(world)
    torch.cuda.set_device(own_rank)
    torch.set_grad_enabled(False)
    if ranks > 1:
        distributed.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=own_rank, world_size=ranks)
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
    import tensor_parallel

    def empty(_: str, rows: int, columns: int, rank: int, world: int, split: int) -> nn.Parameter:
        shape = [rows, columns]
        if split >= 0:
            shape[split] //= world
        return nn.Parameter(torch.empty(shape, dtype=tensor_parallel.DTYPE), requires_grad=False)

    def summed(partial: torch.Tensor, world: int) -> torch.Tensor:
        if world > 1:
            distributed.all_reduce(partial)
        return partial

    class Gathers:
        @staticmethod
        def all_gather_tensor(shard: torch.Tensor, axis: int, _: object) -> torch.Tensor:
            gathered = shard.new_empty(ranks * shard.shape[0], *shard.shape[1:])
            distributed.all_gather_into_tensor(gathered, shard.contiguous())
            return torch.cat(gathered.chunk(ranks), axis)

    tensor_parallel.weight, tensor_parallel.summed, tensor_parallel.collectives = empty, summed, Gathers
    with torch.device("cuda"):
        model = tensor_parallel.model(own_rank, ranks)
    file = Path(path, "ranks", number, "weights.safetensors") if own_rank else Path(path, "weights.safetensors")
    left = model.load_state_dict(load_file(file, device=f"cuda:{own_rank}"), strict=False)
    assert not left.unexpected_keys, left
    steps = {batch: captured(model, batch) for batch in BATCHES}
    for batch in BATCHES:
        steps[batch](torch.tensor(tokens(0, batch)), torch.zeros(batch, dtype=torch.int64)).cpu()
    clock = time.clock_gettime(time.CLOCK_MONOTONIC)
    for name, buffer in model.named_buffers():
        if name.endswith(("keys", "values")):
            buffer.zero_()
    logits = scores(steps[8])
    if not own_rank:
        torch.save(logits, out)
    hashes = [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in logits]
    say({"clock": clock, "us": {batch: per_call(steps[batch], batch) for batch in BATCHES}, "hashes": hashes})


def captured(model: Any, batch: int) -> Callable[..., Any]:
    """Captures the model in a CUDA graph, after a warm-up on another stream."""
    import torch

    static_inputs = [torch.zeros(batch, dtype=torch.int64, device="cuda") for _ in range(2)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            model(*static_inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(*static_inputs)

    def replay(*inputs: Any) -> Any:
        for place, value in zip(static_inputs, inputs, strict=True):
            place.copy_(value, non_blocking=True)
        graph.replay()
        return output

    return replay


WAYS: dict[str, Callable[..., None]] = {"bundle": bundle, "calls": calls, "rank": rank, "torch": by_hand}

if __name__ == "__main__":
    WAYS[sys.argv[1]](*sys.argv[2:])
