"""Targets: what `--target` may name, what this machine can build, and by which recorder.  Imports torch only where a GPU may be."""

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
"""What a build without --lower uses, and what --autotune tries first."""

LOWERINGS = ("eager", DEFAULT_LOWERING, "max-autotune")
SPECIALIZE = ("size", "shared")
RECORDERS = ("auto", "capture", "cross-compile")
CONDITIONALS = ("capture", "cross-compile")
"""The recorders that make conditional nodes of branches and loops."""

PROVE = ("interpret", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """`target`: "cpu", a level of processors such as "x86-64-v3", or an architecture such as "sm_90".

    `recorder`: "host" for processors, "capture" (the GPU is here), or "cross-compile" (it need not be).  `runs_here`: this
    machine can replay the bundle.
    """

    target: str
    recorder: str
    runs_here: bool

    @property
    def device(self) -> torch.device:
        """Where the model is exported, checked and compared: the GPU that is captured, else the CPU."""
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
    """What is built, and how.  A GPU that is here is captured; every other architecture, or any with record="cross-compile", is
    cross-compiled.  Raises target-unavailable, and option-invalid for a word that no option has."""
    chosen = _chosen(target, lower, specialize, record, prove, autotune)
    if standalone and chosen.recorder != "host":
        reason = "a bundle for a GPU needs torch's libraries for operations on the host alone"
        raise BuildError("target-unavailable", f"standalone: {reason}", "leave --standalone out, or give --target cpu")
    return chosen


def _chosen(target: str, lower: str, specialize: str, record: str, prove: str, autotune: bool) -> Chosen:
    for name, value, known in (
        ("lower", lower, LOWERINGS),
        ("specialize", specialize, SPECIALIZE),
        ("record", record, RECORDERS),
        ("prove", prove, PROVE),
    ):
        if value not in known:
            raise BuildError("option-invalid", f"{name} {value!r}: expected one of {', '.join(known)}")
    if autotune and lower != DEFAULT_LOWERING:
        raise BuildError("option-invalid", f"--autotune tries every lowering, and --lower is {lower}", "leave one of them out")
    level = level_of(target)
    if level is not None:
        check_level(level, os.uname().machine, processor_flags())
    if level is not None or target == "cpu":
        return _cpu(target, lower, specialize, record, autotune)
    here = _here()
    if target not in ("auto", "cuda", here):
        arch(target)  # raises where there is no such architecture
    if target == "auto" and not here and record != "cross-compile":
        return _cpu("cpu", lower, specialize, record, autotune)
    wanted = here if target in ("auto", "cuda") else target
    if not wanted:
        raise BuildError(
            "target-unavailable",
            f"target {target}: there is no GPU on this machine",
            "name the GPU that the bundle is for: --target sm_90 (H100, H200), sm_80 (A100), ...",
        )
    if wanted == here and record != "cross-compile":
        if autotune:
            _expect("specialize", specialize, "size", "--autotune lowers every size for itself", "leave --specialize out")
        return Chosen(target=wanted, recorder="capture", runs_here=True)
    if record == "capture":
        raise BuildError(
            "target-unavailable",
            f"target {target}: this machine {f'has {here}' if here else 'has no GPU'}, and a capture needs this GPU",
            "leave --record out: the bundle is then cross-compiled",
        )
    return _cross_compile(wanted, lower, specialize, wanted == here, autotune)


def asks_torch(target: str) -> bool:
    """Whether torch has to be imported to know what `target` means here.  Raises target-unavailable for a name that no target can
    have."""
    return asks_gpu(target) and "torch" not in sys.modules


def is_cpu(target: str) -> bool:
    """Whether a target is this processor, or a level of processors."""
    return target == "cpu" or level_of(target) is not None


def asks_gpu(target: str) -> bool:
    """Whether CUDA has to be started to know what `target` means here: which GPU this machine has.  Raises target-unavailable for
    a name that no target can have."""
    if is_cpu(target):
        return False
    if target not in ("auto", "cuda") and not re.fullmatch(r"sm_\d+", target):
        arch(target)
    return has_driver()


def resolved(target: str) -> str:
    """What "auto" is on this machine: "cuda" where a GPU is, else "cpu".  Every other target is itself."""
    return ("cuda" if _here() else "cpu") if target == "auto" else target


def recorder_for(target: str) -> str:
    """The recorder of a build for `target` on this machine, "cuda" taken for a GPU that is here.  Raises target-unavailable."""
    target = resolved(target)
    if target == "cpu" or level_of(target) is not None:
        return "host"
    if target == "cuda" or target == _here():
        return "capture"
    arch(target)  # raises where there is no such architecture
    return "cross-compile"


def _here() -> str:
    """The architecture of this machine's GPU, or ""."""
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


def _cross_compile(wanted: str, lower: str, specialize: str, runs_here: bool, autotune: bool) -> Chosen:
    arch(wanted)  # raises for a GPU that is here, but whose properties nobody wrote down
    crossed = f"cross-compiling for {wanted}"
    elsewhere = f"or build on a machine with a GPU of {wanted}"
    if autotune:
        raise BuildError("target-unavailable", f"autotune: {crossed} can time no kernel", f"leave --autotune out, {elsewhere}")
    reason = f"{crossed} has one lowering, inductor with everything in Triton"
    _expect("lower", lower, "inductor", reason, f"leave --lower out, {elsewhere}")
    _expect("specialize", specialize, "size", f"{crossed} lowers every size for itself", "leave --specialize out")
    return Chosen(target=wanted, recorder="cross-compile", runs_here=runs_here)


def _expect(option: str, value: str, only: str, reason: str, hint: str) -> None:
    if value != only:
        raise BuildError("target-unavailable", f"{option} {value!r}: {reason}", hint)
