"""Tables of the parts of show.py that run one child process, and sentences about wrong results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.bench.common import report
from tests.bench.common.child_rows import failed
from tests.bench.gpu_cold.cold_start import TOLERANCE


def show_dispatch(screen: report.Console, numbers: dict[str, Any]) -> None:
    """Prints the CPU microseconds per call."""
    rows = []
    for name, (low, median, high) in numbers["quartiles"].items():
        verdict = report.goal(median, 25, "us") if name in ("bundle, view", "bundle, copy") else ""
        rows.append([name, f"{median:.1f} us ({low:.1f}-{high:.1f})", verdict])
    title = f"CPU time of one call: GPT bf16, batch {numbers['key'][0]}, torch inputs on the GPU, {numbers['calls']} calls each"
    report.table(screen, title, ["", "median (quartiles)", "goal"], rows)


def show_device(screen: report.Console, numbers: dict[str, Any]) -> None:
    """Prints the GPU microseconds per call."""
    rows = []
    for row in numbers["rows"]:
        times = row["microseconds"]
        ratio = times["bundle, graph"] / times["torch.compile, graph"]
        rows.append(
            [
                str(row["key"][0]),
                *[f"{time:.1f} us" for time in times.values()],
                f"{ratio:.3f} ({'met' if ratio <= 1.01 else 'MISSED'})",
                "same bits" if row["same bits as torch.compile"] else f"{row['difference to torch.compile']:.0e}",
                f"{row['difference to eager']:.0e}",
            ]
        )
    columns = ["batch", *numbers["rows"][0]["microseconds"], "bundle / compile (1.01)", "outputs to compile", "to eager"]
    report.table(screen, f"GPU time of one call: GPT bf16, {numbers['gpu']}, torch {numbers['torch']}", columns, rows)


def show_memory(screen: report.Console, numbers: dict[str, Any]) -> None:
    """Prints the bytes in the manifest and the bytes that the device reports."""
    memories = numbers["memories"]
    # the driver allocates some memory of the context with the first module: what it keeps after close is not the bundle's
    planned, used = numbers["manifest"], numbers["used after load"] - numbers["left after close"]
    known = memories["weights"] + memories["inputs"]
    rows = [[f"manifest: {name}", mb(size)] for name, size in memories.items()]
    rows += [
        ["arena of each size (all share the largest)", ", ".join(map(mb, numbers["arenas"]))],
        ["manifest, in all", mb(planned)],
        ["the device reports after load, less context", f"{mb(used)}, {within(used, planned)} of the manifest's"],
        [
            "... less weights and inputs",
            f"{mb(used - known)}, {within(used - known, planned - known)} of the manifest's arena and code",
        ],
        ["the device reports after a call of every size", mb(numbers["used after calls"])],
        ["of the context: still taken when all is closed", mb(numbers["left after close"])],
        [f"lost over {numbers['rounds']} rounds of load, call, close", f"{numbers['lost on the GPU']} bytes"],
        ["growth of the process meanwhile", mb(numbers["resident growth"])],
    ]
    report.table(screen, "Memory: GPT bf16", ["", ""], rows)


def within(measured: int, planned: int) -> str:
    """Returns a text such as `1.032 (within 10%: met)`."""
    ratio = measured / planned if planned else float("inf")
    return f"{ratio:.3f} (within 10%: {'met' if abs(ratio - 1) <= 0.1 else 'MISSED'})"


def mb(size: int) -> str:
    """Returns a text such as `12.3 MB`."""
    return f"{size / 1e6:.1f} MB"


def show_replays(screen: report.Console, numbers: dict[str, Any]) -> None:
    rows = [
        [f"{numbers['replays']:,} replays, sizes, inputs and streams at random", f"{numbers['wrong']} with other bits"],
        [
            'mode="stream" beside mode="graph"',
            f"{numbers['stream differs']} of {numbers['stream compared']} with other bits",
        ],
    ]
    for name, title in (("difference to eager", "recorded sizes"), ("pad", 'on_miss="pad"'), ("chunk", 'on_miss="chunk"')):
        sizes = ", ".join(f"{size}: {value:.0e}" for size, value in numbers[name].items())
        rows.append([f"{title}, difference to eager by batch", sizes])
    report.table(screen, "Replays: GPT bf16", ["", ""], rows)


SHOW: dict[str, Callable[[report.Console, dict[str, Any]], None]] = {
    "dispatch": show_dispatch, "device": show_device, "memory": show_memory, "replays": show_replays,
}  # fmt: skip


def wrong_cold(numbers: dict[str, Any]) -> list[str]:
    """Lists variants that failed, forbidden imports in the loading process, and outputs that differ."""
    sentences = [
        f"{variant}: {failed(rows[-1])}"
        for variant, rows in numbers.items()
        if isinstance(rows, list) and rows and failed(rows[-1])
    ]
    sentences += [f"{variant}: {failed(numbers[variant])}" for variant in ("cold compile", "JAX build") if failed(numbers[variant])]
    for run in [row for variant in ("bundle", "bundle alone", "watched") for row in numbers.get(variant, [])]:
        if run.get("banned"):
            sentences.append(f"the loading process imported {', '.join(run['banned'])}")
        if not all(run.get("self-test", [True])):
            sentences.append("the self-test gave other bits")
        first, *others = run.get("addresses", [[]])
        if others and any(a == b for a, b in zip(first, others[-1], strict=True) if a):
            sentences.append("two loads share an address")
    if any(not row["hits"] for row in numbers.get("compile", []) if not failed(row)):
        sentences.append("torch.compile found nothing in its warm cache: the comparison would be unfair")
    if any(numbers["differences"].get("bundle", []) + numbers["differences"].get("bundle alone", [])):
        sentences.append("the bundle's output differs from the recording's")
    for variant, values in numbers["differences"].items():
        sentences += [f"{variant} differs from the recording by {value:.1e}" for value in values if not value <= TOLERANCE]
    return sorted(set(sentences))


def wrong_dispatch(numbers: dict[str, Any]) -> list[str]:
    """Lists outputs too far from eager PyTorch."""
    return [f"{name} differs from eager by {value:.1e}" for name, value in numbers["differences"].items() if not value <= TOLERANCE]


def wrong_device(numbers: dict[str, Any]) -> list[str]:
    """Lists outputs too far from eager PyTorch."""
    return [
        f"batch {row['key'][0]} differs from eager by {row['difference to eager']:.1e}"
        for row in numbers["rows"]
        if not row["difference to eager"] <= TOLERANCE
    ]


def wrong_memory(numbers: dict[str, Any]) -> list[str]:
    """Lists a memory leak, or an arena that is not the maximum."""
    sentences = [] if numbers["arena is the maximum"] else ["the arena is not the largest of the sizes'"]
    return sentences + ([f"{numbers['lost on the GPU']} bytes lost on the GPU"] if numbers["lost on the GPU"] > 0 else [])


def wrong_replays(numbers: dict[str, Any]) -> list[str]:
    """Lists outputs with different bits, or too far from eager PyTorch."""
    sentences = [f"{numbers[name]} outputs with other bits ({name})" for name in ("wrong", "stream differs") if numbers[name]]
    for name in ("difference to eager", "pad", "chunk"):
        sentences += [f"{name} {size}: {value:.1e}" for size, value in numbers[name].items() if not value <= TOLERANCE]
    return sentences


WRONG: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "dispatch": wrong_dispatch, "device": wrong_device, "memory": wrong_memory, "replays": wrong_replays,
}  # fmt: skip
