"""GPU architectures for which a bundle can be built, with the limits that lowering without such a GPU needs.  Imports no torch.

Limits per multiprocessor and block: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
Multiprocessors, caches and memory of the named GPU: its datasheet or architecture whitepaper.  `tensor_flops` comes from there
too: dense half precision operations, divided by multiprocessors and clock.

To cross-compile for a new architecture, add a row to ARCHES.  A capture on the GPU itself needs no row.  Names have no suffix:
Triton compiles sm_120 as sm_120a, and the runtime compares architectures without "a" and "f".  cgcompile's PTX is assembled without
a suffix.  Matrix products use the cost model until tests/bench/tuning has measured them on such a GPU
(`offline/tuning/sm_120.json`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BuildError
from .instruction_sets import LEVELS

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Arch:
    """A target architecture and a typical GPU of it.  Memory sizes are in bytes.  `shared_sm`: shared memory of a multiprocessor,
    for all its blocks.  `shared_block`: shared memory of a block without opt-in.  `tensor_flops`: half precision operations of
    the tensor cores per cycle and multiprocessor; a multiply-add counts as two."""

    name: str
    gpu: str
    multiprocessors: int
    shared_sm: int
    threads_sm: int
    l2: int
    memory: int
    tensor_flops: int
    source: str
    shared_block: int = 48 * KIB
    registers: int = 64 * KIB
    threads_block: int = 1024
    warp: int = 32

    @property
    def shared_optin(self) -> int:
        """The largest shared memory that a block can opt in to.  The driver reserves 1 KiB per block."""
        return self.shared_sm - KIB

    @property
    def capability(self) -> int:
        """The compute capability as Triton writes it: 90 for 9.0."""
        return int(self.name.removeprefix("sm_"))

    @property
    def major(self) -> int:
        return self.capability // 10

    @property
    def minor(self) -> int:
        return self.capability % 10


ARCHES = (
    Arch("sm_80", "NVIDIA A100", 108, 164 * KIB, 2048, 40 * MIB, 80 * GIB, 2048, "A100 80GB SXM datasheet"),
    Arch("sm_86", "NVIDIA A10", 72, 100 * KIB, 1536, 6 * MIB, 24 * GIB, 1024, "A10 datasheet, GA102 whitepaper"),
    Arch("sm_89", "NVIDIA L40S", 142, 100 * KIB, 1536, 96 * MIB, 48 * GIB, 1024, "L40S datasheet, Ada whitepaper"),
    Arch("sm_90", "NVIDIA H200", 132, 228 * KIB, 2048, 60 * MIB, 141 * GIB, 4096, "H200 datasheet, Hopper whitepaper"),
    Arch("sm_100", "NVIDIA B200", 148, 228 * KIB, 2048, 126 * MIB, 180 * GIB, 8192, "B200 datasheet, Blackwell brief"),
    Arch(
        "sm_120", "NVIDIA RTX PRO 6000", 188, 100 * KIB, 1536, 128 * MIB, 96 * GIB, 1024,
        "RTX PRO 6000 datasheet, RTX Blackwell whitepaper",
    ),
)  # fmt: skip


def arch(name: str) -> Arch:
    """Returns the row of target `name`, such as "sm_90".  Raises target-unavailable."""
    for row in ARCHES:
        if row.name == name:
            return row
    raise BuildError(
        "target-unavailable",
        f"target {name!r}: no such architecture",
        f"there are {', '.join(row.name for row in ARCHES)}; cpu, {', '.join(row.name for row in LEVELS)}",
    )


def capability_of(target: str) -> tuple[int, int]:
    """Returns the compute capability of `target`, or that of the oldest architecture if no row has this name."""
    arch = next((row for row in ARCHES if row.name == target), ARCHES[0])
    return arch.major, arch.minor
