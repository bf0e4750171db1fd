"""PyTorch's verdicts on the corpus, recorded in verdicts.json: they depend on the corpus and on PyTorch, not on cgcompile.

A record is valid for its version of torch, and for the text of the model's file and of the files in ASKED_WITH. If one of them has
changed, PyTorch is called again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import case, pytorch_says, settings
from .case import Case
from .pytorch_says import Flag

FILE = Path(__file__).parent / "verdicts.json"

ASKED_WITH = (case, settings, pytorch_says)


def pytorch_said(asked: Case) -> tuple[Flag, ...]:
    """Returns the result of `pytorch_says`, from the record if that is valid."""
    return _of_record(asked) if is_recorded(asked) else pytorch_says.pytorch_says(asked)


def is_recorded(asked: Case) -> bool:
    """Tells whether the record has a valid verdict."""
    record = _record()
    return (
        record["torch"] == _version()
        and asked.name in record["verdicts"]
        and record["texts"].get(_name(asked)) == _text(asked.file)
    )


def is_of_this_torch() -> bool:
    """Tells whether the record was made with this version of torch."""
    matches: bool = _record()["torch"] == _version()
    return matches


def write(cases: Sequence[Case]) -> None:
    """Writes PyTorch's verdicts on all cases to verdicts.json; takes a minute or two."""
    verdicts = {case.name: list(map(_plain, pytorch_says.pytorch_says(case))) for case in cases}
    texts = {_name(case): _text(case.file) for case in cases}
    FILE.write_text("\n".join(_lines({"torch": _version(), "texts": texts, "verdicts": verdicts})))


def _lines(record: dict[str, Any]) -> Iterator[str]:
    """Yields JSON with a line for each case."""
    verdicts = [f"{json.dumps(name)}: {json.dumps(flags)}" for name, flags in sorted(record["verdicts"].items())]
    yield f'{{"torch": {json.dumps(record["torch"])},'
    yield f'"texts": {json.dumps(record["texts"])},'
    yield '"verdicts": {'
    yield ",\n".join(verdicts)
    yield "}}\n"


def _plain(flag: Flag) -> list[Any]:
    return [flag.by, flag.reason, sorted(flag.lines)]


def _of_record(asked: Case) -> tuple[Flag, ...]:
    flags = _record()["verdicts"][asked.name]
    return tuple([Flag(by=by, reason=reason, lines=frozenset(lines)) for by, reason, lines in flags])


@cache
def _record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"torch": "", "texts": {}, "verdicts": {}}
    return record


def _name(asked: Case) -> str:
    return Path(asked.file).name


@cache
def _text(file: str) -> str:
    """Returns a hash of a file of the corpus and of the modules in ASKED_WITH."""
    texts = [Path(path).read_bytes() for path in (file, *[str(module.__file__) for module in ASKED_WITH])]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def _version() -> str:
    return torch.__version__.partition("+")[0]
