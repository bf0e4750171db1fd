"""The part `cold` of show.py: time from process start to the first output with all three sizes ready. Variants
alternate in new processes."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import venv
from pathlib import Path
from typing import Any

from cgbundle.format import archive, file_names
from cgbundle.format.safetensors_files import Mapped
from cgbundle.tensors import comparison
from tests.bench.builds import built_models
from tests.bench.common import child_rows, report, serving
from tests.bench.common.child_rows import failed, say
from tests.bench.gpu_cold import load_stages

REPEAT = {"bundle": 9, "bundle alone": 9, "watched": 5, "C floor": 9, "Python floor": 5, "capture": 4, "compile": 3, "JAX": 4}
TOLERANCE = 4e-2
"""Tolerance of bfloat16 that cgcompile allows for recordings."""

OVER_FLOOR = 58
"""Milliseconds by which the bundle may be slower than the C program. The goal is 0.27 s on a machine where the C program took 0.212
s."""

LAPS = ("interpreter", "import cgbundle", "input", "first call")
"""Laps that are shown beside the stages of loading."""


def measure(bundle: Path, cache: Path) -> dict[str, Any]:
    """Measures the repetitions of every variant; a variant that fails has {"error"} instead."""
    folder = cache / "cold"
    folder.mkdir(parents=True, exist_ok=True)
    texts = self_test_inputs(bundle, folder)
    weights = bundle / file_names.WEIGHTS
    model = built_models.GPT.source
    compiling = child_rows.inductor_cache(cache) | child_rows.gpt_environment()
    jax = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
    torch = ("capture", model, weights, folder / "capture", *texts)
    alone = folder / "environment"
    venv.create(alone, symlinks=True)
    variants = {
        "bundle": lambda: child_rows.run("gpu_cold/serve_bundle.py", "plain", bundle, folder / "bundle.0", texts[0]),
        "bundle alone": lambda: child_rows.run(
            "gpu_cold/serve_bundle.py", "plain", bundle, folder / "alone.0", texts[0], python=alone / "bin" / "python"
        ),
        "watched": lambda: child_rows.run("gpu_cold/serve_bundle.py", "watched", bundle, folder / "watched.0", texts[0]),
        "C floor": lambda: c_floor(folder),
        "Python floor": lambda: child_rows.run("gpu_cold/floor.py"),
        "capture": lambda: child_rows.run("gpu_cold/serve_torch.py", *torch, extra=child_rows.gpt_environment()),
        "compile": lambda: child_rows.run(
            "gpu_cold/serve_torch.py", "compile", model, weights, folder / "compile", *texts, extra=compiling
        ),
        "JAX": lambda: child_rows.run("gpu_cold/serve_jax.py", "serve", folder / "jax", weights, *texts, extra=jax),
    }
    shutil.rmtree(cache / "torch_compile", ignore_errors=True)
    say("cold: torch.compile fills its cache")
    numbers: dict[str, Any] = {"cold compile": variants["compile"]()}
    say(f"cold: {seconds_or_error(numbers['cold compile'])}; JAX compiles")
    numbers["JAX build"] = child_rows.run("gpu_cold/serve_jax.py", "build", folder / "jax", weights, *texts, extra=jax)
    say(f"cold: {seconds_or_error(numbers['JAX build'])}")
    for variant, once in variants.items():
        if variant != "compile":
            first = once()
            say(f"cold: {variant}, first time: {seconds_or_error(first)}")
    for round_ in range(max(REPEAT.values())):
        for variant, once in variants.items():
            rows = numbers.setdefault(variant, [])
            if round_ < REPEAT[variant] and not (rows and failed(rows[-1])):
                rows.append(once())
    numbers["differences"] = differences(bundle, folder)
    say(f"cold: differences to the recording {numbers['differences']}")
    return numbers


def self_test_inputs(bundle: Path, folder: Path) -> list[str]:
    """Writes the self-test's input of every key to a raw file and returns `file:dtype:shape` of each."""
    entry = archive.read_manifest(str(bundle)).entries[0]
    stored = Mapped(str(bundle / file_names.SELF_TEST), file_names.SELF_TEST)
    texts = []
    try:
        for index, program in enumerate(entry.programs):
            name = file_names.self_test_entry(program.key, "input", 0)
            row = stored.entries[name]
            path = folder / f"input.{index}"
            path.write_bytes(bytes(stored.data(name)))
            (folder / f"expected.{index}").write_bytes(bytes(stored.data(file_names.self_test_entry(program.key, "output", 0))))
            texts.append(f"{path}:{row.dtype}:{'x'.join(map(str, row.shape))}")
    finally:
        stored.close()
    return texts


def differences(bundle: Path, folder: Path) -> dict[str, Any]:
    """Returns, for each variant, the largest difference of its output from the self-test's, for every size with an output file."""
    dtype = archive.read_manifest(str(bundle)).entries[0].outputs[0].dtype
    errors = {}
    for variant, stem in (
        ("bundle", "bundle"),
        ("bundle alone", "alone"),
        ("capture", "capture"),
        ("compile", "compile"),
        ("JAX", "jax/output"),
    ):
        files = sorted(folder.glob(f"{stem}.[0-9]"))
        errors[variant] = [
            comparison.difference(dtype, (folder / f"expected.{file.name[-1]}").read_bytes(), file.read_bytes()) for file in files
        ]
    return errors


