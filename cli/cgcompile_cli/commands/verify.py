"""`cgcompile verify`: every invariant and hash, all damage at once; with --run the stored exam, in a fresh process."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import FINDINGS
from ..output import complain, count, first_rows, listed, safe, show, table, write_json
from .options import BundlePath

if TYPE_CHECKING:
    from cgbundle.errors import CgbundleError
    from cgbundle.format.schema import Manifest


def verify(
    bundle: BundlePath,
    run: Annotated[bool, typer.Option("--run", help="Also replay the stored exam in a fresh process.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing where the bundle is sound.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check every file and invariant of a bundle.

    --run replays the inputs that the build stored and compares the outputs
    with the ones it recorded, for every int_key. Exit status 1 where the
    bundle is damaged or the exam fails.
    """
    manifest, damage = _examine(bundle)
    answer: dict[str, Any] = {}
    if run and manifest and not damage:
        from cgbundle.exam import fresh

        answer = fresh(bundle)
    for row in answer.get("results", []):
        for each in (row, *row["tensors"]):
            each["error"] = each["error"] if math.isfinite(each["error"]) else str(each["error"])  # JSON has no infinity
    ok = not damage and all(row["passed"] for row in answer.get("results", [])) and "error" not in answer
    if as_json:
        write_json({
            "path": bundle,
            "ok": ok,
            "damage": [{"kind": error.kind, "message": str(error), "hint": error.hint} for error in damage],
            "exam": answer or None,
        })  # fmt: skip
    elif not (ok and quiet):
        _report(bundle, manifest, damage, answer)
    if not ok:
        raise typer.Exit(answer.get("exit_code") or FINDINGS)


def _examine(path: str) -> tuple[Manifest | None, list[CgbundleError]]:
    """The manifest (None where it is damaged) and everything that is wrong with the bundle."""
    from cgbundle.errors import BundleError
    from cgbundle.format.archive import Archive
    from cgbundle.validate.bundle import examine

    try:
        bundle = Archive(path)
        return bundle.manifest, examine(bundle)
    except BundleError as error:
        if error.code != "manifest-invalid":
            raise
        return None, [error]


def _report(path: str, manifest: Manifest | None, damage: list[CgbundleError], answer: dict[str, Any]) -> None:
    from ..summary import bulk

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
        show(table(("int_key", ">error", ">allowed", ""), first_rows(wrong or rows)))
        for row in answer["results"]:
            for line in _failures(manifest, row):
                show(safe(line))
        if wrong:
            complain(
                f"{path}: the exam failed for {listed([row[0] for row in wrong], 4)}",
                "build the bundle again on this kind of machine",
            )


def _failures(manifest: Manifest, row: dict[str, Any]) -> list[str]:
    """`batch=8: output 1 (int64): 3 of 8 values differ, first at [2]: 17, expected 12` of every tensor that failed."""
    from cgbundle.exam import name_key

    key = name_key(manifest, row["key"])
    return [f"{key}: {each['title']}: {each['text']}" for each in row["tensors"] if not each["passed"]]


def _row(manifest: Manifest, row: dict[str, Any]) -> tuple[str, str, str, str]:
    from cgbundle.exam import BITS, name_key

    from ..summary import bound_text

    promise = "same bits" if manifest.exam.compare == BITS else bound_text(row["tolerance"])
    return name_key(manifest, row["key"]), f"{float(row['error']):.1e}", promise, "ok" if row["passed"] else "FAILED"
