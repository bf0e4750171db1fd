"""Which configuration a matrix product or convolution gets: by a table of measurements, or by a model of cost.  Pure Python.  A
configuration is the size of the block that one program computes, the depth of its pipeline, and its warps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...targets.architectures import Arch

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int8": 1, "int32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes of an element."""

ALIKE = {"addmm": "mm", "baddbmm": "bmm", "bfloat16": "float16"}
"""Kinds and dtypes that take the same time: the addend is read when the result is written, and tensor cores run at one rate."""

REACH = 2.0
"""How far a measured problem may lie from the one at hand: Euclidean distance of (batch, m, n, k) in powers of two."""

LATENCY = 700.0
"""Cycles from asking global memory (L2) for a block until it can be multiplied."""

L2_BYTES = 64.0
"""Bytes per cycle that one multiprocessor gets from L2."""

LAUNCHED = 2000.0
"""Cycles to start a wave of blocks, fill the pipeline's addresses and write the result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """`batch` products of (m, k) by (k, n).  `kind`: "mm", "addmm", "bmm", "baddbmm" or "conv"; `dtype`: of the factors.  For a
    convolution m counts output positions, n output channels of a group, and batch the groups.  k is the input channels of a group
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
    """A configuration: a program computes block_m x block_n in steps of block_k, and loads `stages` blocks ahead.  `group` rows of
    programs run together for the sake of the cache (0: the kernel has no such parameter)."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    group: int


Table = Mapping[Problem, Sequence[tuple[Candidate, float]]]
"""Measured microseconds per problem."""


def choose(problem: Problem, candidates: Sequence[Candidate], arch: Arch, table: Table | None = None) -> tuple[int, str]:
    """The best candidate's position, and how it was found: "only" (there was no other), "table" (this problem was measured),
    "nearest" (one close to it was), "heuristic" (the model of cost).  Raises ValueError when none fits the target."""
    fitting = [index for index, candidate in enumerate(candidates) if fits(problem, candidate, arch)]
    if not fitting:
        raise ValueError(f"no configuration of {len(candidates)} fits {arch.name}: {problem}")
    if len(candidates) == 1:
        return 0, "only"
    known = {candidates[index]: index for index in reversed(fitting)}
    if table:
        if problem in table and (position := _fastest(table[problem], known)) is not None:
            return position, "table"
        for near in nearest(problem, table):
            if (position := _fastest(table[near], known)) is not None:
                return position, "nearest"
    return min(fitting, key=lambda index: (cost(problem, candidates[index], arch), index)), "heuristic"


def measured(problem: Problem, table: Table) -> list[Candidate]:
    """What the table has of this problem, else of the nearest one, in blocks no larger than the problem: also what Inductor does
    not offer."""
    near = [problem] if problem in table else nearest(problem, table)[:1]
    largest = [1 << max(4, (size - 1).bit_length()) for size in (problem.m, problem.n, problem.k)]
    rows = [candidate for neighbour in near for candidate, _ in table[neighbour]]
    return [row for row in rows if all(a <= b for a, b in zip((row.block_m, row.block_n, row.block_k), largest, strict=True))]


def fits(problem: Problem, candidate: Candidate, arch: Arch) -> bool:
    """Whether the pipeline fits the shared memory of a block, and the result the registers (255 a thread)."""
    results = candidate.block_m * candidate.block_n / (32 * candidate.warps)
    return shared_bytes(problem, candidate) <= arch.shared_optin and results < 255


def shared_bytes(problem: Problem, candidate: Candidate) -> int:
    """Bytes of shared memory of a program: both factors' blocks, `stages` times."""
    rows = candidate.block_m + candidate.block_n
    return max(1, candidate.stages) * rows * candidate.block_k * ITEMSIZE[problem.dtype]


def cost(problem: Problem, candidate: Candidate, arch: Arch) -> float:
    """Estimated cycles, of ceil(k / block_k) steps per block, and as many blocks at a time as fit a multiprocessor.  A step takes
    what the tensor cores or L2 need for all of them, and at least the latency that the pipeline leaves uncovered.  A partly filled
    wave costs as much as a full one, and so does what a block computes beyond m and n."""
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
    """Operations per cycle and multiprocessor.  Half precision runs at the tensor cores' rate, float32 as three products of tf32 at
    half of it, other types at 256.  Small blocks reach less: a warp then has too few independent products.  From Hopper on, only
    groups of four warps and 64 rows reach the full rate, others about half."""
    rates = {"float16": 1.0, "bfloat16": 1.0, "float8_e4m3fn": 2.0, "float8_e5m2": 2.0, "int8": 2.0, "float32": 1 / 6}
    if problem.dtype not in rates:
        return 256.0
    wide = arch.major < 9 or arch.major == 12 or (candidate.block_m >= 64 and candidate.warps % 4 == 0)
    results = candidate.block_m * candidate.block_n / (32 * candidate.warps)
    filled = min(1.0, results / 32) * (1.0 if results <= 128 else 0.8)
    busy = min(1.0, (0.4 + 0.15 * candidate.warps) * _resident(problem, candidate, arch))
    return arch.tensor_flops * rates[problem.dtype] * (1.0 if wide else 0.5) * filled * busy


def _resident(problem: Problem, candidate: Candidate, arch: Arch) -> int:
    """Blocks that one multiprocessor runs at a time, by shared memory, threads and registers."""
    threads = 32 * candidate.warps
    per_thread = 48 + candidate.block_m * candidate.block_n / threads
    by_shared = arch.shared_sm // (shared_bytes(problem, candidate) + 1024)
    by_registers = int(arch.registers // (threads * min(255.0, per_thread)))
    return max(1, min(by_shared, arch.threads_sm // threads, by_registers, 32))


def _fastest(measured: Iterable[tuple[Candidate, float]], known: Mapping[Candidate, int]) -> int | None:
    """The position of the fastest measured candidate among those on offer."""
    offered = [(time, known[candidate]) for candidate, time in measured if candidate in known]
    return min(offered)[1] if offered else None


def nearest(problem: Problem, table: Table) -> list[Problem]:
    """Measured problems within REACH of the same target that run ALIKE, nearest first, then by the same kind and dtype."""

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
