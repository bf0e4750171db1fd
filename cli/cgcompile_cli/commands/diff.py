"""`cgcompile diff`: what differs between two bundles, from their files alone; nothing is loaded and nothing runs."""

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
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print every difference as JSON.")] = False,
) -> None:
    """Show what differs between two bundles.

    Target, signature, sizes, memory, weights, kernels, nodes, findings,
    options and versions, from the files alone: no GPU, no torch. Where and
    when a bundle was built and who signed it does not count. Exit status 1
    where they differ.
    """
    from cgcompile.tools.diff.bundle_files import open_bundle
    from cgcompile.tools.diff.compare import UNCOUNTED, compare

    from ..summary import signature, signed

    bundles = {"a": open_bundle(a), "b": open_bundle(b)}
    found = compare(*bundles.values())
    if as_json:
        sides = {side: _origin(bundle, UNCOUNTED) | {"signature": signature(bundle.path)} for side, bundle in bundles.items()}
        write_json(sides | {"different": bool(found), "differences": [_plain(each) for each in found]})
    elif not found:
        show("no difference")
        signers = [signed(bundle.path) for bundle in bundles.values()]
        if signers[0] != signers[1]:
            show(record([("signed", "; ".join([f"{side.upper()} {told}" for side, told in zip(bundles, signers, strict=True)]))]))
    else:
        show(record([(side.upper(), _headline(bundle, signed(bundle.path))) for side, bundle in bundles.items()]))
        show("")
        show(record([(part, _rows(_once(list(rows)))) for part, rows in groupby(found, key=lambda each: each.part)]))
    if found:
        raise typer.Exit(FINDINGS)


def _origin(bundle: BundleFiles, fields: Sequence[str]) -> dict[str, Any]:
    origin = bundle.manifest.provenance
    return {"path": bundle.path, "name": bundle.manifest.name} | {name: getattr(origin, name) for name in fields}


def _headline(bundle: BundleFiles, signed: str) -> str:
    manifest = bundle.manifest
    built = f"built {manifest.provenance.created}" + ("" if signed == "no" else f", signed {signed}")
    return f"{bundle.path}: {manifest.name}, {manifest.target.kind} {manifest.target.arch}, {built}"


def _once(found: Sequence[Difference]) -> list[Difference]:
    """Differences of the self-test as people want them: what proofs have in common once, and one line for all measured errors.
    Those of other parts are as they are."""
    from cgcompile.tools.diff.differences import Difference

    if found[0].part != "self-test":
        return list(found)
    alike: dict[str, list[Difference]] = {}
    for each in found:
        if not each.measured:
            alike.setdefault(_text(each), []).append(each)
    told = [replace(first, name=f"{first.name}{f', and {len(more)} more' if more else ''}") for first, *more in alike.values()]
    if proofs := {each.name for each in found if each.measured}:
        bound = "" if any(each.field == "error" and not each.measured for each in found) else ", all within their bounds"
        told.append(Difference(part="self-test", name="proofs", note=f"{count(len(proofs), 'proof')} measured other errors{bound}"))
    return told


def _rows(found: Sequence[Difference]) -> Table:
    """A line per difference, and where some are not shown, how many; the elements of all tensors together."""
    shown, hidden = shortened(found)
    rows = [(SIGNS[each.change], each.name, _text(each)) for each in shown]
    if hidden:
        counts = [each.facts for each in found if "elements" in each.facts]
        differ, elements = (sum([each[name] for each in counts]) for name in ("differ", "elements"))
        total = f"in all {differ} of {elements} elements differ" if elements else ""
        rows.append(("", f"and {hidden} more", total))
    return table(("", "", ""), rows)


def _text(each: Difference) -> str:
    told = {"added": each.b, "removed": each.a, "changed": f"{each.a} -> {each.b}"}[each.change]
    return f"{each.field} {each.note or told}".strip()


def _plain(each: Difference) -> dict[str, Any]:
    fields = ("part", "name", "field", "change", "a", "b", "note", "measured")
    return {name: getattr(each, name) for name in fields} | {"facts": dict(each.facts)}
