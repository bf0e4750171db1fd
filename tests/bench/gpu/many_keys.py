"""Measures the cost of many int_keys: `many_keys.py FEW MANY [ROUNDS]` compares two CUDA bundles of one model, for example with 3
and 64 keys.

Prints the time from process start to first output of both bundles with the default loading, and of MANY with all graphs built by
`load` and with none; the runs alternate. Also prints the time in driver calls while MANY is loaded, the GPU memory of each key, and
the cost of a call that changes the key. Needs no torch.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from tests.bench.common import children, report, serving

GOAL = 0.1
"""Seconds that a load with 64 keys may take longer than one with three (issue 18)."""

LAZY = {"all": False, "default": None, "lazy": True}

BURST = 12
"""Number of calls that the GPU's queue takes without blocking the caller."""


def main(few: str, many: str, rounds: str = "7") -> None:
    variants = [(few, "default"), (many, "default"), (many, "all"), (many, "lazy")]
    runs_by_way: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for round_ in range(int(rounds) + 1):
        for variant in variants:
            row = children.run("gpu/many_keys.py", "serve", *variant)
            if round_:
                runs_by_way[variant].append(row)
    screen = report.console()
    rows = []
    for (bundle, how), runs in runs_by_way.items():
        base = statistics.median(row["total"] for row in runs_by_way[few, "default"])
        total = [row["total"] for row in runs]
        laps = [report.milliseconds([row["laps"][name] for row in runs]) for name in ("load", "first call")]
        verdict = report.goal(statistics.median(total) - base, GOAL, "s more") if bundle == many else ""
        rows.append([f"{runs[0]['keys']} keys, {how}", *laps, report.spread(total), verdict])
    report.table(screen, "Process start to first output", ["", "load", "first call", "in all", "goal"], rows)
    for how in ("all", "default"):
        spent = children.run("gpu/many_keys.py", "driver", many, how)
        rows = [[name, f"{1e3 * seconds:.1f} ms", str(count)] for name, (count, seconds) in spent["calls"].items()]
        report.table(
            screen,
            f"Calls of the driver, {how}: load {1e3 * spent['load']:.0f} ms, all built after {1e3 * spent['built']:.0f}",
            ["", "in all", "times"],
            rows,
        )
    for name, value in children.run("gpu/many_keys.py", "use", many).items():
        screen.print(f"{name}: {value}")


def serve(bundle: str, how: str) -> dict[str, Any]:
    """Serves one call in this process and returns the times."""
    laps = serving.Laps()
    laps.mark("interpreter")
    import cgbundle

    laps.mark("import cgbundle")
    program = cgbundle.load(bundle, lazy=LAZY[how])
    laps.mark("load")
    values = zeros(program, program.int_keys[0])
    laps.mark("input")
    program.replay(values)
    laps.mark("first call")
    numbers = {"laps": laps.seconds, "total": laps.total, "keys": len(program.int_keys)}
    program.close()
    return numbers


def driver(bundle: str, how: str) -> dict[str, Any]:
    """Returns the seconds in driver calls by name while the bundle is loaded, in all threads, longest first."""
    import cgbundle
    from cgbundle.cuda.driver import Context, cu

    context = Context(0)
    spent: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])

    def timed(name: str, call: Any) -> Any:
        def run(*arguments: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                spent[name][0] += 1
                spent[name][1] += time.perf_counter() - begun

        return run

    from cgbundle.cuda import libcuda

    for name in [*libcuda.FUNCTIONS, "cuGraphAddDependencies"]:
        setattr(cu, name, timed(name, getattr(cu, name)))
    begun = time.perf_counter()
    program = cgbundle.load(bundle, lazy=LAZY[how])
    load = time.perf_counter() - begun
    program._backend.populate()  # waits for the graphs that are built in the background
    built = time.perf_counter() - begun
    order = sorted(spent.items(), key=lambda item: -item[1][1])[:12]
    program.close()
    context.release()
    return {"load": load, "built": built, "calls": {name: (count, seconds) for name, (count, seconds) in order}}


def use(bundle: str) -> dict[str, Any]:
    """Returns the GPU memory of a key, and the times of calls with one key and with alternating keys."""
    import cgbundle
    from cgbundle.cuda import driver as cuda

    program = cgbundle.load(bundle, lazy=True, outputs="view")
    context = program._backend._context  # type: ignore[attr-defined]
    keys = program.int_keys
    calls = {key: zeros(program, key) for key in keys}
    resident, free, first = [], [], []
    for key in keys:
        begun = time.perf_counter()
        program.replay(calls[key])
        first.append(time.perf_counter() - begun)
        with context:
            free.append(cuda.free_bytes())
        with open("/proc/self/statm") as file:
            resident.append(int(file.read().split()[1]) * 4096)
    device = {key: [spread(program, key)] for key in keys}
    same, turns = [], []
    for _ in range(40):
        same.append(burst(program, [device[keys[0]][0]] * BURST))
        turns.append(burst(program, [device[key][0] for key in keys[:BURST]]))
    numbers = {
        "device memory for a key, KiB": round((free[0] - free[-1]) / (len(keys) - 1) / 1024, 1),
        "host memory for a key, KiB": round((resident[-1] - resident[0]) / (len(keys) - 1) / 1024, 1),
        "first call of a key, ms, median (largest)": f"{1e3 * statistics.median(first[1:]):.2f} ({1e3 * max(first[1:]):.2f})",
        "a call of the same key, us, median (least)": f"{statistics.median(same):.2f} ({min(same):.2f})",
        "a call of another key, us, median (least)": f"{statistics.median(turns):.2f} ({min(turns):.2f})",
    }
    program.close()
    return numbers


def burst(program: Any, calls: list[list[Any]]) -> float:
    """Returns microseconds of CPU time per call. The waits for the GPU before and after are not timed."""
    backend = program._backend
    synchronize(backend)
    begun = time.perf_counter()
    for call in calls:
        program.replay(call)
    spent = time.perf_counter() - begun
    synchronize(backend)
    return 1e6 * spent / len(calls)


def synchronize(backend: Any) -> None:
    from cgbundle.cuda.driver import check, cu

    with backend.locked(None) as stream:
        check("cuStreamSynchronize", cu.cuStreamSynchronize(stream))


def spread(program: Any, key: tuple[int, ...]) -> list[Any]:
    """Returns the key's static buffers as inputs, so that nothing is copied."""
    return list(program.buffers(key))


def zeros(program: Any, key: tuple[int, ...]) -> list[Any]:
    """Returns zero inputs for a key, on the CPU."""
    from cgbundle.tensors import tensor

    row = program.spec.programs[program.int_keys.index(key)]
    rows = [row.values[index] for index in row.inputs]
    return [tensor.from_bytes(bytes(len(tensor.empty(row.dtype, row.shape).tobytes())), row.dtype, row.shape) for row in rows]


CHILDREN: dict[str, Callable[..., Any]] = {"serve": serve, "driver": driver, "use": use}

if __name__ == "__main__":
    if sys.argv[1] in CHILDREN:
        print(json.dumps(CHILDREN[sys.argv[1]](*sys.argv[2:])))
    else:
        os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "0")
        main(*sys.argv[1:])
