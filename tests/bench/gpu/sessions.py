"""Runs sessions of one bundle: `sessions.py BUNDLE [SESSIONS] [CALLS]`, each in its own thread and on its own stream.

Every session makes the same calls over all sizes, in a different order. Every output must equal, bit for bit, the output of a
single session. Prints as JSON: the number of calls with a different output, the sessions' memory and its prediction, and calls per
second of one session and of all.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from typing import Any

import torch

import cgbundle
from tests.bench.gpu import gpu_calls

Key = tuple[int, ...]


def main(bundle: str, sessions: int = 8, calls: int = 1000) -> int:
    """Returns 1 if an output differs."""
    inputs = gpu_calls.self_test_calls(bundle)
    order = list(inputs)
    with cgbundle.load(bundle) as program:
        wanted = {key: first(program(value)).clone() for key, value in inputs.items()}
        alone = once(program.session(), inputs, wanted, order, calls, 0)
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        opened_sessions = [program.session() for _ in range(sessions)]
        torch.cuda.synchronize()
        used = free - torch.cuda.mem_get_info()[0]
        results: dict[int, Any] = {}
        ready = threading.Barrier(sessions + 1)

        def work(number: int) -> None:
            ready.wait()
            results[number] = once(opened_sessions[number], inputs, wanted, order, calls, number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(sessions)]
        for thread in threads:
            thread.start()
        ready.wait()
        begun = time.perf_counter()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begun
        wrong = sum(result["wrong"] for result in results.values())
        row = {
            "sessions": sessions, "calls each": calls, "wrong": wrong, "wrong alone": alone["wrong"],
            "session memory": program.session_memory, "predicted bytes": sessions * on_gpu(program.session_memory),
            "taken bytes": used, "calls per second": sessions * calls / seconds, "one session's": calls / alone["seconds"],
        }  # fmt: skip
    print(json.dumps(row))
    return 1 if wrong or alone["wrong"] else 0


def once(session: Any, inputs: dict[Key, Any], wanted: dict[Key, Any], order: list[Key], calls: int, seed: int) -> dict[str, Any]:
    """Runs one session's calls on its own stream. Comparisons stay on the GPU until the end."""
    picked = random.Random(seed).choices(order, k=calls)
    differ = []
    begun = time.perf_counter()
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()) as _:
        for key in picked:
            differ.append((first(session(inputs[key])) != wanted[key]).any())
        torch.cuda.current_stream().synchronize()
        seconds = time.perf_counter() - begun
        wrong = int(torch.stack(differ).sum())
    return {"wrong": wrong, "seconds": seconds}


def on_gpu(sizes: dict[str, int]) -> int:
    """Returns the bytes of GPU memory for memories of these sizes, in the driver's steps of 2 MiB."""
    return sum(-(-max(size, 256) >> 21) << 21 for name, size in sizes.items() if name not in ("host", "code"))


def first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
