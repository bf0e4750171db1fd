"""Measured configurations: the files <arch>.json here, which the tuner (tests/bench/tuning) writes on a real GPU."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import BuildError
from .cost_model import Candidate, Problem, Table

FOLDER = Path(__file__).parent


def table_file(arch: str) -> Path | None:
    """The file with the measurements of a target, or None."""
    path = FOLDER / f"{arch}.json"
    return path if path.exists() else None


def read_table(path: Path) -> Table:
    """Returns problem -> measured (candidate, microseconds), fastest first.  Raises measurements-broken."""
    try:
        rows = json.loads(path.read_text())["problems"]
        return {
            Problem(**row["problem"]): [(Candidate(**pair["candidate"]), float(pair["microseconds"])) for pair in row["measured"]]
            for row in rows
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError("measurements-broken", f"{path}: {type(error).__name__}: {error}") from error
