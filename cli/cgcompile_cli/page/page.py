"""`inspect --html`: a self-contained page about a bundle.

Every name from a bundle passes through `markup.text`.  The page's content security policy allows only its own style and script, by
hash.  So a bundle cannot run code in the page.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from cgbundle.format.file_names import all_programs
from cgbundle.format.safetensors import nbytes
from cgcompile.bundle import manifest_text

from .. import summary
from ..inspection import program_rows
from ..inspection.kernels import kernels
from ..inspection.memory_map import order, places
from ..inspection.nodes import NodeRow, read_nodes
from ..int_keys import spell
from ..output import listed, shortened, size
from . import parts as pageparts
from .markup import Html, joined, tag, text

if TYPE_CHECKING:
    from cgbundle.format.schema import EntrySpec, Finding, Manifest

GENERATOR = "cgcompile inspect"
"""The generator in the page's header.  `page.file` overwrites a file only if it has this generator."""

OPENING = f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="generator" content="{GENERATOR}">\n'

MOST_WEIGHTS = 400
"""Maximum rows of the list of weights.  The largest weights come first."""


def page(path: str, manifest: Manifest) -> str:
    """Returns the page of the bundle at `path`.  Raises file-damaged, table-invalid."""
    steps = [[read_nodes(path, manifest, entry, program) for program in entry.programs] for entry in manifest.entries]
    rows = kernels(path, manifest)
    sections: list[tuple[str, str, Iterable[object]]] = [
        section
        for entry, entry_steps in zip(manifest.entries, steps, strict=True)
        for section in _entry(path, manifest, entry, entry_steps)
    ]
    sections += [
        *([("kernels", "Kernels", pageparts.kernel_rows(rows))] if rows else []),
        *(
            [("donations", "Donations", [tag("ul", *[tag("li", line) for line in summary.donation_lines(manifest)])])]
            if manifest.donations
            else []
        ),
        ("weights", "Weights", _weights(manifest)),
        ("provenance", "Provenance", _provenance(path, manifest)),
    ]
    nav = tag("nav", *[tag("a", title, href=f"#{name}") for name, title, _ in sections], aria_label="Sections")
    body = [tag("section", tag("h2", title), *parts, id=name) for name, title, parts in sections]
    style, script = _resource("page.css"), _resource("page.js")
    head = [
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{manifest.name} - cgcompile bundle"),
        Html(f"<style>{style}</style>"),
    ]
    top = _header(manifest, [nodes for entry_steps in steps for nodes in entry_steps])
    lines = [*head, "</head>", "<body>", top, nav, tag("main", *body), _footer(manifest)]
    return OPENING + "\n".join(lines) + f"\n<script>{script}</script>\n</body>\n</html>\n"


def _entry(
    path: str, manifest: Manifest, entry: EntrySpec, steps: Sequence[Sequence[Sequence[NodeRow]]]
) -> list[tuple[str, str, Iterable[object]]]:
    """Returns the sections of an entry: (id, title, parts).  If there are several entries, ids and titles contain its name."""
    maps = [places(manifest, entry, program, order(nodes)) for program, nodes in zip(entry.programs, steps, strict=True)]
    suffix, title_suffix = (f"-{entry.name}", f" of {entry.name}") if len(manifest.entries) > 1 else ("", "")
    sections: list[tuple[str, str, Iterable[object]]] = [
        ("signature", "Signature", _signature(path, manifest, entry)),
        ("regions", "Regions", pageparts.step_boxes(manifest, entry, steps)),
        ("findings", "Findings", _findings(manifest, entry)),
        ("sizes", "Sizes", _sizes(manifest, entry)),
        ("memory", "Memory", pageparts.memory(manifest, entry, steps, maps)),
    ]
    if any(step.kind == "graph" for program in entry.programs for step in program.steps):
        sections.append(("nodes", "Nodes", pageparts.nodes(manifest, entry, steps)))
    return [(f"{name}{suffix}", f"{title}{title_suffix}", parts) for name, title, parts in sections]


def _resource(name: str) -> str:
    """Returns the text of a file in this folder."""
    with open(os.path.join(os.path.dirname(__file__), name), encoding="utf-8") as file:
        return file.read()


def _policy(style: str, script: str) -> str:
    """Returns the content security policy, which allows only this style and this script, by their SHA-256."""
    sums = [base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in (style, script)]
    return f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'sha256-{sums[0]}'; script-src 'sha256-{sums[1]}'"


