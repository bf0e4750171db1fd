"""The self-test without a GPU: runs recordings on the CPU, in memory filled with poison, and kernels in Triton's interpreter.

It uses the bundle's grids, parameter blocks and relocations (decoded by `assemble.block_reader`), arena plan, and copies to and
from the host.  It does not test whether ptxas compiled the kernels correctly.  Each int_key has a separate process.  Imports
neither torch nor Triton.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cgbundle.format.schema import IntKey, Value, Weight
from cgcompile.bundle.recordings import Function, KernelNode, MemcpyNode, MemsetNode, Recording

from ...targets.kernels.fills import memset_of
from ...util.content_cache import cache_path, recall, remember
from ...util.workers import Kind, Request, ask
from ..assemble.block_reader import arguments, check_order
from ..lowered import KernelVariant

QUIET = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Environment: one thread per process, because threads that wait for each other made a busy machine ten times slower.  malloc keeps
freed memory, because page faults took a third of the time."""

TEMPLATE_LINES = 20
"""Estimated lines in the loop of a matrix product's kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A recording, or None.  `inputs`: tensors that are written before it, row-major.  `read`: tensors that are read after it."""

    inputs: tuple[tuple[Value, bytes], ...] = field(repr=False)
    recording: Recording | None
    read: tuple[Value, ...]


WeightFiles = tuple[tuple[Path, tuple[Weight, ...]], ...]
"""The files of weights and tables of a bundle, with the memory addresses of their tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One int_key to run.  All stages use the same memory.  `variants`: ((sha256 of the image, symbol), variant) for each kernel.
    `sizes`: (name, bytes) of each memory.  `others`: for a model over several devices, the tasks of the ranks after this rank."""

    key: IntKey
    stages: tuple[Stage, ...]
    variants: tuple[tuple[tuple[str, str], KernelVariant], ...]
    sizes: tuple[tuple[str, int], ...]
    weights: WeightFiles
    others: tuple[Task, ...] = ()

    @property
    def recordings(self) -> tuple[Recording, ...]:
        return tuple([stage.recording for stage in self.stages if stage.recording])


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """`read`: the row-major contents that the stages read, in order.  `seconds`: the run time without the start of the process.
    `others`: the outcomes of the ranks after this rank."""

    key: IntKey
    read: tuple[bytes, ...] = field(repr=False)
    seconds: float
    others: tuple[Outcome, ...] = ()


def estimate(task: Task) -> float:
    """Estimates the work of a key, to compare keys: elements of a block times lines of the kernel, for all instances."""
    variants = dict(task.variants)
    total = 0.0
    nodes = [(recording, node) for recording in task.recordings for node in recording.nodes]  # other ranks have equal work
    for owner, node in nodes:
        match node:
            case KernelNode() if (fill := memset_of(owner.functions[node.function], node)) is not None:
                total += fill.width
            case KernelNode():
                function = owner.functions[node.function]
                variant = variants.get((function.image, function.symbol))
                total += math.prod(node.grid) * (_instance_work(variant, function, node) if variant else 1)
            case MemsetNode():
                total += node.width * node.height
            case MemcpyNode():
                total += node.width * node.height * node.depth
    return max(total, 1.0)


