"""What this machine's processor can do: asked before code for it runs, of the cpu target or of host regions beside a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..errors import MachineError

HINT = "build the bundle on this kind of machine, or for a level of processors: --target x86-64-v3 (all with AVX2), armv8-a"
"""For a bundle of the cpu target."""

BY_NAME_ALONE = frozenset((
    "rdrand", "rdseed", "rdpid", "clflushopt", "clwb", "cldemote", "fsgsbase", "pku", "xsave", "xsaveopt", "xsavec", "xsaves",
    "wbnoinvd",
))  # fmt: skip
"""Instructions that no compiler chooses by itself: code has them where its source names them, which that of a model never does.
A bundle names all that its compiler could have written."""

SVE_LENGTH = 51
"""prctl's PR_SVE_GET_VL (include/uapi/linux/prctl.h): aarch64's bytes of a vector in the low 16 bits."""


def check_features(features: Iterable[str], hint: str = "build the bundle on this kind of machine") -> None:
    """Raises wrong-machine, naming what is missing, unless this processor has all of `features` that code can use unasked."""
    wanted = set(features) - BY_NAME_ALONE
    missing = sorted(wanted - processor_flags()) if wanted else []
    if missing:
        raise MachineError("wrong-machine", f"this processor lacks {', '.join(missing)}, which the bundle's code uses", hint)


def processor_name() -> str:
    """The model of the first processor, else the machine's kind."""
    return _first("model name") or os.uname().machine


def processor_flags() -> frozenset[str]:
    """The flags of the first processor, as /proc/cpuinfo names them (empty where they are not known); and `sve256` where vectors of
    SVE have 256 bits: code may be compiled for one length alone."""
    flags = frozenset(_first("flags", "Features").split())
    return flags | {f"sve{8 * _vector_bytes()}"} if "sve" in flags else flags


def _vector_bytes() -> int:
    import ctypes  # aarch64 alone comes here

    return max(0, int(ctypes.CDLL(None).prctl(SVE_LENGTH, 0, 0, 0, 0))) & 0xFFFF


def _first(*names: str) -> str:
    """The first of these entries in /proc/cpuinfo; "" where there is no such file or entry."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith(names)), "")
    except FileNotFoundError:
        return ""
