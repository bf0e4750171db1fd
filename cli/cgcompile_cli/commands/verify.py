"""`cgcompile verify`: checks every invariant and hash, and reports all damage; with --run also the self-test in a new process.

With --key it also checks that one of these keys signed the bundle."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import FINDINGS, as_object
from ..options import BundlePath
from ..output import complain, count, first_rows, listed, safe, show, table, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgbundle.errors import CgbundleError
    from cgbundle.format.schema import Manifest
    from cgbundle.signatures import Signature


def verify(
    bundle: BundlePath,
    run: Annotated[bool, typer.Option("--run", help="Also replay the stored self-test in a fresh process.")] = False,
    key: Annotated[
        list[str] | None,
        typer.Option(
            "--key", metavar="KEY", help="Public key of the signature: PEM file or 64 hex digits. Repeated: one of these keys."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing if the bundle is valid.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check every file and invariant of a bundle.

    --run replays the self-test of every int_key, and compares the outputs
    with those of the build. Exit status 1 if the bundle is damaged, not
    signed by a given key, or fails the self-test; 2 if this machine cannot
    replay it.

    \b
    cgcompile verify model.cgb --key public.pem
    """
    keys = tuple(key or ())
    manifest, signature, damage = _examine(bundle, keys)
    answer: dict[str, Any] = {}
    if run and manifest and not damage:
        from cgbundle.self_test import fresh

        answer = fresh(bundle, keys)
    compared = [*answer.get("results", []), *answer.get("donations", [])]
    for row in compared:
        for part in (row, *row.get("tensors", ())):
            part["error"] = part["error"] if math.isfinite(part["error"]) else str(part["error"])  # JSON has no infinity
    ok = not damage and all(row["passed"] for row in compared)
    if "error" in answer:
        if not as_json:
            _report(bundle, manifest, damage, {}, _signed(signature, keys))
        from cgcompile.errors import named

        raise named(answer["code"], answer["error"], answer["hint"])
    if as_json:
        write_json({
            "path": bundle,
            "ok": ok,
            "damage": [as_object(error.code, str(error), error.hint) for error in damage],
            "signature": signature and {"key": signature.key.hex(), "trusted": bool(keys)},
            "self_test": answer or None,
        })  # fmt: skip
    elif not (ok and quiet):
        _report(bundle, manifest, damage, answer, _signed(signature, keys))
    if not ok:
        raise typer.Exit(FINDINGS)


def _signed(signature: Signature | None, keys: Sequence[str]) -> str:
    """Returns a text with the key of the signature, "" without a signature."""
    if signature is None:
        return ""
    return f"signed by key {signature.key.hex()}" + ("" if keys else ", which was not checked: give --key")


def _examine(path: str, keys: Sequence[str]) -> tuple[Manifest | None, Signature | None, list[CgbundleError]]:
    """Returns the manifest and the signature (None if damaged or missing) and all defects of the bundle.

    Raises library-missing, key-invalid, bundle-missing, not-a-bundle, format-unsupported.
    """
    from cgbundle import signatures
    from cgbundle.errors import BundleError
    from cgbundle.format.archive import Archive
    from cgbundle.validate.bundle import examine

    signature: Signature | None = None
    damage: list[CgbundleError] = []
    try:
        bundle = Archive(path)
        try:
            signature = signatures.check(bundle, keys) if keys else signatures.read(bundle)
        except BundleError as error:
            damage.append(error)
        return bundle.manifest, signature, [*damage, *examine(bundle)]
    except BundleError as error:
        if error.code != "manifest-invalid":
            raise
        return None, signature, [*damage, error]


def _report(path: str, manifest: Manifest | None, damage: list[CgbundleError], answer: dict[str, Any], signed: str) -> None:
    from ..summary import bulk

    if damage or manifest is None:
        show(table(("",), [(str(error),) for error in damage]))
        hints = sorted({error.hint for error in damage if error.hint})
        complain(f"{path}: {count(len(damage), 'defect')}", "; ".join(hints))
        return
    show(f"{safe(path)}: {bulk(manifest)}, every hash and invariant holds")
    if signed:
        show(signed)
    if answer:
        from ..summary import variant_names

        if len(variant_names(path)) > 1:
            show(f"replayed the variant {answer['variant']}")
        rows = [_row(manifest, row) for row in answer["results"]]
        wrong = [row for row in rows if row[-1] == "FAILED"]
        show(table(("int_key", ">error", ">allowed", ""), first_rows(wrong or rows)))
        for row in answer["results"]:
            for line in _failures(manifest, row):
                show(safe(line))
        if wrong:
            complain(
                f"{path}: the self-test failed for {listed([row[0] for row in wrong], 4)}",
                "build the bundle again on this kind of machine",
            )
        donations = answer.get("donations", [])
        if donations:
            failed = [row for row in donations if not row["passed"]]
            reads = f"inputs read in place from outputs in {count(len(donations), 'call')}"
            show(f"donations: {reads}; {len(failed)} differ from calls with copies")
            for row in failed:
                show(safe(f"{row['title']}: {row['text']}"))


def _failures(manifest: Manifest, row: dict[str, Any]) -> list[str]:
    """Formats every failed tensor: `batch=8: output 1 (int64): 3 of 8 values differ, first at [2]: 17, expected 12`."""
    from cgbundle.format.file_names import entry_named
    from cgbundle.self_test import name_key

    key = name_key(entry_named(manifest, row["entry"]), row["key"])
    return [f"{key}: {tensor['title']}: {tensor['text']}" for tensor in row["tensors"] if not tensor["passed"]]


def _row(manifest: Manifest, row: dict[str, Any]) -> tuple[str, str, str, str]:
    from cgbundle.format.file_names import entry_named
    from cgbundle.self_test import BITS, name_key

    from ..inspection.program_rows import bound_text

    entry = entry_named(manifest, row["entry"])
    bound = "same bits" if entry.self_test.compare == BITS else bound_text(row["tolerance"])
    return name_key(entry, row["key"]), f"{float(row['error']):.1e}", bound, "ok" if row["passed"] else "FAILED"
