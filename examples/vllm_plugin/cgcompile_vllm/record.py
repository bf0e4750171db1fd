"""What an engine's start leaves beside its graphs: how it was configured, the memory that it measured, what its graphs return."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .engine import Piece

NAME = "engine.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """`config`: configuration and versions, as text.  `compiled`: the name of the compiled model in vLLM's cache.  `cache`: bytes
    for the KV cache; `free`: bytes of the GPU that were free when they were measured.  `hidden`: shape and dtype of the output of
    the whole model.  `pieces`: the graphs of its parts."""

    config: str
    compiled: str
    cache: int
    free: int
    hidden: tuple[tuple[int, ...], str] | None
    pieces: tuple[Piece, ...]


def read_record(folder: Path) -> Record | None:
    """The record in the folder; None where there is none that can be read."""
    try:
        row: dict[str, Any] = json.loads((folder / NAME).read_text())
        pieces = [Piece(**{**piece, "values": tuple([tuple(value) for value in piece["values"]])}) for piece in row["pieces"]]
        hidden = row["hidden"] and (tuple(row["hidden"][0]), row["hidden"][1])
        kept = {name: row[name] for name in ("config", "compiled", "cache", "free")}
        return Record(**kept, hidden=hidden, pieces=tuple(pieces))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_record(folder: Path, record: Record) -> None:
    """Writes it, whole or not at all.  Raises OSError."""
    part = folder / f".{NAME}.{os.getpid()}"
    part.write_text(json.dumps(asdict(record)))
    part.rename(folder / NAME)
