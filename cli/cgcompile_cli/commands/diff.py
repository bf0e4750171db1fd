"""`cgcompile diff`: compares two bundles by their files; loads and runs nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import FINDINGS
from ..output import count, record, shortened, show, table, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from cgcompile.tools.diff.bundle_files import BundleFiles
    from cgcompile.tools.diff.differences import Difference

SIGNS = {"added": "+", "removed": "-", "changed": "~"}


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A bundle's directory.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="Another bundle's directory.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print every difference as JSON.")] = False,
) -> None:
    """Show what differs between two bundles.

    Compare target, signature, sizes, memory, weights, kernels, nodes,
    findings, options and versions, from the files alone, without GPU and
    torch. Source, machine and time of a build, and signatures, are not
    compared. Exit status 1 if the bundles differ.
    """
    from cgcompile.tools.diff.bundle_files import open_bundle
    from cgcompile.tools.diff.compare import IGNORED_FIELDS, compare

    from ..summary import signature, signed

    bundles = {"a": open_bundle(a), "b": open_bundle(b)}
    differences = compare(*bundles.values())
    if as_json:
        sides = {side: _origin(bundle, IGNORED_FIELDS) | {"signature": signature(bundle.path)} for side, bundle in bundles.items()}
        write_json(sides | {"different": bool(differences), "differences": [_plain(difference) for difference in differences]})
    elif not differences:
        show("no difference")
        signers = [signed(bundle.path) for bundle in bundles.values()]
        if signers[0] != signers[1]:
            show(record([("signed", "; ".join([f"{side.upper()} {claim}" for side, claim in zip(bundles, signers, strict=True)]))]))
    else:
        show(record([(side.upper(), _headline(bundle, signed(bundle.path))) for side, bundle in bundles.items()]))
        show("")
        show(record([(part, _rows(_once(list(rows)))) for part, rows in groupby(differences, key=lambda row: row.part)]))
    if differences:
        raise typer.Exit(FINDINGS)


def _origin(bundle: BundleFiles, fields: Sequence[str]) -> dict[str, Any]:
    origin = bundle.manifest.provenance
    return {"path": bundle.path, "name": bundle.manifest.name} | {name: getattr(origin, name) for name in fields}


def _headline(bundle: BundleFiles, signed: str) -> str:
    manifest = bundle.manifest
    built = f"built {manifest.provenance.created}" + ("" if signed == "no" else f", signed {signed}")
    return f"{bundle.path}: {manifest.name}, {manifest.target.kind} {manifest.target.arch}, {built}"


def _once(group: Sequence[Difference]) -> list[Difference]:
    """Merges differences of the self-test: one row for a difference that several proofs have, and one for all measured errors.
    Other parts stay unchanged."""
    from cgcompile.tools.diff.differences import Difference

    if group[0].part != "self-test":
        return list(group)
    by_text: dict[str, list[Difference]] = {}
    for difference in group:
        if not difference.measured:
            by_text.setdefault(_text(difference), []).append(difference)
    rows = [replace(first, name=f"{first.name}{f', and {len(more)} more' if more else ''}") for first, *more in by_text.values()]
    if proofs := {row.name for row in group if row.measured}:
        bound = "" if any(row.field == "error" and not row.measured for row in group) else ", all within their bounds"
        rows.append(Difference(part="self-test", name="proofs", note=f"{count(len(proofs), 'proof')} measured other errors{bound}"))
    return rows


def _rows(differences: Sequence[Difference]) -> Table:
    """Returns a line per difference, the number of hidden lines, and the sum of differing elements of all tensors."""
    shown, hidden = shortened(differences)
    rows = [(SIGNS[difference.change], difference.name, _text(difference)) for difference in shown]
    if hidden:
        counts = [difference.facts for difference in differences if "elements" in difference.facts]
        differ, elements = (sum([facts[name] for facts in counts]) for name in ("differ", "elements"))
        total = f"in all {differ} of {elements} elements differ" if elements else ""
        rows.append(("", f"and {hidden} more", total))
    return table(("", "", ""), rows)


def _text(difference: Difference) -> str:
    delta = {"added": difference.b, "removed": difference.a, "changed": f"{difference.a} -> {difference.b}"}[difference.change]
    return f"{difference.field} {difference.note or delta}".strip()


def _plain(difference: Difference) -> dict[str, Any]:
    fields = ("part", "name", "field", "change", "a", "b", "note", "measured")
    return {name: getattr(difference, name) for name in fields} | {"facts": dict(difference.facts)}
