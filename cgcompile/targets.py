"""Targets: what `--target` may name, and what this machine can build."""

from __future__ import annotations

import torch

from .errors import TargetUnavailable

LOWERINGS = ("eager", "inductor", "max-autotune")


def choose(target: str, lower: str) -> str:
    """ "cpu", or an architecture such as "sm_90".  Raises TargetUnavailable."""
    if lower not in LOWERINGS:
        raise TargetUnavailable(f"lower {lower!r}: expected one of {', '.join(LOWERINGS)}")
    if target == "cpu":
        return _cpu(lower)
    if target not in ("auto", "cuda") and not target.startswith("sm_"):
        raise TargetUnavailable(f"target {target!r}: expected auto, cpu, cuda, or an architecture such as sm_90")
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        here = f"sm_{major}{minor}"
        if target in ("auto", "cuda", here):
            return here
        raise TargetUnavailable(f"target {target}: this machine's GPU is {here}")
    if target == "auto":
        return _cpu(lower)
    raise TargetUnavailable(
        f"target {target}: there is no GPU on this machine", "build with --target cpu, or on a machine with that GPU"
    )


def _cpu(lower: str) -> str:
    if lower != "inductor":
        raise TargetUnavailable(
            f"lower {lower!r}: the cpu target has one lowering, inductor", "leave --lower out, or build for a GPU"
        )
    return "cpu"
