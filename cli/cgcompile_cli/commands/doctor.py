"""`cgcompile doctor` and `cgcompile targets`: what is installed here, and which targets can be built and run with it."""

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
"""What a recorder means for somebody who wants to build: on the GPU that is here, or without one."""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """Show what is installed, and what can be built and run here.

    For every target that cannot be built or run on this machine it says
    why, and what to install. Nothing is imported, and no GPU is used.
    """
    from cgcompile.tools.environment import environment
    from cgcompile.util.content_cache import cache_place

    found = environment()
    if as_json:
        cache = {"path": str(cache_place())}
        write_json(_without_targets(found) | {"cache": cache, "targets": [_plain(target) for target in found.targets]})
        return
    show(record([
        *[(part.name, _part(part)) for part in found.parts],
        ("processor", found.processor),
        ("GPU", _gpus(found)),
        ("cache", f"{cache_place()} (`cgcompile cache dir` counts what is in it)"),
    ]))  # fmt: skip
    show("")
    show(_table(found.targets))
    show("")
    for line in _reasons(found.targets):
        show(line)


def targets(as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """List what --target may name, and what of it works here.

    `auto`, the default of a build, is cuda where a GPU is here, else cpu.
    `cgcompile doctor` shows what the answers follow from.
    """
    from cgcompile.tools.environment import environment

    found = environment().targets
    if as_json:
        write_json([_plain(each) for each in found])
        return
    rows = [(each.name, each.about, "no" if each.not_built else "yes", _run(each)) for each in found]
    show(table(("target", "for", "built here", "run here"), rows))


def _without_targets(found: Environment) -> dict[str, Any]:
    plain = asdict(found)
    del plain["targets"]
    return plain


def _plain(each: TargetHere) -> dict[str, Any]:
    return {"built_here": not each.not_built, "run_here": not each.not_run} | asdict(each)


def _part(part: Part) -> str:
    return part.found or f"not installed ({part.use}): {part.fix}"


def _gpus(found: Environment) -> list[str]:
    if not found.gpus:
        return [f"none: {found.gpus_missing}"]
    return [f"{each.name}, {each.arch}, {size(each.memory)}, driver for CUDA {found.driver}" for each in found.gpus]


def _table(found: Sequence[TargetHere]) -> Table:
    rows = [(each.name, RECORDERS.get(each.recorder, "no"), _run(each)) for each in found]
    return table(("target", "build here", "run here"), rows)


def _run(each: TargetHere) -> str:
    return "yes" if not each.not_run else "what needs no torch" if each.standalone else "no"


def _reasons(found: Sequence[TargetHere]) -> list[str]:
    """Why targets cannot be built or run, and what to do: a line for those with the same reason."""
    told: dict[tuple[str, str], list[str]] = {}
    for each in found:
        for what, reason in (("built", each.not_built), ("run", each.not_run)):
            if reason and not (what == "run" and reason == each.not_built):
                fix = f"; {each.fix}" if each.fix and (what == "built" or not each.not_built) else ""
                told.setdefault((what, reason.removeprefix(f"target {each.name}: ") + fix), []).append(each.name)
    return [f"not {what} here: {', '.join(names)}: {reason}" for (what, reason), names in told.items()]
