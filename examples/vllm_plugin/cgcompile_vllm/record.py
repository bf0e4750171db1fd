"""The record that a start saves with its graphs: the configuration, the measured memory, and the results of the graphs."""

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
    for the KV cache; `free`: free bytes of the GPU when `cache` was measured.  `hidden`: shape and dtype of the whole model's
    output.  `pieces`: the graphs of the model's parts."""

    config: str
    compiled: str
    cache: int
    free: int
    hidden: tuple[tuple[int, ...], str] | None
    pieces: tuple[Piece, ...]


def read_record(folder: Path) -> Record | None:
    """Returns the record in the folder, None if it is missing or invalid."""
    try:
        row: dict[str, Any] = json.loads((folder / NAME).read_text())
        pieces = [Piece(**{**piece, "values": tuple([tuple(value) for value in piece["values"]])}) for piece in row["pieces"]]
        hidden = row["hidden"] and (tuple(row["hidden"][0]), row["hidden"][1])
        fields = {name: row[name] for name in ("config", "compiled", "cache", "free")}
        return Record(**fields, hidden=hidden, pieces=tuple(pieces))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_record(folder: Path, record: Record) -> None:
    """Writes the record atomically.  Raises OSError."""
    part = folder / f".{NAME}.{os.getpid()}"
    part.write_text(json.dumps(asdict(record)))
    part.rename(folder / NAME)