def _header(manifest: Manifest, steps: Sequence[Sequence[Sequence[NodeRow]]]) -> Html:
    memories = dict(manifest.memories)
    most = max([sum(node.kind not in ("copy", "host") for nodes in step for node in nodes) for step in steps], default=0)
    severities = [finding.severity for entry in manifest.entries for finding in entry.findings]
    facts = [
        ("int_keys", len(all_programs(manifest))),
        *([("GPUs", manifest.world.size)] if manifest.world else []),
        ("on disk", size(manifest_text.bundle_bytes(manifest))),
        ("weights", size(memories.get("weights", 0))),
        *([("state", size(memories["state"]))] if memories.get("state") else []),
        *([("arena, shared by all sizes", size(memories["arena"]))] if memories.get("arena") else []),
        *([("kernel images", size(memories["code"]))] if memories.get("code") else []),
        *([("nodes of the largest int_key", most)] if most else []),
        ("findings" + (f": {', '.join(dict.fromkeys(severities))}" if severities else ""), len(severities)),
    ]
    cards = [tag("li", tag("b", value), tag("small", name)) for name, value in facts]
    origin = manifest.provenance
    return tag(
        "header", tag("h1", manifest.name), tag("p", summary.target(manifest.target), class_="soft"),
        tag("p", f"built {origin.created} from ", tag("code", origin.source), class_="soft"), tag("ul", *cards, class_="facts"),
    )  # fmt: skip


def _signature(path: str, manifest: Manifest, entry: EntrySpec) -> Iterator[Html]:
    yield pageparts.table(("", "name", "dtype", "shape", ""), summary.signature_rows(manifest, entry), "near")
    yield tag("pre", joined([text(line) for line in summary.load_lines(path, manifest, (entry,))], "\n"))


def _sizes(manifest: Manifest, entry: EntrySpec) -> Iterator[Html]:
    yield tag("p", summary.sizes(manifest, entry))
    if entry.dimensions:
        yield tag("ul", *[tag("li", summary.padding(dimension)) for dimension in entry.dimensions])
    names = " x ".join([dimension.name for dimension in entry.dimensions]) or "int_key"
    heads = (names, "steps", ">arena", ">inputs", "proof", ">error", ">allowed", *program_rows.distance_head(entry))
    yield pageparts.table(heads, program_rows.program_rows(entry), "near")
    if rows := program_rows.self_test_rows(manifest, entry):
        yield pageparts.table(("", ">error", ">allowed"), rows, "near")


def _findings(manifest: Manifest, entry: EntrySpec) -> Iterator[Html]:
    if not (entry.findings or manifest.allowed):
        yield tag("p", "No findings, and none was allowed.")
    yield from map(_finding, entry.findings)
    if manifest.allowed:
        yield tag("p", f"Allowed: {', '.join(manifest.allowed)}.")


def _finding(finding: Finding) -> Html:
    parts = [tag("p", tag("b", f"{finding.severity} {finding.rule}"), ": ", finding.message)]
    if finding.where or finding.source:
        parts.append(tag("pre", joined([text(line) for line in (finding.where, finding.source) if line], "\n")))
    rows = [(name, value) for name, value in (("effect", finding.effect), ("fix", finding.fix), ("node", finding.node)) if value]
    parts.append(_pairs(rows))
    return tag("div", *parts, class_=f"finding {finding.severity}")


def _pairs(rows: Iterable[tuple[str, object]]) -> Html:
    return tag("dl", *[part for name, value in rows for part in (tag("dt", name), tag("dd", value))])


def _weights(manifest: Manifest) -> Iterator[Html]:
    state = summary.state(manifest)
    if state:
        yield tag("p", joined(map(text, state), "; "))
    sized = sorted(
        ((nbytes(weight.dtype, weight.shape), weight) for weight in manifest.weights), key=lambda row: (-row[0], row[1].name)
    )
    shown, hidden = shortened(sized, MOST_WEIGHTS)
    rows: list[tuple[object, ...]] = [
        (tag("code", w.name), w.dtype, list(w.shape), size(number), w.memory, w.tensor if w.tensor != w.name else "")
        for number, w in shown
    ]
    if hidden:
        rows.append((f"and {hidden} smaller ones", "", "", "", "", ""))
    head = tag("summary", summary.weights(manifest)[0], tag("small", "largest first"))
    heads = ("name", "dtype", "shape", ">bytes", "memory", "shares the tensor of")
    yield tag("details", head, pageparts.table(heads, rows, "roomy"))


def _provenance(path: str, manifest: Manifest) -> Iterator[Html]:
    origin = manifest.provenance
    yield _pairs([
        ("built", f"{origin.created} from {origin.source}"),
        ("on", origin.machine),
        ("with", ", ".join([f"{name} {version}" for name, version in origin.versions])),
        ("options", ", ".join([f"{name}={value}" for name, value in origin.options]) or "none"),
        ("signed", summary.signed(path)),
        ("format", manifest.version),
    ])  # fmt: skip
    rows = [(tag("code", file.path), size(file.bytes), file.sha256[:16]) for file in manifest.files]
    head = tag("summary", summary.bulk(manifest), tag("small", "with the first 16 hexadecimal digits of their SHA-256"))
    yield tag("details", head, pageparts.table(("file", ">bytes", "SHA-256"), rows, "roomy"))


def _footer(manifest: Manifest) -> Html:
    several_entries = len(manifest.entries) > 1
    keys = [(f"{entry.name}:" if several_entries else "", program.key) for entry in manifest.entries for program in entry.programs]
    names = listed([prefix + spell(key) for prefix, key in keys])
    return tag("footer", f"int_keys {names}. Written by {GENERATOR}; the page loads nothing and sends nothing.")
