"""Instruction sets: the levels of processors for which bundles are built, and the sets that compiled code needs.  The macros that
the compiler defines with the options of the code show these sets.  The name of a macro and the name in /proc/cpuinfo mostly differ
only in underscores and case; the tables here have the exceptions.  Sources: x86 psABI and arch/x86/include/asm/cpufeatures.h; Arm C
Language Extensions and Documentation/arch/arm64/elf_hwcaps.rst.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ..errors import BuildError

X86_64, AARCH64 = "x86_64", "aarch64"
"""The names of machines in os.uname."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """A level of the x86-64 psABI, or a version of the Arm architecture's A profile, by its name for -march.  `machine` is a name
    of os.uname, `features` are names in /proc/cpuinfo.  `vector_bits`: the width of vectors in Inductor's code (`cpp.simdlen`), 1
    for no vectors (SSE).
    """

    name: str
    machine: str
    features: tuple[str, ...]
    vector_bits: int


_V2 = ("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3")
_V3 = (*_V2, "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave")
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")

_ARM_V8 = ("asimd", "fp")
_ARM_V8_2 = (*_ARM_V8, "asimdrdm", "atomics", "crc32")

LEVELS = (
    Level(name="x86-64-v2", machine=X86_64, features=_V2, vector_bits=1),
    Level(name="x86-64-v3", machine=X86_64, features=_V3, vector_bits=256),
    Level(name="x86-64-v4", machine=X86_64, features=_V4, vector_bits=512),
    Level(name="armv8-a", machine=AARCH64, features=_ARM_V8, vector_bits=128),
    Level(name="armv8.2-a", machine=AARCH64, features=_ARM_V8_2, vector_bits=128),
)

COMMON = ("x86-64-v3", "armv8.2-a", "x86-64-v2", "armv8-a")
"""Levels for host regions of cross-compiled bundles, the best first.  All hosts of GPUs from sm_80 on have AVX2, or Arm's atomics.
The lower levels are for builds on machines without AVX2 or these atomics."""

SWITCHED_OFF = ("-mno-sse4a", "-mno-xop", "-mno-fma4", "-mno-tbm")
"""Options that turn sets off after -march=native: only processors of one vendor have them, and they make no code faster."""

UNUSED = frozenset({
    "adx", "aes", "cldemote", "clflushopt", "clwb", "clzero", "enqcmd", "fsgsbase", "fxsr", "hreset", "invpcid", "kl", "lwp",
    "movdir64b", "movdiri", "mwaitx", "pconfig", "pku", "prefetchwt1", "prfchw", "ptwrite", "rdpid", "rdpru", "rdrnd", "rdseed",
    "rtm", "serialize", "sgx", "sha", "sha512", "shstk", "sm3", "sm4", "tsxldtrk", "uintr", "usermsr", "vaes", "waitpkg",
    "wbnoinvd", "widekl", "xsave", "xsavec", "xsaveopt", "xsaves",
})  # fmt: skip
"""x86: sets that -march=native turns on, but that compilers use only for intrinsics, which Inductor's code does not have:
cryptography, random numbers, cache control, saving registers, and instructions for operating systems.  (Processors without
`prfchw` ignore its instruction.)"""

X86_NAMES = {"sse3": "pni", "lzcnt": "abm", "bmi": "bmi1", "pclmul": "pclmulqdq", "lahfsahf": "lahf_lm"}
"""Macros, in lower case, whose names differ in /proc/cpuinfo."""

ARM_NAMES = {
    "__ARM_NEON": "asimd", "__ARM_FEATURE_ATOMICS": "atomics", "__ARM_FEATURE_BF16_SCALAR_ARITHMETIC": "bf16",
    "__ARM_FEATURE_BF16_VECTOR_ARITHMETIC": "bf16", "__ARM_FEATURE_COMPLEX": "fcma", "__ARM_FEATURE_CRC32": "crc32",
    "__ARM_FEATURE_DOTPROD": "asimddp", "__ARM_FEATURE_FP16_FML": "asimdfhm", "__ARM_FEATURE_FP16_SCALAR_ARITHMETIC": "fphp",
    "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "asimdhp", "__ARM_FEATURE_FRINT": "frint", "__ARM_FEATURE_JCVT": "jscvt",
    "__ARM_FEATURE_MATMUL_INT8": "i8mm", "__ARM_FEATURE_MOPS": "mops", "__ARM_FEATURE_QRDMX": "asimdrdm",
    "__ARM_FEATURE_RCPC": "lrcpc", "__ARM_FEATURE_SVE": "sve", "__ARM_FEATURE_SVE2": "sve2",
    "__ARM_FEATURE_SVE2_BITPERM": "svebitperm", "__ARM_FEATURE_SVE2p1": "sve2p1", "__ARM_FEATURE_SVE_BF16": "svebf16",
    "__ARM_FEATURE_SVE_MATMUL_FP32": "svef32mm", "__ARM_FEATURE_SVE_MATMUL_FP64": "svef64mm",
    "__ARM_FEATURE_SVE_MATMUL_INT8": "svei8mm",
}  # fmt: skip
"""aarch64: the macros of sets that compilers use without intrinsics.  Cryptography, random numbers and memory tags are excluded."""

SVE_BITS = "__ARM_FEATURE_SVE_BITS"
"""aarch64: the vector length that the code needs, 0 for any."""


def level_of(name: str) -> Level | None:
    return next((row for row in LEVELS if row.name == name), None)


def common_level(machine: str, flags: Collection[str]) -> Level | None:
    """Returns the level of host regions in cross-compiled bundles: the first of COMMON that this machine supports, or None."""
    rows = [row for name in COMMON for row in LEVELS if row.name == name]
    return next((row for row in rows if not foreign(row, machine, flags)), None)


def foreign(level: Level, machine: str, flags: Collection[str]) -> str:
    """Returns why a machine with these `flags` of /proc/cpuinfo cannot run code of this level, or "" if it can."""
    if machine != level.machine:
        return f"the code is for {level.machine}, and this machine is {machine}"
    missing = sorted(set(level.features) - set(flags))
    return f"this processor lacks {', '.join(missing)}" if missing else ""


def check_level(level: Level, machine: str, flags: Collection[str]) -> None:
    """Raises target-unavailable if `foreign` returns a reason."""
    if why := foreign(level, machine, flags):
        hint = "name a lower level, or build on another machine" if machine == level.machine else ""
        raise BuildError("target-unavailable", f"target {level.name}: {why}; a build verifies its code by running it", hint)


def needed(
    ask: Callable[..., Mapping[str, str]], options: Collection[Sequence[str]], machine: str, flags: Collection[str]
) -> tuple[str, ...]:
    """Returns the sets among `flags` that code compiled with these lists of `options` needs, sorted.  `flags`: the sets in
    /proc/cpuinfo.  `ask`: returns the macros for options, as `macros` does.  Raises compiler-failed."""
    plain = ask()
    features: set[str] = set()
    for option in options:
        defined = ask(*option)
        turned_on = {name: value for name, value in defined.items() if name not in plain or name == SVE_BITS}
        if machine == X86_64:
            features |= _x86(turned_on, flags)
        else:
            features |= _arm(defined, flags)
    return tuple(sorted(features))


def _x86(turned_on: Mapping[str, str], flags: Collection[str]) -> set[str]:
    by_letters = {_letters(flag): flag for flag in flags}
    names = {_letters(macro) for macro in turned_on} - {_letters(name) for name in UNUSED}
    return {flag for name in names if (flag := by_letters.get(_letters(X86_NAMES.get(name, name))))}


def _arm(defined: Mapping[str, str], flags: Collection[str]) -> set[str]:
    """Returns the sets of the macros `defined`.  They include `asimd`, which is on without any option."""
    length = int(defined.get(SVE_BITS, "0") or 0)
    return ({ARM_NAMES[macro] for macro in defined if macro in ARM_NAMES} & set(flags)) | ({f"sve{length}"} if length else set())


def _letters(name: str) -> str:
    return name.replace("_", "").lower()


def macros(compiler: str, *options: str) -> dict[str, str]:
    """Returns the macros that the compiler defines with these options.  Raises compiler-failed if it does not print them."""
    command = [compiler, *options, "-dM", "-E", "-x", "c++", os.devnull]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        complaint = listed.stderr if listed.returncode else ""
        definitions = [line.split(None, 2)[1:] for line in listed.stdout.splitlines() if line.startswith("#define ")]
    except (OSError, subprocess.TimeoutExpired) as error:
        definitions, complaint = [], str(error)
    if not definitions or complaint:
        why = (complaint.strip() or "it lists no macros").splitlines()[0]
        raise BuildError(
            "compiler-failed",
            f"{compiler} does not say what its options {' '.join(options) or '(none)'} mean: {why}",
            "without that, a bundle could run where the processor lacks an instruction; set CXX to GCC or Clang",
        )
    return {row[0]: row[1] if len(row) > 1 else "" for row in definitions}
