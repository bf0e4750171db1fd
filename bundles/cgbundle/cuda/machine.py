"""Whether this machine can run a bundle: asked before anything is put on the GPU."""

from __future__ import annotations

from ..errors import MachineError
from ..format.schema import Target
from . import driver
from .driver import Context


def check_driver(target: Target) -> None:
    """Raises library-missing, wrong-machine or driver-too-old unless there is a driver, and one new enough."""
    if target.kind != "cuda":
        raise MachineError("wrong-machine", f"the bundle is for the {target.kind} target, not for a GPU")
    driver.require()
    found = driver.driver_version()
    if found < target.driver:
        raise MachineError(
            "driver-too-old",
            f"the bundle needs a driver for CUDA {_version(target.driver)}, this machine's is for {_version(found)}",
            "upgrade the NVIDIA driver, or build the bundle on this machine",
        )


def check_device(target: Target, context: Context) -> None:
    """Raises wrong-architecture unless the GPU is of the architecture whose machine code the bundle holds."""
    if context.arch != target.arch.rstrip("af"):
        raise MachineError(
            "wrong-architecture",
            f"the bundle is for {target.arch}, device {context.index} ({context.name}) is {context.arch}",
            f"build the bundle with --target {context.arch}",
        )


def _version(number: int) -> str:
    """13000 as "13.0"."""
    return f"{number // 1000}.{number % 1000 // 10}"
