"""Reports for each PyTorch operator whether a target supports it.  Only the operator's name counts.  The arguments in a model can
change the result; `cgcompile check` examines them.

Private interfaces (torch 2.11, 2.13): `torch._C._dispatch_get_all_op_names` and `_dispatch_has_kernel_for_dispatch_key`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..pipeline.api import with_torch
from ..targets.choice import asks_torch, recorder_for
from ..targets.requirements import check_packages
from ..util.progress import Watcher, silent

KINDS = {
    "yes": "compiled, and on a GPU part of a graph",
    "parts": "made of other operators: these decide",
    "some": "supported with some arguments; `cgcompile check` examines those of a model",
    "host": "runs on the host, between graphs",
    "no": "refused",
}
"""The possible results for an operator."""

LEFT_OUT = ("_foreach", "_fused", "_amp_", "_test", "_nested", "_sparse", "_cudnn", "_mkldnn", "_mps", "_miopen", "_thnn", "_cslt",
            "cudnn", "mkldnn", "miopen", "mps", "fbgemm", "sparse", "quantized", "_foobar")  # fmt: skip
"""Prefixes of operators for one library, for training, or for tensors that are not dense.  torch.export emits none of them."""

GENERATOR = "a bundle has no generator for it: pass the random tensor as an input"
PAIRS = "of complex numbers that the program computes, not of inputs and results"
ON_HOST = "no Triton kernel: keep it on the host with --fallback-op, or build where the GPU is"


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorKind:
    """An operator without its overloads, such as "aten.relu"; `kind` is a key of KINDS; `why` is the reason, or ""."""

    name: str
    kind: str
    why: str


def operators(target: str, progress: Watcher | None = None) -> tuple[OperatorKind, ...]:
    """Returns all PyTorch operators that a program may call, by name.  `target`: as for `check`.  `progress`: gets an event when
    torch is imported.  Raises target-unavailable, extra-missing."""
    check_packages("host")  # the packages for recording are not needed here
    if not asks_torch(target):
        recorder_for(target)
    with with_torch(progress or silent, "cgcompile.checks.operators"):
        recorder = recorder_for(target)
        classify: Callable[[Any], tuple[str, str]] = {
            "host": _compiled, "capture": _captured, "cross-compile": _cross_compiled(),
        }[recorder]  # fmt: skip
        return tuple([_merged(name, [classify(op) for op in overloads]) for name, overloads in _aten()])


def _aten() -> Iterator[tuple[str, list[Any]]]:
    """Yields the operators by name with their overloads, without in-place operators, which torch.export removes."""
    import torch

    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    for name in sorted({name.removeprefix("aten::").partition(".")[0] for name in registered}):
        if name.endswith(("_", "_out")) or "backward" in name or name.startswith(LEFT_OUT):
            continue
        packet = getattr(torch.ops.aten, name)
        overloads = [getattr(packet, overload) for overload in packet.overloads() if "out" not in overload]
        if registered_overloads := [op for op in overloads if op.name() in registered]:
            yield f"aten.{name}", registered_overloads


def _merged(name: str, verdicts: list[tuple[str, str]]) -> OperatorKind:
    """Combines the (kind, reason) of the overloads."""
    kinds = {kind for kind, _ in verdicts}
    if kinds == {"yes", "parts"}:
        kinds = {"yes"}
    kind = kinds.pop() if len(kinds) == 1 else "some"
    kinds_of_reasons = [kind] if kind != "some" else [*KINDS][::-1]  # reasons for limits come before remarks on "yes"
    why = next((why for wanted in kinds_of_reasons for overload_kind, why in verdicts if why and overload_kind == wanted), "")
    return OperatorKind(name=name, kind=kind, why=why)


def _common(op: Any) -> tuple[str, str] | None:
    """Returns (kind, reason) if it is the same for every target, else None."""
    import torch

    from ..transforms.rng.rewrite import supported

    if op in supported():
        return "yes", "numbers of the program's own generator, not PyTorch's"
    if torch.Tag.nondeterministic_seeded in op.tags:
        if any(argument.name.startswith("dropout") for argument in op._schema.arguments):
            return "some", f"with dropout: {GENERATOR}"
        return "no", GENERATOR
    return None


def _compiled(op: Any) -> tuple[str, str]:
    """Returns (kind, reason) for CPUs, where operators that Inductor does not compile call libtorch."""
    return _common(op) or (("parts", "") if _is_composite(op) else ("yes", ""))


def _captured(op: Any) -> tuple[str, str]:
    """Returns (kind, reason) for capturing on a GPU, which also captures kernels of PyTorch's libraries."""
    return _common(op) or _uncapturable(op) or (("parts", "") if _is_composite(op) else ("yes", ""))


def _cross_compiled() -> Callable[[Any], tuple[str, str]]:
    """Returns a function that returns (kind, reason) for cross-compiling: every operator must become Triton kernels."""
    from ..offline.decompose.complex_numbers import RULES
    from ..offline.decompose.decompositions import REPLACED, decompositions
    from ..offline.lower.coverage import FREE, chooses, falls_back

    table = decompositions()

    def classify(op: Any) -> tuple[str, str]:
        if verdict := _common(op) or _uncapturable(op):
            return verdict
        if op in FREE:
            return "yes", ""
        if not falls_back(op):
            return ("some", "") if chooses(op) else ("yes", "")
        if op in RULES:
            return "some", PAIRS
        if _is_composite(op):
            return "parts", ""
        decomposition = REPLACED.get(op) or table.get(op)
        if decomposition is None:
            return "no", ON_HOST
        # decompositions of cgcompile may not support all arguments
        return ("yes", "") if decomposition.__module__.startswith("torch.") else ("some", "")

    return classify


def _uncapturable(op: Any) -> tuple[str, str] | None:
    """Returns (kind, reason) for an operator that the rules of `check` keep out of graphs, else None."""
    import torch

    from ..checks.operators import INCOMPATIBLE, SYNCHRONIZING
    from ..checks.shapes import FIXES

    if (replacement := SYNCHRONIZING.get(str(op))) is not None:
        return "no", f"it waits for the GPU to say whether it failed{f': {replacement} does not' if replacement else ''}"
    name = str(op).removeprefix("aten.").partition(".")[0]
    if torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags:
        return (
            ("some", "with a mask its size depends on data") if name == "index" else ("host", FIXES.get(name, "it depends on data"))
        )
    if str(op) in INCOMPATIBLE or torch.Tag.cudagraph_unsafe in op.tags:
        return "host", "it cannot be captured"
    return None


def _is_composite(op: Any) -> bool:
    import torch

    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
