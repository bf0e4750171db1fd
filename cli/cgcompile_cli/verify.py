"""`cgcompile verify`: every invariant and hash, all damage at once; with --run the stored exam, in a fresh process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import complain, count, listed, safe, shortened, show, table, write_json

if TYPE_CHECKING:
    from cgbundle.errors import CgbundleError
    from cgbundle.schema import Manifest

FAILED = 1


def verify(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="The bundle's directory.", show_default=False)],
    run: Annotated[bool, typer.Option("--run", help="Also replay the stored exam in a fresh process.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check every file and invariant of a bundle.

    --run replays the inputs that the build stored and compares the outputs
    with the ones it recorded, for every int_key.
    """
    manifest, damage = examine(bundle)
    answer = sit(bundle, manifest) if run and manifest and not damage else {}
    ok = not damage and all(row["ok"] for row in answer.get("results", [])) and "error" not in answer
    if as_json:
        write_json({
            "path": bundle,
            "ok": ok,
            "damage": [{"kind": type(error).__name__, "message": str(error), "hint": error.hint} for error in damage],
            "exam": answer or None,
        })  # fmt: skip
    else:
        _report(bundle, manifest, damage, answer)
    if not ok:
        raise typer.Exit(answer.get("exit_code", FAILED))


def examine(path: str) -> tuple[Manifest | None, list[CgbundleError]]:
    """The manifest (None where it is damaged) and everything that is wrong with the bundle.

    Raises BundleMissing, NotABundle, FormatUnsupported.
    """
    from cgbundle import archive
    from cgbundle import verify as invariants
    from cgbundle.errors import FileDamaged, ManifestInvalid, TableInvalid, WeightsInvalid

    found: list[CgbundleError] = []

    def holds(check: Callable[..., None], *arguments: Any) -> bool:
        try:
            check(*arguments)
        except (ManifestInvalid, FileDamaged, WeightsInvalid, TableInvalid) as error:
            if str(error) not in map(str, found):
                found.append(error)
            return False
        return True

    try:
        manifest = archive.read_manifest(path)
    except ManifestInvalid as error:
        return None, [error]
    if not holds(invariants.check_manifest, manifest):
        return manifest, found
    sound = holds(invariants.check_bundle, path, manifest, "full")
    if not sound:
        found.clear()  # look again, at one file after another: check_bundle stops at the first
        for file in manifest.files:
            if holds(archive.check_sizes, path, replace(manifest, files=(file,))):
                holds(archive.check_hash, path, file)
        for stranger in sorted(set(archive.list_files(path)) - {file.path for file in manifest.files} - {archive.MANIFEST}):
            found.append(FileDamaged(f"{stranger}: not named in the manifest"))
    names = {name for error in found for name in (archive.WEIGHTS, archive.EXAM) if str(error).startswith(name)}
    if archive.WEIGHTS not in names:
        holds(invariants.check_weights, path, manifest)
    if archive.EXAM not in names:
        holds(check_exam, path, manifest)
    if not (sound or found):
        holds(invariants.check_bundle, path, manifest, "full")
    return manifest, found


def check_exam(path: str, manifest: Manifest) -> None:
    """Raises WeightsInvalid unless the exam holds every input and output of every int_key, and nothing else."""
    from cgbundle import archive, exam, safetensors
    from cgbundle.errors import WeightsInvalid

    with open(os.path.join(path, archive.EXAM), "rb") as file:
        entries = safetensors.read_header(file, archive.EXAM)
    expected = set()
    for program in manifest.programs:
        for kind, positions in (("input", program.inputs), ("output", program.outputs)):
            for index, position in enumerate(positions):
                name, value = exam.entry(program.key, kind, index), program.values[position]
                expected.add(name)
                entry = entries.get(name)
                if entry is None:
                    raise WeightsInvalid(f"{archive.EXAM}: tensor {name!r} is missing")
                if (entry.dtype, entry.shape) != (value.dtype, value.shape):
                    found, wanted = f"{entry.dtype} {list(entry.shape)}", f"{value.dtype} {list(value.shape)}"
                    raise WeightsInvalid(f"{archive.EXAM}: tensor {name!r} is {found}, expected {wanted}")
    for name in sorted(entries.keys() - expected):
        raise WeightsInvalid(f"{archive.EXAM}: tensor {name!r} belongs to no int_key")


def sit(path: str, manifest: Manifest) -> dict[str, Any]:
    """What `python -m cgbundle.exam` says of the bundle: {"results": [...]}, each with `ok`, or {"error", "hint", "exit_code"}."""
    import cgbundle
    from cgbundle.exam import Result

    home = os.path.dirname(os.path.dirname(os.path.abspath(cgbundle.__file__)))
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "cgbundle.exam", path], env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        how = f"was killed by signal {-done.returncode}" if done.returncode < 0 else f"ended with exit status {done.returncode}"
        last = (done.stderr.strip().splitlines() or [""])[-1]
        answer = {"error": f"{path}: the process that replays the exam {how}", "hint": last}
    if "error" in answer:
        return {**answer, "exit_code": done.returncode if done.returncode > 0 else FAILED}
    for row in answer["results"]:
        row["ok"] = Result(**row | {"key": tuple(row["key"])}).passed(manifest.exam.compare)
        row["error"] = row["error"] if math.isfinite(row["error"]) else str(row["error"])  # JSON has no infinity
    return answer


def _report(path: str, manifest: Manifest | None, damage: list[CgbundleError], answer: dict[str, Any]) -> None:
    from .summary import bulk

    if damage or manifest is None:
        show(table(("",), [(str(error),) for error in damage]))
        hints = sorted({error.hint for error in damage if error.hint})
        complain(f"{path}: {count(len(damage), 'defect')}", "; ".join(hints))
        return
    show(f"{safe(path)}: {bulk(manifest)}, every hash and invariant holds")
    if "error" in answer:
        complain(str(answer["error"]), str(answer.get("hint", "")))
    elif answer:
        rows = [_row(manifest, row) for row in answer["results"]]
        wrong = [row for row in rows if row[-1] == "FAILED"]
        shown, hidden = shortened(wrong or rows)
        show(table(("int_key", ">error", ">allowed", ""), [*shown, *([(f"and {hidden} more", "", "", "")] if hidden else [])]))
        if wrong:
            complain(
                f"{path}: the exam failed for {listed([row[0] for row in wrong], 4)}",
                "build the bundle again on this kind of machine",
            )


def _row(manifest: Manifest, row: dict[str, Any]) -> tuple[str, str, str, str]:
    from cgbundle.exam import BITS, name_key

    promise = "same bits" if manifest.exam.compare == BITS else f"{row['tolerance']:.1e}"
    return name_key(manifest, row["key"]), f"{float(row['error']):.1e}", promise, "ok" if row["ok"] else "FAILED"
