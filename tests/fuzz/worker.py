"""A fuzzing process: `python -m tests.fuzz.worker GOLDEN SCRATCH FIRST LAST UNTIL`.

Runs the cases FIRST..LAST of a golden bundle one after the other, until the time UNTIL (seconds since 1970, 0 for no end). For
every case it writes a line to `SCRATCH/log`: its number at the start, its kind when its files are written, and its outcome at the
end. So the log is complete even if a case kills the process.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import cgbundle
from cgbundle import self_test
from cgbundle.errors import CgbundleError
from cgbundle.format import archive, file_names
from cgbundle.format.schema import DTYPES, MEMORIES, Manifest
from cgbundle.validate import bundle as validate
from tests.fuzz import mutations
from tests.fuzz.answers import Answers
from tests.fuzz.commands import command, shown

LIMIT = 500
"""MiB that a process may grow by in one case."""

VIEWS = (
    ("inspect",), ("inspect", "--json"), ("inspect", "--html", "-"), ("inspect", "--dot"), ("inspect", "--memory"),
    ("inspect", "--memory", "--json"), ("inspect", "--kernels"), ("inspect", "--kernels", "--json"), ("verify",),
    ("verify", "--json"), ("diff",), ("diff", "--json"), ("inspect", "--graph"), ("inspect", "--graph", "--json"),
)  # fmt: skip
"""Commands that show a bundle: one of them runs for every accepted case, and for a few refused ones."""

REFUSED_SHOWN = 0.03

KILLED = "CGC_FUZZ_KILLED"
"""Environment variable: the cases that kill their process, for the fuzzer's own test."""


class Golden:
    """A bundle whose files are read once. Every case changes some of them and restores them."""

    def __init__(self, path: Path, scratch: Path) -> None:
        self.folder, self.origin = scratch / "case.cgb", scratch / "origin.cgb"
        shutil.copytree(path, self.origin, dirs_exist_ok=True)
        (self.origin / file_names.PROGRAM).write_bytes(b"the runtime never opens it")
        plain: dict[str, Any] = json.loads((path / file_names.MANIFEST).read_bytes())
        del plain["sha256"]
        self.manifest = mutations.seal(plain, {file_names.PROGRAM: (self.origin / file_names.PROGRAM).read_bytes()})
        (self.origin / file_names.MANIFEST).write_bytes(self.manifest)
        self.plain = plain
        self.weights = weights_of(archive.read_manifest(str(self.origin)))
        self.key = "x".join(map(str, plain["entries"][0]["programs"][0]["key"])) or "-"
        names = [row["path"] for row in plain["files"]]
        self.tables = [name for name in names if name.startswith("graphs/")]
        self.stored = [name for name in names if name.endswith(".safetensors")]
        self.texts = [name for name in names if name.endswith(".json")]
        self.inputs = scratch / "inputs.safetensors"
        self.folders = ["", *sorted({name.rpartition("/")[0] for name in names} - {""})]
        self.refused = ""
        """Why the bundle must be refused, if that is known."""
        self.planted: Path | None = None
        shutil.copytree(self.origin, self.folder, dirs_exist_ok=True)
        self._changed: list[str] = []

    def write(self, files: dict[str, bytes], manifest: bytes) -> None:
        """Undoes the changes of the last case, and writes these files."""
        self.refused = ""
        if self.planted is not None:
            self.planted.rmdir() if self.planted.is_dir() and not self.planted.is_symlink() else self.planted.unlink()
            self.planted = None
        for name in self._changed:
            shutil.copyfile(self.origin / name, self.folder / name)
        for name, data in files.items():
            (self.folder / name).write_bytes(data)
        (self.folder / file_names.MANIFEST).write_bytes(manifest)
        self._changed = list(files)


def mutate(golden: Golden, number: int) -> str:
    """Writes case `number` and returns its kind."""
    draw = random.Random(number)
    chance = draw.random()
    if chance < 0.02:
        golden.write({}, golden.manifest)
        golden.planted, golden.refused = mutations.planted(golden.folder, golden.folders, draw), "the manifest does not name a file"
        return "planted"
    if chance < 0.05:
        stored = draw.choice((None, *golden.stored))
        files = {} if stored is None else {stored: mutations.twice((golden.origin / stored).read_bytes(), draw)}
        sealed = mutations.seal(json.loads(json.dumps(golden.plain)), files)
        golden.write(files, sealed if files else mutations.twice(sealed, draw))
        golden.refused = "a name occurs twice"
        return "twice"
    if chance < 0.45:
        golden.write({}, mutations.seal(mutations.manifest(golden.plain, draw), {}))
        return "manifest"
    if chance < 0.6:
        golden.write({}, mutations.seal(mutations.swapped(golden.plain, draw), {}))
        return "swapped"
    if chance < 0.66:
        golden.write({}, mutations.text(golden.manifest, draw))
        return "text"
    if chance < 0.69:
        golden.write({}, mutations.table(golden.manifest, draw))
        return "bytes"
    if chance < 0.75:
        golden.write({}, golden.manifest)
        contents = (golden.origin / file_names.SELF_TEST).read_bytes()
        golden.inputs.write_bytes((mutations.tensors if draw.random() < 0.7 else mutations.table)(contents, draw))
        return "inputs"
    kind, change, names = "tensors", mutations.tensors, golden.stored
    if golden.tables and chance < 0.78:
        name = draw.choice(golden.tables)
        data, rows = mutations.writing((golden.origin / name).read_bytes(), marks(golden.plain), draw)
        golden.write({name: data}, mutations.seal(json.loads(json.dumps(golden.plain)), {name: data}))
        golden.refused = stray_write(golden.plain, name, rows)
        return "writing"
    if golden.tables and chance < 0.86:
        kind, change, names = "columns", mutations.columns, golden.tables
    elif golden.tables and chance < 0.92:
        kind, change, names = "table", mutations.table, golden.tables
    elif chance > 0.97:
        kind, change, names = "data", mutations.table, [*golden.stored, *golden.texts]
    name = draw.choice(names)
    files = {name: change((golden.origin / name).read_bytes(), draw)}
    golden.write(files, mutations.seal(json.loads(json.dumps(golden.plain)), files))
    return kind


