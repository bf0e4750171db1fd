"""Benchmarks models that cannot be one CUDA graph: `cuts.py [NAME...]` builds them and times calls beside torch.compile.

Every row comes from a new process, `cuts.py --one NAME`. Times are medians of whole calls including the wait for the GPU, because
every host region waits for the GPU. torch.compile runs twice: first with its defaults, which break the graph at code that it cannot
trace; then with fullgraph, and its options for scalars and data-dependent shapes.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.bench.common import child_rows

HERE = Path(__file__).parent / "cut_models"
NAMES = ("relu_sum_softmax", "masked_sum", "item", "unsafe_operator", "host_table")
SIZES = (8,)
ROUNDS, CALLS = 7, 40


def main(names: list[str]) -> int:
    """Prints the table. Returns 1 if a model fails or its results differ."""
    folder = tempfile.mkdtemp()
    with ThreadPoolExecutor() as builders:
        tasks = names or list(NAMES)
        built = dict(
            zip(tasks, builders.map(lambda name: child_rows.run("builds/cuts.py", "--build", name, folder), tasks), strict=True)
        )
    rows = {
        name: row if child_rows.failed(row) else child_rows.run("builds/cuts.py", "--one", name, folder)
        for name, row in built.items()
    }
    print(json.dumps(rows))
    for name, row in rows.items():
        if why := child_rows.failed(row):
            print(f"{name}: {why}")
            continue
        print(f"{name}: {row['regions']}, largest error {row['error']:.1e} of {row['tolerance']:.0e}")
        for size in map(str, SIZES):
            timings = row["calls"][size]
            variants = ", ".join(f"{variant} {time['us']:.0f} us ({time['launches']} graphs)" for variant, time in timings.items())
            print(f"  batch {size}: {variants}")
    return 1 if any(map(child_rows.failed, rows.values())) else 0


def build(name: str, folder: str) -> None:
    """Builds the bundle and prints the seconds as JSON."""
    import cgcompile

    sys.path.insert(0, str(HERE))
    begun = time.perf_counter()
    cgcompile.build(str(HERE / f"{name}.py"), sizes=SIZES, out=Path(folder, f"{name}.cgb"), target="cuda")
    print(json.dumps({"seconds": time.perf_counter() - begun}))


def one(name: str, folder: str) -> None:
    """Measures a model and prints its row as JSON."""
    import torch

    import cgbundle
    from cgbundle.format import archive
    from cgcompile.model.load import load_source
    from cgcompile.model.source import sample

    sys.path.insert(0, str(HERE))
    label, out = str(HERE / f"{name}.py"), str(Path(folder, f"{name}.cgb"))
    manifest = archive.read_manifest(out)
    source = load_source(label)
    network = source.model.cuda()
    if name == "host_table":
        network.table.data = network.table.data.cpu()
    program = cgbundle.load(out)
    row: dict[str, Any] = {
        "regions": " -> ".join(step.kind for step in manifest.entries[0].programs[0].steps),
        "memories": dict(manifest.memories),
        "error": 0.0,
        "tolerance": manifest.entries[0].self_test.proofs[0].tolerance,
        "calls": {},
    }
    with torch.no_grad():
        for size in SIZES:
            inputs = tuple(tensor.cuda() for tensor in sample(source, {"batch": size}, 7).tensors)
            wanted, got = network(*inputs), program(*inputs)
            row["error"] = max(row["error"], float((got - wanted).abs().max() / wanted.abs().max()))
            row["calls"][size] = timed(torch, ways_of(torch, network, program), inputs)
    if not row["error"] <= row["tolerance"]:
        print(json.dumps({"error": f"differs from eager PyTorch by {row['error']:.1e}"}))
        return
    print(json.dumps(row))


def ways_of(torch: Any, network: Any, program: Any) -> dict[str, Callable[..., Any]]:
    """Returns the calls to time: the bundle, eager PyTorch, and torch.compile with and without fullgraph."""
    torch._dynamo.reset()
    broken = torch.compile(network, mode="reduce-overhead", dynamic=False)
    one_graph = torch.compile(network, mode="reduce-overhead", dynamic=False, fullgraph=True)

    def full(*inputs: Any) -> Any:
        with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
            return one_graph(*inputs)

    return {"bundle": program, "eager": network, "torch.compile": broken, "torch.compile, one graph": full}


def timed(torch: Any, variants: dict[str, Callable[..., Any]], inputs: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the microseconds of a call and its number of graph launches for each variant, or the error of torch.compile."""
    timings: dict[str, Any] = {}
    for name, call in variants.items():
        try:
            for _ in range(5):
                call(*inputs)
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 (torch.compile fails in many ways; the row still shows the others)
            timings[name] = {"us": float("nan"), "launches": f"{type(error).__name__}"}
            continue
        timings[name] = {"us": median(torch, call, inputs), "launches": launches(torch, call, inputs)}
    return timings


def median(torch: Any, call: Callable[..., Any], inputs: tuple[Any, ...]) -> float:
    """Returns the median time of all calls, in microseconds."""
    times = []
    for _ in range(ROUNDS * CALLS):
        start = time.perf_counter_ns()
        call(*inputs)
        torch.cuda.synchronize()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1000


def launches(torch: Any, call: Callable[..., Any], inputs: tuple[Any, ...]) -> int:
    """Returns the number of graphs that one call launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as seen:
        call(*inputs)
        torch.cuda.synchronize()
    return sum(event.name in ("cudaGraphLaunch", "cuGraphLaunch") for event in seen.events())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(*sys.argv[2:])
    elif sys.argv[1:2] == ["--build"]:
        build(*sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
