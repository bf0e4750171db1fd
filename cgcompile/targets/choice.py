"""The options of a build: one record for `cgcompile.build`, `cgcompile.check`, the command line and the manifest.  Chooses target
and recorder on this machine.  Imports torch only if a CUDA driver is installed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cgbundle.cpu.machine import processor_flags

from ..errors import BuildError
from ..export.paths import MAX_PATHS
from ..model.declared_sizes import SizesOption
from ..util.progress import Watcher, silent
from .architectures import arch
from .instruction_sets import check_level, level_of
from .requirements import has_driver

if TYPE_CHECKING:
    import torch

DEFAULT_LOWERING = "inductor"
"""The default of --lower, and the first lowering that --autotune tries."""

PROVE_BUDGET = 120.0
"""Seconds that interpreting the int_keys of a cross-compiled bundle may take."""

MAX_KEYS = 64
"""Default maximum number of int_keys.  Each int_key costs runs of the model and a self-test, and on a GPU a recording."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a model is built: the keyword parameters of `build`, whose docstring describes them.  `check` has a part of them."""

    sizes: SizesOption = ()
    out: str | os.PathLike[str] | None = None
    target: str = "auto"
    strict: bool = False
    allow: Sequence[str] = ()
    lower: str = DEFAULT_LOWERING
    specialize: str = "size"
    record: str = "auto"
    prove: str = "interpret"
    prove_budget: float = PROVE_BUDGET
    autotune: bool = False
    autotune_timeout: float | None = None
    train: bool = False
    fallback_ops: Sequence[str] = ()
    standalone: bool | None = None
    force: bool = False
    max_keys: int = MAX_KEYS
    max_paths: int = MAX_PATHS
    donations: Sequence[tuple[str, str]] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    world: int | None = None
    split: str | None = None
    context: int | None = None
    lanes: Sequence[int] | str = ()
    chunk: Sequence[int] | str = ()
    dtype: str | None = None
    weights: str | None = None
    adapters: int = 0
    adapter_rank: int | None = None
    progress: Watcher = silent

    @property
    def targets(self) -> list[str]:
        """The targets that `target` names, separated by commas."""
        return [name.strip() for name in self.target.split(",")]

    def of_folders(self) -> dict[str, Any]:
        """Returns the values of the options that only the folder of a language model has, by option name."""
        return {
            "--context": self.context, "--lanes": self.lanes, "--dtype": self.dtype, "--weights": self.weights,
            "--chunk": self.chunk, "--adapters": self.adapters, "--adapter-rank": self.adapter_rank,
        }  # fmt: skip

    def of_models(self) -> dict[str, Any]:
        """Returns the values of the options that the folder of a language model does not have, by option name."""
        return {
            "--sizes": self.sizes, "--train": self.train, "--world": self.world, "--split": self.split,
            "donations": self.donations, "state": self.state,
        }  # fmt: skip

    def recorded(self, recorder: str) -> dict[str, str]:
        """Returns the options for the provenance of a manifest.  `recorder`: as in `choice.Chosen`."""
        named = {
            "target": self.target, "lower": self.lower, "specialize": self.specialize, "strict": str(self.strict).lower(),
        }  # fmt: skip
        if recorder == "cross-compile":
            named |= {"record": recorder, "prove": self.prove}
            named |= {} if self.prove == "none" else {"prove_budget": f"{self.prove_budget:g}"}
        others = {
            "world": None if self.world is None else str(self.world),
            "split": self.split,
            "autotune": "true" if self.autotune else None,
            "autotune_timeout": None if self.autotune_timeout is None else f"{self.autotune_timeout:g}",
            "standalone": None if self.standalone is None else str(self.standalone).lower(),
            "train": "true" if self.train else None,
            "fallback_ops": ", ".join(self.fallback_ops) or None,
        }
        return named | {name: value for name, value in others.items() if value is not None}


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