def run(golden: Golden, answers: Answers | None, kind: str, number: int) -> str:
    """Returns the outcome of the written case: a code, "accepted", "right", "refused", "another model", or "wrong: ..."."""
    draw = random.Random(-number)
    path = str(golden.folder)
    if kind == "inputs":
        return command(["run", path, "--inputs", str(golden.inputs), "--quiet"])
    try:
        bundle = archive.Archive(path)
        validate.check_bundle(bundle, "full")
        outcome = "accepted"
        if golden.refused:
            return f"wrong: accepted, and {golden.refused}"
        if answers is not None:
            with cgbundle.load(path) as program:
                outcome = answers.judge(program)
                if kind in ("tensors", "data"):
                    self_test.replay_self_test(program)
            if " values differ" in outcome and (kind in ("tensors", "data") or weights_of(bundle.manifest) != golden.weights):
                outcome = "another model"
    except CgbundleError as error:
        outcome = shown(error)
        if draw.random() >= REFUSED_SHOWN:
            return outcome
    view = draw.choice(VIEWS)
    if view[0] == "diff":
        answer = command(["diff", *view[1:], str(golden.origin), path])
    else:
        answer = command([view[0], path, *([view[1], golden.key, *view[2:]] if "--graph" in view else view[1:])])
    return answer if answer.startswith("wrong: ") else outcome


def marks(plain: dict[str, Any]) -> list[tuple[int, int]]:
    """Returns (memory, byte) where values, weights and memories of a manifest begin and end."""
    places = [(0, 0)]
    for row in [*plain["weights"], *[value for _, program in programs(plain) for value in program["values"]]]:
        memory = MEMORIES.index(row.get("memory", "weights"))
        offset = max(0, row.get("offset", 0))
        places += [(memory, offset), (memory, offset + size_of(row))]
    return places + [(MEMORIES.index(name), size) for name, size in plain["memories"] if name in MEMORIES]


def stray_write(plain: dict[str, Any], file: str, rows: list[mutations.Row]) -> str:
    """Returns a text about the first byte in `rows` that no call of a program of `file` may change, or ""."""
    for entry, program in programs(plain):
        if not any(step.get("file") == file for step in program["steps"]):
            continue
        values = [program["values"][program["inputs"][index]] for index in entry.get("mutated_inputs", ())]
        copies = [index for step in program["steps"] if step["kind"] == "copy" for index in step.get("outputs", ())]
        values += [program["values"][index] for index in copies if program["values"][index]["memory"] == "inputs"]
        values += [plain["weights"][index] for index in entry.get("mutated_buffers", ())]
        places = [(row["memory"], row.get("offset", 0), row.get("offset", 0) + size_of(row)) for row in values]
        for memory, begin, end in rows:
            for byte in range(begin, end):
                name = MEMORIES[memory]
                if name != "arena" and not any(name == one and first <= byte < last for one, first, last in places):
                    return f"a node writes byte {byte} of memory {name}"
    return ""


def programs(plain: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns every program of a manifest with its entry."""
    return [(entry, program) for entry in plain["entries"] for program in entry["programs"]]


def size_of(row: dict[str, Any]) -> int:
    """Returns the bytes from a tensor's first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(row["shape"], row["strides"], strict=True))
    return 0 if 0 in row["shape"] else (last + 1) * DTYPES[row["dtype"]]


def weights_of(manifest: Manifest) -> dict[str, str]:
    """Returns the tensor of every constant of the code. A bundle with other constants is another model, whose right answers are
    unknown."""
    return {name: manifest.weights[weight].tensor for region in manifest.regions for name, weight in region.constants}


def main(arguments: list[str]) -> int:
    path, scratch, first, last = Path(arguments[0]), Path(arguments[1]), int(arguments[2]), int(arguments[3])
    until = float(arguments[4])
    golden = Golden(path, scratch)
    answers = Answers.of(str(golden.origin))
    log = os.open(scratch / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    first_peak, killed = peak(), os.environ.get(KILLED, "").split(",")
    for number in range(first, last):
        if until and time.time() > until:
            break
        os.write(log, f"{number} ".encode())
        kind = mutate(golden, number)
        os.write(log, f"{kind} ".encode())
        if str(number) in killed:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            outcome = run(golden, answers, kind, number)
        except Exception as error:  # noqa: BLE001 (any such error is a find)
            outcome = f"foreign: {type(error).__name__}: {error}"
        grown = peak() - first_peak
        if grown > LIMIT:
            outcome = f"memory: {grown} MiB"
        if grown > LIMIT // 5:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        line = "".join([c if c.isprintable() else "?" for c in outcome[:400]])
        os.write(log, f"{line}\n".encode())
    return 0


def peak() -> int:
    """Returns the peak memory of this process in MiB, since its start or since the peak was reset."""
    match = re.search(rb"VmHWM:\s+(\d+)", Path("/proc/self/status").read_bytes())
    return int(match[1]) >> 10 if match else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
