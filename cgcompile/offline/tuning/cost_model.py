"""Chooses the configuration of a matrix product or convolution, by a table of measurements or by a cost model.  Pure Python.  A
configuration is the block that a program instance computes, the number of pipeline stages, and the number of warps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...targets.architectures import Arch

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int8": 1, "int32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes of an element."""

ALIKE = {"addmm": "mm", "baddbmm": "bmm", "bfloat16": "float16"}
"""Kinds and dtypes that take the same time.  The addend is read when the result is written; the tensor cores' rates are equal."""

REACH = 2.0
"""Measurements of problems up to this distance are used: the Euclidean distance of the base-2 logarithms of (batch, m, n, k)."""

LATENCY = 700.0
"""Cycles from the request of a block (L2) to its multiplication."""

L2_BYTES = 64.0
"""Bytes per cycle that one multiprocessor reads from L2."""

LAUNCHED = 2000.0
"""Cycles to start a wave of blocks, to compute the first addresses of the pipeline, and to write the result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """`batch` matrix products of (m, k) by (k, n).  `kind`: "mm", "addmm", "bmm", "baddbmm" or "conv".  `dtype`: the dtype of the
    factors.  For a convolution: m output positions, n output channels of a group, batch groups, and k = input channels of a group
    times the kernel's size."""

    kind: str
    batch: int
    m: int
    n: int
    k: int
    dtype: str
    arch: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A configuration: a program instance computes block_m x block_n results in steps of block_k, with `stages` pipeline stages.
    `group`: rows of instances that run together to reuse the cache; 0 if the kernel has no such parameter."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    group: int


Table = Mapping[Problem, Sequence[tuple[Candidate, float]]]
"""The measured candidates of each problem, with microseconds."""


def choose(problem: Problem, candidates: Sequence[Candidate], arch: Arch, table: Table | None = None) -> tuple[int, str]:
    """Returns the position of the best candidate and how it was chosen: "only" (a single candidate), "table" (measurements of this
    problem), "nearest" (of a similar problem) or "heuristic" (the cost model).  Raises ValueError if none fits the target."""
    fitting = [index for index, candidate in enumerate(candidates) if fits(problem, candidate, arch)]
    if not fitting:
        raise ValueError(f"no configuration of {len(candidates)} fits {arch.name}: {problem}")
    if len(candidates) == 1:
        return 0, "only"
    positions = {candidates[index]: index for index in reversed(fitting)}
    if table:
        if problem in table and (position := _fastest(table[problem], positions)) is not None:
            return position, "table"
        for neighbour in nearest(problem, table):
            if (position := _fastest(table[neighbour], positions)) is not None:
                return position, "nearest"
    return min(fitting, key=lambda index: (cost(problem, candidates[index], arch), index)), "heuristic"


def measured(problem: Problem, table: Table) -> list[Candidate]:
    """The candidates that were measured for this problem, else for the nearest one, with blocks no larger than this problem.
    Inductor may not offer them."""
    near = [problem] if problem in table else nearest(problem, table)[:1]
    largest = [1 << max(4, (size - 1).bit_length()) for size in (problem.m, problem.n, problem.k)]
    rows = [candidate for neighbour in near for candidate, _ in table[neighbour]]
    return [row for row in rows if all(a <= b for a, b in zip((row.block_m, row.block_n, row.block_k), largest, strict=True))]


def fits(problem: Problem, candidate: Candidate, arch: Arch) -> bool:
    """Whether the pipeline fits the shared memory of a block and the result fits the registers (255 per thread)."""
    results = candidate.block_m * candidate.block_n / (32 * candidate.warps)
    return shared_bytes(problem, candidate) <= arch.shared_optin and results < 255


def shared_bytes(problem: Problem, candidate: Candidate) -> int:
    """The shared memory of a program instance in bytes: a block of both factors for each stage."""
    rows = candidate.block_m + candidate.block_n
    return max(1, candidate.stages) * rows * candidate.block_k * ITEMSIZE[problem.dtype]


