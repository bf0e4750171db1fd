"""What this machine's processor can do: asked before code for it runs, of the cpu target or of host regions beside a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..errors import MachineError


def check_features(features: Iterable[str]) -> None:
    """Raises wrong-machine unless this processor has all of `features`, flags as in /proc/cpuinfo."""
    wanted = set(features)
    missing = sorted(wanted - processor_flags()) if wanted else []
    if missing:
        raise MachineError(
            "wrong-machine",
            f"this processor lacks {', '.join(missing)}, which the bundle's code uses",
            "build the bundle on this kind of machine",
        )


def processor_name() -> str:
    """The model of the first processor, else the machine's kind."""
    return _first("model name") or os.uname().machine


def processor_flags() -> frozenset[str]:
    """The flags of the first processor (empty where they are not known)."""
    return frozenset(_first("flags", "Features").split())


def _first(*names: str) -> str:
    """The first of these entries in /proc/cpuinfo; "" where there is no such file or entry."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith(names)), "")
    except FileNotFoundError:
        return ""
