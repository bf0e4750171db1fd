"""`cgcompile explain`: explains the cause and the remedy of a finding, of an error, or of a dimension that is not padded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import CATALOGUE, UsageError
from ..output import count, safe, write_json

if TYPE_CHECKING:
    from cgcompile.util.explanations import Explanation

LEVELS = {"refuse": "no bundle can be built", "host": "runs on the host between graphs", "note": "for information"}
"""Meanings of the severities, as in `cgcompile check`."""

STAGES = {
    "of calls": ("CallError", "ProgramClosed", "SessionBusy", "EntryMissing", "StateMissing"),
    "of loading a bundle": ("BundleError", "MachineError", "OutOfMemory"),
    "of commands": ("UsageError",),
    "of builds": ("ModelError", "BuildError"),
}
"""The stages in which errors occur, and their classes."""

LAST = "inside the recorders (rare)"
RECORDERS = frozenset({
    "cupti-unavailable", "driver-call-failed", "recorder-failed", "parameters-unreadable",
    "image-unseen", "image-format", "loader-unknown", "recordings-differ", "address-disagrees",
    "module-state-differs", "module-state-unreadable", "gpu-visible", "lowering-broken",
    "measurements-broken", "kernel-failed", "kernel-too-large", "kernel-unsupported", "worker-died",
    "lifetime-broken", "arena-overlap", "place-invalid", "parameter-mismatch", "order-broken",
    "function-not-interpretable", "access-outside", "kernel-unreadable", "node-refused", "copy-refused",
    "attribute-refused", "memory-refused", "pointer-in-table",
})  # fmt: skip
"""Errors inside the recorders of CUDA graphs, which users rarely see."""

LABEL = 9
"""Columns of a field's name and the space after it."""


def names(incomplete: str) -> list[str]:
    """Returns the names with this prefix, for shell completion."""
    return sorted({explanation.name for explanation in _all() if explanation.name.startswith(incomplete)})


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A finding's rule or an error's code, e.g. host-scalar, input-dtype; or padding.",
            show_default=False,
            autocompletion=names,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Explain a finding of `check` or an error: cause and cure.

    Without a name, list all of them. InputDtype and input_dtype also mean
    input-dtype. `padding` explains why a dimension is not padded.

    \b
    cgcompile explain host-scalar
    cgcompile explain padding
    cgcompile explain
    """
    from cgcompile.util.explanations import nearest, spelled

    all_explanations = _all()
    if name is None:
        if as_json:
            write_json([_plain(explanation) for explanation in all_explanations])
        else:
            _list(all_explanations)
        return
    matches = [explanation for explanation in all_explanations if explanation.name == spelled(name)]
    if not matches:
        suggestions = nearest(name, [explanation.name for explanation in all_explanations])
        hint = f"did you mean {' or '.join(suggestions)}?" if suggestions else "`cgcompile explain` lists all names"
        raise UsageError(f"{name}: no finding or error has that name", hint)
    if as_json:
        write_json([_plain(explanation) for explanation in matches])
        return
    _write("\n\n".join(map(_text, matches)))


def _all() -> tuple[Explanation, ...]:
    from cgcompile.util.explanations import explanations

    return explanations({"cgcompile_cli": CATALOGUE})


def _plain(explanation: Explanation) -> dict[str, object]:
    return {**asdict(explanation), "fields": dict(explanation.fields), "severities": list(explanation.severities)}


def about(explanation: Explanation) -> str:
    """Returns `a finding: host (runs on the host between graphs)`, or `an error of cgbundle: CallError, exit status 2`."""
    if explanation.kind == "padding":
        return "what `build` and `inspect` say under that word"
    if explanation.kind == "error":
        return f"an error of {explanation.package}: {explanation.error}, exit status {explanation.exit_code}"
    levels = [f"{severity} ({LEVELS[severity]})" for severity in explanation.severities]
    return f"a finding: {' or '.join(levels)}" if levels else "a rule (it reports no findings itself)"


def _text(explanation: Explanation) -> str:
    lines = [f"{explanation.name}  {about(explanation)}", f"  {explanation.headline}"]
    lines += [line for label, content in explanation.fields if content for line in _field(label, content)]
    return "\n".join(map(safe, lines))


def _field(label: str, content: str) -> list[str]:
    """Returns one line, or two if the label is long."""
    return [f"  {label:<{LABEL - 2}} {content}"] if len(label) < LABEL - 1 else [f"  {label}", f"{'':<{LABEL + 1}}{content}"]


def _list(entries: Sequence[Explanation]) -> None:
    findings = [explanation for explanation in entries if explanation.kind == "finding"]
    blocks = [[f"{count(len(findings), 'finding')} of `cgcompile check`"]]
    blocks[0] += _columns([(finding.name, "/".join(finding.severities), finding.headline) for finding in findings])
    padding = [explanation for explanation in entries if explanation.kind == "padding"]
    blocks.append(["what `build` and `inspect` say", *_columns([(word.name, "", word.headline) for word in padding])])
    errors = [explanation for explanation in entries if explanation.kind == "error"]
    for title, group in _errors_by_stage(errors).items():
        rows = [(explanation.name, str(explanation.exit_code), explanation.headline) for explanation in group]
        blocks.append([f"{count(len(group), 'error')} {title}, with the exit status", *_columns(rows)])
    _write("\n\n".join(map("\n".join, blocks)))


def _errors_by_stage(errors: Sequence[Explanation]) -> dict[str, list[Explanation]]:
    """Groups the errors by stage, in the order of STAGES."""
    groups: dict[str, list[Explanation]] = {title: [] for title in (*STAGES, LAST)}
    for explanation in errors:
        title = next(title for title, classes in STAGES.items() if explanation.error in classes)
        groups[LAST if explanation.name in RECORDERS else title].append(explanation)
    return {title: group for title, group in groups.items() if group}


def _columns(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Formats rows: two columns with the minimum width, then a text."""
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{name:<{first}}  {middle:<{second}}  {text}" for name, middle, text in rows]


def _write(text: str) -> None:
    """Writes text without Rich, whose import takes a third of the command's time."""
    sys.stdout.write(f"{text}\n")
