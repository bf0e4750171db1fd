"""Resolves `--target`, and chooses the recorder of a build on this machine.  Imports torch only if a CUDA driver is installed."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cgbundle.cpu.machine import processor_flags

from ..errors import BuildError
from .architectures import arch
from .instruction_sets import check_level, level_of
from .requirements import has_driver

if TYPE_CHECKING:
    import torch

DEFAULT_LOWERING = "inductor"
"""The default of --lower, and the first lowering that --autotune tries."""

LOWERINGS = ("eager", DEFAULT_LOWERING, "max-autotune")
SPECIALIZE = ("size", "shared")
RECORDERS = ("auto", "capture", "cross-compile")
CONDITIONALS = ("capture", "cross-compile")
"""The recorders that turn branches and loops into conditional nodes."""

PROVE = ("interpret", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The target and recorder of a build.

    `target`: "cpu", a level of processors such as "x86-64-v3", or an architecture such as "sm_90".  `recorder`: "host" for
    processors, "capture" for the GPU of this machine, else "cross-compile".  `runs_here`: this machine can replay the bundle.
    """

    target: str
    recorder: str
    runs_here: bool

    @property
    def device(self) -> torch.device:
        """The device on which the model is exported, checked and compared: the GPU of a capture, else the CPU."""
        import torch

        return torch.device("cuda", 0) if self.recorder == "capture" else torch.device("cpu")


def choose(
    target: str,
    lower: str,
    specialize: str = "size",
    record: str = "auto",
    prove: str = "interpret",
    *,
    standalone: bool = False,
    autotune: bool = False,
) -> Chosen:
    """Returns the target and recorder of a build.  The recorder for the GPU of this machine is "capture"; for other architectures,
    or with record="cross-compile", "cross-compile".  Raises target-unavailable, and option-invalid for an unknown option value."""
    chosen = _chosen(target, lower, specialize, record, prove, autotune)
    if standalone and chosen.recorder != "host":
        reason = "a bundle for a GPU needs torch's libraries for operations on the host alone"
        raise BuildError("target-unavailable", f"standalone: {reason}", "leave --standalone out, or give --target cpu")
    return chosen


def _chosen(target: str, lower: str, specialize: str, record: str, prove: str, autotune: bool) -> Chosen:
    for name, value, choices in (
        ("lower", lower, LOWERINGS),
        ("specialize", specialize, SPECIALIZE),
        ("record", record, RECORDERS),
        ("prove", prove, PROVE),
    ):
        if value not in choices:
            raise BuildError("option-invalid", f"{name} {value!r}: expected one of {', '.join(choices)}")
    if autotune and lower != DEFAULT_LOWERING:
        raise BuildError("option-invalid", f"--autotune tries every lowering, and --lower is {lower}", "leave one of them out")
    level = level_of(target)
    if level is not None:
        check_level(level, os.uname().machine, processor_flags())
    if level is not None or target == "cpu":
        return _cpu(target, lower, specialize, record, autotune)
    local_arch = _here()
    if target not in ("auto", "cuda", local_arch):
        arch(target)  # raises if there is no such architecture
    if target == "auto" and not local_arch and record != "cross-compile":
        return _cpu("cpu", lower, specialize, record, autotune)
    architecture = local_arch if target in ("auto", "cuda") else target
    if not architecture:
        raise BuildError(
            "target-unavailable",
            f"target {target}: there is no GPU on this machine",
            "name the GPU that the bundle is for: --target sm_90 (H100, H200), sm_80 (A100), ...",
        )
    if architecture == local_arch and record != "cross-compile":
        if autotune:
            _expect("specialize", specialize, "size", "--autotune lowers every size for itself", "leave --specialize out")
        return Chosen(target=architecture, recorder="capture", runs_here=True)
    if record == "capture":
        raise BuildError(
            "target-unavailable",
            f"target {target}: this machine {f'has {local_arch}' if local_arch else 'has no GPU'}, and a capture needs this GPU",
            "leave --record out: the bundle is then cross-compiled",
        )
    return _cross_compile(architecture, lower, specialize, architecture == local_arch, autotune)


def asks_torch(target: str) -> bool:
    """Whether torch must be imported to resolve `target` on this machine.  Raises target-unavailable for an unknown target."""
    return asks_gpu(target) and "torch" not in sys.modules


def is_cpu(target: str) -> bool:
    """Whether `target` is a CPU: this processor, or a level of processors."""
    return target == "cpu" or level_of(target) is not None


def asks_gpu(target: str) -> bool:
    """Whether resolving `target` needs CUDA: it is not a CPU, and there is a CUDA driver.  Raises target-unavailable for an unknown
    target."""
    if is_cpu(target):
        return False
    if target not in ("auto", "cuda") and not re.fullmatch(r"sm_\d+", target):
        arch(target)
    return has_driver()


def resolved(target: str) -> str:
    """Resolves "auto": "cuda" if this machine has a GPU, else "cpu".  Returns every other target unchanged."""
    return ("cuda" if _here() else "cpu") if target == "auto" else target


def recorder_for(target: str) -> str:
    """Returns the recorder of a build for `target` here.  "cuda" means a GPU of this machine.  Raises target-unavailable."""
    target = resolved(target)
    if target == "cpu" or level_of(target) is not None:
        return "host"
    if target == "cuda" or target == _here():
        return "capture"
    arch(target)  # raises if there is no such architecture
    return "cross-compile"


def _here() -> str:
    """Returns the architecture of this machine's GPU, or ""."""
    if "torch" not in sys.modules and not has_driver():
        return ""
    import torch

    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _cpu(target: str, lower: str, specialize: str, record: str, autotune: bool) -> Chosen:
    reason = "the cpu target has one lowering, inductor"
    if autotune:
        raise BuildError("target-unavailable", f"autotune: {reason}", "leave --autotune out, or build for a GPU")
    _expect("lower", lower, "inductor", reason, "leave --lower out, or build for a GPU")
    reason = "the cpu target always has one lowering for all sizes"
    _expect("specialize", specialize, "size", reason, "leave --specialize out")
    _expect("record", record, "auto", "the cpu target records nothing", "leave --record out, or build for a GPU")
    return Chosen(target=target, recorder="host", runs_here=True)


def _cross_compile(architecture: str, lower: str, specialize: str, runs_here: bool, autotune: bool) -> Chosen:
    arch(architecture)  # raises if ARCHES lacks the GPU of this machine
    subject = f"cross-compiling for {architecture}"
    elsewhere = f"or build on a machine with a GPU of {architecture}"
    if autotune:
        text = f"autotune: {subject} cannot run kernels, so it cannot time them"
        raise BuildError("target-unavailable", text, f"leave --autotune out, {elsewhere}")
    reason = f"{subject} has one lowering, inductor with everything in Triton"
    _expect("lower", lower, "inductor", reason, f"leave --lower out, {elsewhere}")
    _expect("specialize", specialize, "size", f"{subject} lowers every size for itself", "leave --specialize out")
    return Chosen(target=architecture, recorder="cross-compile", runs_here=runs_here)


def _expect(option: str, value: str, only: str, reason: str, hint: str) -> None:
    if value != only:
        raise BuildError("target-unavailable", f"{option} {value!r}: {reason}", hint)
