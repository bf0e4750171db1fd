"""`cgcompile doctor` and `cgcompile targets`: show what is installed, and which targets can be built and run here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..output import record, show, size, table, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from cgcompile.tools.environment import Environment, Part, TargetHere

RECORDERS = {"host": "yes", "capture": "yes, captured", "cross-compile": "yes, cross-compiled"}
"""Text for each recorder: built with the GPU of this machine, or without one."""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """Show what is installed, and what can be built and run here.

    For every target that this machine cannot build or run, this shows the
    reason, and what to install. It imports nothing, and uses no GPU.
    """
    from cgcompile.tools.environment import environment
    from cgcompile.util.content_cache import cache_place

    machine = environment()
    if as_json:
        cache = {"path": str(cache_place())}
        write_json(_without_targets(machine) | {"cache": cache, "targets": [_plain(target) for target in machine.targets]})
        return
    show(record([
        *[(part.name, _part(part)) for part in machine.parts],
        ("processor", machine.processor),
        ("GPU", _gpus(machine)),
        ("cache", f"{cache_place()} (`cgcompile cache dir` counts what is in it)"),
    ]))  # fmt: skip
    show("")
    show(_table(machine.targets))
    show("")
    for line in _reasons(machine.targets):
        show(line)


def targets(as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """List the targets, and which of them work on this machine.

    `auto`, the default of a build, is cuda if this machine has a GPU, else
    cpu. `cgcompile doctor` shows the reasons.
    """
    from cgcompile.tools.environment import environment

    known_targets = environment().targets
    if as_json:
        write_json([_plain(target) for target in known_targets])
        return
    rows = [(target.name, target.about, "no" if target.not_built else "yes", _run(target)) for target in known_targets]
    show(table(("target", "for", "built here", "run here"), rows))


def _without_targets(machine: Environment) -> dict[str, Any]:
    plain = asdict(machine)
    del plain["targets"]
    return plain


def _plain(target: TargetHere) -> dict[str, Any]:
    return {"built_here": not target.not_built, "run_here": not target.not_run} | asdict(target)


def _part(part: Part) -> str:
    return part.version or f"not installed ({part.use}): {part.fix}"


def _gpus(machine: Environment) -> list[str]:
    if not machine.gpus:
        return [f"none: {machine.gpus_missing}"]
    return [f"{gpu.name}, {gpu.arch}, {size(gpu.memory)}, driver for CUDA {machine.driver}" for gpu in machine.gpus]


def _table(known_targets: Sequence[TargetHere]) -> Table:
    rows = [(target.name, RECORDERS.get(target.recorder, "no"), _run(target)) for target in known_targets]
    return table(("target", "build here", "run here"), rows)


def _run(target: TargetHere) -> str:
    return "yes" if not target.not_run else "what needs no torch" if target.standalone else "no"


def _reasons(known_targets: Sequence[TargetHere]) -> list[str]:
    """Explains why targets cannot be built or run, and what to do: one line for each reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for target in known_targets:
        for action, reason in (("built", target.not_built), ("run", target.not_run)):
            if reason and not (action == "run" and reason == target.not_built):
                fix = f"; {target.fix}" if target.fix and (action == "built" or not target.not_built) else ""
                reasons.setdefault((action, reason.removeprefix(f"target {target.name}: ") + fix), []).append(target.name)
    return [f"not {action} here: {', '.join(names)}: {reason}" for (action, reason), names in reasons.items()]