def c_floor(folder: Path) -> dict[str, Any]:
    """Compiles and runs a C program with cuInit and a context. Returns seconds from its start."""
    program = folder / "floor"
    if not program.exists():
        source = Path(__file__).with_name("floor.c")
        compiler = next((path for name in ("cc", "gcc", "clang", "nvcc") if (path := shutil.which(name))), None)
        if compiler is None:
            return {"error": "no C compiler on this machine"}
        done = subprocess.run([compiler, "-O1", "-o", program, source, "-ldl"], capture_output=True, text=True, check=False)
        if done.returncode:
            return {"error": f"{compiler}: {done.stderr.strip()[:200]}"}
    start = serving.now()
    done = subprocess.run([program], capture_output=True, text=True, check=False, env=dict(os.environ))
    ended = serving.now() - start
    if done.returncode:
        return {"error": done.stderr.strip()[:200]}
    return {"seconds": float(done.stdout) - start, "with exit": ended}


def seconds_or_error(row: dict[str, Any]) -> str:
    """Returns a text such as `9.02 s`, or the row's error."""
    return failed(row) or f"{row['seconds']:.3f} s"


def show(screen: report.Console, numbers: dict[str, Any]) -> None:
    """Prints times and ratios against the goals, then the breakdown."""
    bundle_seconds = times(numbers, "bundle")
    goals = {"compile": 20, "capture": 6, "JAX": 4}
    titles = {
        "bundle": "bundle, three sizes ready (no torch, no NumPy)",
        "bundle alone": "the same in an environment that has nothing else",
        "C floor": "floor: C, cuInit and context",
        "Python floor": "floor: Python and cuda-bindings, context",
        "capture": "torch, three graphs captured by hand",
        "compile": "torch.compile reduce-overhead, warm cache",
        "JAX": "JAX, three serialized executables",
    }
    rows = []
    for variant, title in titles.items():
        seconds = times(numbers, variant)
        if not seconds:
            rows.append([title, failed(numbers[variant][-1])[:60] if numbers.get(variant) else "not run", ""])
            continue
        verdict = ""
        floor = times(numbers, "C floor")
        if variant in ("bundle", "bundle alone") and floor:
            verdict = report.goal((statistics.median(seconds) - statistics.median(floor)) * 1e3, OVER_FLOOR, "ms over the floor")
        elif variant in goals and bundle_seconds:
            verdict = report.goal(
                statistics.median(seconds) / statistics.median(bundle_seconds), goals[variant], "x", at_least=True
            )
        rows.append([title, report.spread(seconds), verdict])
    rows.append(["torch.compile reduce-overhead, empty cache", seconds_or_error(numbers["cold compile"])[:60], "once"])
    rows.append(["JAX, compiling the three executables", seconds_or_error(numbers["JAX build"])[:60], "once"])
    report.table(
        screen, "Cold start, GPT bf16: process start to first output", ["", "median (range)", "bundle faster by; goal"], rows
    )
    show_breakdown(screen, numbers)


def times(numbers: dict[str, Any], variant: str) -> list[float]:
    """Returns the seconds of the repetitions that succeeded."""
    return [row["seconds"] for row in numbers.get(variant, []) if not failed(row)]


def show_breakdown(screen: report.Console, numbers: dict[str, Any]) -> None:
    """Prints the parts of the bundle's time, and the forbidden modules of the loading process."""
    runs = [row for row in numbers.get("watched", []) if not failed(row)]
    if not runs:
        return
    rows = [[name, report.milliseconds([run["laps"][name] for run in runs])] for name in LAPS[:2]]
    names = list(dict.fromkeys(name for run in runs for name in run["stages"]))
    for name in sorted(names, key=lambda name: name.startswith(load_stages.BESIDE)):
        rows.append([f"load: {name}", report.milliseconds([run["stages"].get(name, 0.0) for run in runs])])
    rows.append(["load: the rest", report.milliseconds([rest_of_load(run) for run in runs])])
    rows += [[name, report.milliseconds([run["laps"][name] for run in runs])] for name in LAPS[2:]]
    rows.append(["in all, watched", report.milliseconds(times(numbers, "watched"))])
    note = "beside: in another thread, while the first goes on; so travel the weights"
    report.table(screen, "Where the bundle's time goes", ["", "median (range)"], rows, note)
    run = runs[-1]
    first, second = run["addresses"][0], run["addresses"][-1]
    apart = all(a != b for a, b in zip(first, second, strict=True) if a or b)
    held = ", ".join(run["banned"]) or "none"
    plain = ", ".join(numbers["bundle"][-1].get("foreign", [])) or "none"
    screen.print(f"imported of torch, numpy, triton, cgcompile: {held}; packages beside the standard library: {plain}")
    screen.print(f"two loads in one process: {'all' if apart else 'NOT ALL'} memories at other addresses, e.g. weights at")
    screen.print(
        f"  {first[0]:#x} and {second[0]:#x}; self-test at the second: {'same bits' if all(run['self-test']) else 'OTHER BITS'}"
    )
    for variant, values in numbers["differences"].items():
        shown = ", ".join(f"{value:.1e}" for value in values)
        screen.print(f"  {variant}: largest difference to the recording per size: {shown} (allowed {TOLERANCE:g})")
    screen.print()


def rest_of_load(run: dict[str, Any]) -> float:
    """Returns the seconds of `load` that belong to no measured stage of the first thread."""
    stage_seconds = sum(seconds for name, seconds in run["stages"].items() if not name.startswith(load_stages.BESIDE))
    return run["laps"]["load"] - stage_seconds
