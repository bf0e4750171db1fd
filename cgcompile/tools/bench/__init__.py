"""bench: a bundle beside other ways to serve the same model: cold start, time of a call, memory, and whether the outputs agree.

    from cgcompile.bench import measure
    report = measure("gpt.cgb", against=("eager", "compile"), rounds=5)

`measure` starts a process per measurement (`child`) and never computes anything itself; `report` holds the numbers, `plot` draws
them.  Nothing here is imported by a build or by serving.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .measuring import measure
    from .plot import svg
    from .report import Report

__all__ = ["Report", "measure", "svg"]

_HOMES = {"measure": "measuring", "Report": "report", "svg": "plot"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cgcompile.tools.bench' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
