"""Child process: `memory_use.py BUNDLE ROUNDS` compares used GPU memory with the manifest, then loads and closes in a loop.

It does not import torch, so nothing else in this process uses GPU memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cgbundle
from cgbundle.cuda import driver
from cgbundle.cuda.driver import Context
from cgbundle.format.safetensors_files import Mapped
from cgbundle.self_test import inputs_of

SETTLED = 10
"""Number of rounds in which the driver may still allocate memory for itself. Later growth is a leak."""


def main(bundle: str, rounds: str) -> None:
    context = Context(0)
    before = free(context)
    program = cgbundle.load(bundle)
    manifest, spec = program.manifest, program.spec
    loaded = free(context)
    self_test = Mapped(str(Path(bundle, "exam.safetensors")), "exam.safetensors")
    calls = [inputs_of(self_test, spec, key) for key in program.int_keys]
    for call in calls:
        program.replay(call)
    served = free(context)
    program.close()
    closed = free(context)
    left, resident = [], []
    for _ in range(int(rounds)):
        with cgbundle.load(bundle) as again:
            again.replay(calls[0])
        left.append(free(context))
        resident.append(resident_bytes())
    memories = dict(manifest.memories)
    images = sum(file.bytes for file in manifest.files if file.path.startswith("kernels/"))
    numbers = {
        "memories": memories,
        "arenas": [row.arena for row in spec.programs],
        "manifest": sum(memories.values()),
        "image bytes": images,
        "used after load": before - loaded,
        "used after calls": before - served,
        "left after close": before - closed,
        "arena is the maximum": memories["arena"] == max(row.arena for row in spec.programs),
        "rounds": len(left),
        "lost on the GPU": left[min(SETTLED, len(left) - 1)] - left[-1],
        "free at the end, less before": left[-1] - before,
        "resident growth": resident[-1] - resident[min(SETTLED, len(resident) - 1)],
    }
    context.release()
    print(json.dumps(numbers))


def free(context: Context) -> int:
    with context:
        return driver.free_bytes()


def resident_bytes() -> int:
    """Returns the resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


if __name__ == "__main__":
    main(*sys.argv[1:])