def choose(options: Options) -> Chosen:
    """Returns the target and recorder of a build.  The recorder for the GPU of this machine is "capture"; for other architectures,
    or with record="cross-compile", "cross-compile".  Raises target-unavailable, and option-invalid for an unknown option value."""
    chosen = _chosen(options)
    if options.standalone and chosen.recorder != "host":
        reason = "a bundle for a GPU needs torch's libraries for operations on the host alone"
        raise BuildError("target-unavailable", f"standalone: {reason}", "leave --standalone out, or give --target cpu")
    return chosen


def _chosen(options: Options) -> Chosen:
    for name, value, choices in (
        ("lower", options.lower, LOWERINGS),
        ("specialize", options.specialize, SPECIALIZE),
        ("record", options.record, RECORDERS),
        ("prove", options.prove, PROVE),
    ):
        if value not in choices:
            raise BuildError("option-invalid", f"{name} {value!r}: expected one of {', '.join(choices)}")
    target, autotune = options.target, options.autotune
    if autotune and options.lower != DEFAULT_LOWERING:
        problem = f"--autotune tries every lowering, and --lower is {options.lower}"
        raise BuildError("option-invalid", problem, "leave one of them out")
    level = level_of(target)
    if level is not None:
        check_level(level, os.uname().machine, processor_flags())
    if level is not None or target == "cpu":
        return _cpu(target, options)
    local_arch = _here()
    if target not in ("auto", "cuda", local_arch):
        arch(target)  # raises if there is no such architecture
    if target == "auto" and not local_arch and options.record != "cross-compile":
        return _cpu("cpu", options)
    architecture = local_arch if target in ("auto", "cuda") else target
    if not architecture:
        raise BuildError(
            "target-unavailable",
            f"target {target}: there is no GPU on this machine",
            "name the GPU that the bundle is for: --target sm_90 (H100, H200), sm_80 (A100), ...",
        )
    if architecture == local_arch and options.record != "cross-compile":
        if autotune:
            _expect("specialize", options.specialize, "size", "--autotune lowers every size for itself", "leave --specialize out")
        return Chosen(target=architecture, recorder="capture", runs_here=True)
    if options.record == "capture":
        raise BuildError(
            "target-unavailable",
            f"target {target}: this machine {f'has {local_arch}' if local_arch else 'has no GPU'}, and a capture needs this GPU",
            "leave --record out: the bundle is then cross-compiled",
        )
    return _cross_compile(architecture, options, runs_here=architecture == local_arch)


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


def _cpu(target: str, options: Options) -> Chosen:
    reason = "the cpu target has one lowering, inductor"
    if options.autotune:
        raise BuildError("target-unavailable", f"autotune: {reason}", "leave --autotune out, or build for a GPU")
    _expect("lower", options.lower, "inductor", reason, "leave --lower out, or build for a GPU")
    reason = "the cpu target always has one lowering for all sizes"
    _expect("specialize", options.specialize, "size", reason, "leave --specialize out")
    _expect("record", options.record, "auto", "the cpu target records nothing", "leave --record out, or build for a GPU")
    return Chosen(target=target, recorder="host", runs_here=True)


def _cross_compile(architecture: str, options: Options, *, runs_here: bool) -> Chosen:
    arch(architecture)  # raises if ARCHES lacks the GPU of this machine
    subject = f"cross-compiling for {architecture}"
    elsewhere = f"or build on a machine with a GPU of {architecture}"
    if options.autotune:
        text = f"autotune: {subject} cannot run kernels, so it cannot time them"
        raise BuildError("target-unavailable", text, f"leave --autotune out, {elsewhere}")
    reason = f"{subject} has one lowering, inductor with everything in Triton"
    _expect("lower", options.lower, "inductor", reason, f"leave --lower out, {elsewhere}")
    _expect("specialize", options.specialize, "size", f"{subject} lowers every size for itself", "leave --specialize out")
    return Chosen(target=architecture, recorder="cross-compile", runs_here=runs_here)


def _expect(option: str, value: str, only: str, reason: str, hint: str) -> None:
    if value != only:
        raise BuildError("target-unavailable", f"{option} {value!r}: {reason}", hint)
