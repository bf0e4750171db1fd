"""Measured configurations: data/<arch>.json beside this file, written by the tuner on a real GPU, with where they come from."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import BuildError
from ...targets.architectures import Arch
from .cost_model import Candidate, Problem, Table, choose
from .split_factors import split_factor

FOLDER = Path(__file__).parent

Choose = Callable[[Problem, Sequence[Candidate], Arch], tuple[int, str]]


def table_file(arch: str) -> Path | None:
    """The measurements for a target, or None where nobody made any."""
    path = FOLDER / f"{arch}.json"
    return path if path.exists() else None


def read_table(path: Path) -> Table:
    """Problem -> measured (candidate, microseconds), fastest first.  Raises measurements-broken."""
    try:
        rows = json.loads(path.read_text())["problems"]
        return {Problem(**row["problem"]): [_measured(found) for found in row["measured"]] for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError("measurements-broken", f"{path}: {type(error).__name__}: {error}") from error


def _measured(row: dict[str, Any]) -> tuple[Candidate, float]:
    return Candidate(**row["candidate"]), float(row["microseconds"])


def split_factor_with(path: Path | None, arch: Arch) -> Callable[[Problem], int]:
    """`split_factor.pieces` for a target, with the measurements of a file."""
    table = read_table(path) if path else None
    return lambda problem: split_factor(problem, arch, table)


def choose_with(path: Path | None) -> Choose:
    """`choosing.choose` with the measurements of a file."""
    return partial(choose, table=read_table(path)) if path else choose
