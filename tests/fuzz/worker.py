"""A fuzzing process: `python -m tests.fuzz.worker GOLDEN SCRATCH STATUS FIRST LAST`.

Runs the cases FIRST..LAST of a golden bundle, one after the other.  STATUS is a file of 8 bytes, the number of the case that runs:
the parent knows which one crashed or hung.  On stdout a line of JSON for every find, and one with counts at the end.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import cgbundle
from cgbundle.errors import CgbundleError
from cgbundle.format import archive
from cgbundle.validate import bundle as validate
from tests.fuzz import mutations
from tests.fuzz.answers import Answers

LIMIT = 500 << 10
"""KiB that a process may grow by in one case."""


class Golden:
    """A bundle whose files are read once, and linked into a folder for every case."""

    def __init__(self, path: Path, scratch: Path) -> None:
        self.folder = scratch / "case.cgb"
        self.origin = scratch / "origin.cgb"
        shutil.copytree(path, self.origin, dirs_exist_ok=True)
        self.plain: dict[str, Any] = json.loads((path / archive.MANIFEST).read_bytes())
        names = [row["path"] for row in self.plain["files"]]
        self.tables = [name for name in names if name.startswith("graphs/")]
        self.stored = [name for name in names if name.endswith(".safetensors")]
        self.images = [name for name in names if name.startswith(("kernels/", "host/"))]
        self.names = names

    def write(self, plain: dict[str, Any], files: dict[str, bytes], manifest: bytes | None) -> None:
        """The bundle with these changes."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in self.names:
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in files:
                target.write_bytes(files[name])
            else:
                os.link(self.origin / name, target)
        (self.folder / archive.MANIFEST).write_bytes(mutations.seal(plain, files) if manifest is None else manifest)


def mutate(golden: Golden, number: int) -> str:
    """Writes case `number`; says what kind it is."""
    draw = random.Random(number)
    how = draw.random()
    plain, files, whole = golden.plain, dict[str, bytes](), None
    if how < 0.7 or not (golden.tables or golden.stored):
        kind, plain = "manifest", mutations.manifest(golden.plain, draw)
    elif how < 0.88 and golden.tables:
        kind, name = "table", draw.choice(golden.tables)
        files[name] = mutations.table((golden.origin / name).read_bytes(), draw)
    elif how < 0.97:
        kind, name = "tensors", draw.choice(golden.stored)
        files[name] = mutations.tensors((golden.origin / name).read_bytes(), draw)
    else:
        kind, whole = "bytes", mutations.table((golden.origin / archive.MANIFEST).read_bytes(), draw)
    if kind != "bytes":
        plain = json.loads(json.dumps(plain))
    golden.write(plain, files, whole)
    return kind


def run(golden: Golden, answers: Answers | None) -> str:
    """What becomes of the written case: a code of the catalogue, "accepted", or "right"."""
    path = str(golden.folder)
    try:
        validate.check_bundle(archive.Archive(path), "full")
        if answers is None:
            return "accepted"
        with cgbundle.load(path) as program:
            return answers.judge(program)
    except CgbundleError as error:
        return error.code


def main(arguments: list[str]) -> int:
    golden_path, scratch, status, first, last = Path(arguments[0]), Path(arguments[1]), arguments[2], *map(int, arguments[3:])
    golden = Golden(golden_path, scratch)
    answers = Answers.of(str(golden.origin))
    counts: Counter[str] = Counter()
    with open(status, "r+b", buffering=0) as current:
        for number in range(first, last):
            current.seek(0)
            current.write(number.to_bytes(8, "little"))
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            kind = mutate(golden, number)
            try:
                found = run(golden, answers)
            except Exception as error:  # noqa: BLE001 (what it is, is what is looked for)
                found = "foreign"
                print(json.dumps({"case": number, "kind": kind, "what": f"{type(error).__name__}: {error}"[:300]}), flush=True)
            if found.startswith("wrong:"):
                print(json.dumps({"case": number, "kind": kind, "what": found}), flush=True)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            if grown > LIMIT:
                print(json.dumps({"case": number, "kind": kind, "what": f"{grown >> 10} MiB of memory"}), flush=True)
            counts[found.partition(":")[0]] += 1
    print(json.dumps({"counts": counts}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