def interpret(
    tasks: Sequence[Task],
    folder: Path,
    *,
    budget: float,
    cache: Path | None = None,
    workers: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[Outcome, ...]:
    """Runs the tasks whose outcomes are not in `cache`; returns outcomes in the order of `tasks`.  The smallest and the largest
    task run first, then the other tasks by size.  After `budget` seconds, all tasks except the smallest are stopped, without an
    Outcome.  `workers`: the number of processes (default: one per processor).  `folder`: for logs.  Raises order-broken,
    parameter-mismatch, function-not-interpretable, access-outside, kernel-asserted, kernel-unreadable, worker-died."""
    for recording in [recording for task in tasks for subtask in (task, *task.others) for recording in subtask.recordings]:
        check_order(recording)
    cache_paths = _cache_files(tasks, cache) if cache else {}
    outcomes = {key: outcome for key, path in cache_paths.items() if (outcome := recall(path, Outcome))}
    if outcomes:
        tell(f"{len(outcomes)} of {len(tasks)} int_keys were interpreted before, with the same rows, kernels, weights and inputs")
    for outcome in _interpret([task for task in tasks if task.key not in outcomes], folder, budget, workers, tell):
        outcomes[outcome.key] = outcome
        if cache:
            remember(cache_paths[outcome.key], outcome)
    return tuple([outcomes[task.key] for task in tasks if task.key in outcomes])


def _cache_files(tasks: Sequence[Task], cache: Path) -> dict[IntKey, Path]:
    paths = {path for task in tasks for subtask in (task, *task.others) for path, _ in subtask.weights}
    cache_files, hashes = {}, {path: _hash(path) for path in paths}  # hashes each file once, because weight files are large
    for task in tasks:
        descriptions = []
        for subtask in (task, *task.others):
            stages = [(stage.inputs, stage.recording, stage.read) for stage in subtask.stages]  # `repr` of a stage omits bytes
            descriptions.append((subtask.key, stages, subtask.variants, subtask.sizes, [placed for _, placed in subtask.weights]))
        weights = [hashes[path] for subtask in (task, *task.others) for path, _ in subtask.weights]
        cache_files[task.key] = cache_path(cache, "interpreted", weights, *descriptions)
    return cache_files


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _interpret(
    tasks: Sequence[Task], folder: Path, budget: float, workers: int | None, tell: Callable[[str], None]
) -> Iterator[Outcome]:
    if not tasks:
        return
    folder.mkdir(parents=True, exist_ok=True)
    smallest, *others = sorted(tasks, key=estimate)
    kind = Kind(
        module="cgcompile.offline.interpret.worker",
        folder=folder,
        died="worker-died",
        environment={"TRITON_INTERPRET": "1", **QUIET},
        reused=False,
    )
    ordered = [smallest, *others[-1:], *others[:-1]]
    requests = {task.key: Request(content=task, what=f"interpreting int_key {task.key}") for task in ordered}
    tell(f"0 of {len(tasks)} int_keys, {budget:.0f} s for all")
    began = time.monotonic()
    for count, (key, outcome) in enumerate(ask(kind, requests, workers, budget, [smallest.key]), 1):
        spent = f"{time.monotonic() - began:.0f} s of {budget:.0f} s"
        tell(f"{count} of {len(tasks)} int_keys, {spent}: {key} took {outcome.seconds:.1f} s")
        yield outcome


def _instance_work(variant: KernelVariant, function: Function, node: KernelNode) -> float:
    """Elements times lines of one instance, by Inductor's names for sizes, such as XBLOCK."""
    sizes = {name: int(number) for name, number in _CONSTANT.findall(variant.source)}
    sizes |= {name: value for name, value in variant.constants if type(value) is int}
    sizes |= {name: value for name, value in arguments(variant, function, node).items() if type(value) is int}
    lines = variant.source.count("\n") + 1
    if "BLOCK_K" in sizes:
        m, n, k = sizes.get("BLOCK_M", 1), sizes.get("BLOCK_N", 1), max(1, sizes["BLOCK_K"])
        return (m + n) * max(sizes.get("K", k), k) * TEMPLATE_LINES + m * n * max(0, lines - TEMPLATE_LINES)
    width = math.prod(max(1, sizes.get(f"{axis}BLOCK", 1)) for axis in "XYZ")
    reduction = math.prod(max(1, sizes.get(f"R{i}_BLOCK", 1), sizes.get(f"r{i}_numel", 1)) for i in (0, 1))
    return width * reduction * lines


_CONSTANT = re.compile(r"^ +(\w+)(?: *: *tl\.constexpr)? = (\d+)$", re.MULTILINE)
"""Matches an assignment of a number in a kernel's source."""