def cost(problem: Problem, candidate: Candidate, arch: Arch) -> float:
    """Estimates cycles, for ceil(k / block_k) steps per block and as many concurrent blocks as fit a multiprocessor.  A step takes
    the longer of the tensor cores' and L2's times, and at least the latency that the pipeline does not hide.  A partial wave costs
    as much as a full one, and padding of m and n costs as much as results."""
    blocks = problem.batch * math.ceil(problem.m / candidate.block_m) * math.ceil(problem.n / candidate.block_n)
    steps = math.ceil(problem.k / candidate.block_k)
    resident = _resident(problem, candidate, arch)
    waves = math.ceil(blocks / (arch.multiprocessors * resident))
    together = min(resident, math.ceil(blocks / arch.multiprocessors))
    flops = 2 * candidate.block_m * candidate.block_n * candidate.block_k
    multiply = together * flops / _rate(problem, candidate, arch)
    load = together * (candidate.block_m + candidate.block_n) * candidate.block_k * ITEMSIZE[problem.dtype] / L2_BYTES
    uncovered = LATENCY / max(1, candidate.stages - 1)
    return waves * (LAUNCHED + LATENCY + steps * max(multiply, load, uncovered))


def _rate(problem: Problem, candidate: Candidate, arch: Arch) -> float:
    """Operations per cycle and multiprocessor.  Half precision has the rate of the tensor cores, tf32 half of this rate; float32 is
    three tf32 products.  Other types have a rate of 256.  Small blocks are slower, because a warp has too few independent products.
    From Hopper on, only groups of four warps with 64 rows reach the full rate; other blocks reach about half of it."""
    rates = {"float16": 1.0, "bfloat16": 1.0, "float8_e4m3fn": 2.0, "float8_e5m2": 2.0, "int8": 2.0, "float32": 1 / 6}
    if problem.dtype not in rates:
        return 256.0
    wide = arch.major < 9 or arch.major == 12 or (candidate.block_m >= 64 and candidate.warps % 4 == 0)
    results = candidate.block_m * candidate.block_n / (32 * candidate.warps)
    filled = min(1.0, results / 32) * (1.0 if results <= 128 else 0.8)
    busy = min(1.0, (0.4 + 0.15 * candidate.warps) * _resident(problem, candidate, arch))
    return arch.tensor_flops * rates[problem.dtype] * (1.0 if wide else 0.5) * filled * busy


def _resident(problem: Problem, candidate: Candidate, arch: Arch) -> int:
    """The number of blocks that run on one multiprocessor at the same time, limited by shared memory, threads and registers."""
    threads = 32 * candidate.warps
    per_thread = 48 + candidate.block_m * candidate.block_n / threads
    by_shared = arch.shared_sm // (shared_bytes(problem, candidate) + 1024)
    by_registers = int(arch.registers // (threads * min(255.0, per_thread)))
    return max(1, min(by_shared, arch.threads_sm // threads, by_registers, 32))


def _fastest(measured: Iterable[tuple[Candidate, float]], positions: Mapping[Candidate, int]) -> int | None:
    """The position of the fastest measured candidate that is in `positions`, or None."""
    offered = [(time, positions[candidate]) for candidate, time in measured if candidate in positions]
    return min(offered)[1] if offered else None


def nearest(problem: Problem, table: Table) -> list[Problem]:
    """The measured problems of the target within REACH that are ALIKE, nearest first.  At equal distance, the same kind and dtype
    come first."""

    def distance(other: Problem) -> float:
        pairs = ((problem.batch, other.batch), (problem.m, other.m), (problem.n, other.n), (problem.k, other.k))
        return math.hypot(*[math.log2(max(1, a) / max(1, b)) for a, b in pairs])

    def alike(compared: Problem) -> tuple[str, str, str]:
        return ALIKE.get(compared.kind, compared.kind), ALIKE.get(compared.dtype, compared.dtype), compared.arch

    same = [p for p in table if alike(p) == alike(problem)]
    near = [p for p in same if distance(p) <= REACH]
    return sorted(
        near, key=lambda p: (distance(p), p.kind != problem.kind, p.dtype != problem.dtype, p.batch, p.m, p.n, p.k, p.kind, p.dtype)
    )
