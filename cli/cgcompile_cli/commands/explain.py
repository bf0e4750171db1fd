"""`cgcompile explain`: what a finding or an error means, and what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from ..output import count, safe, write_json

if TYPE_CHECKING:
    from cgcompile.util.explanations import Explanation

LEVELS = {"refuse": "no bundle can be built", "host": "runs on the host between graphs", "note": "for information"}
"""What a severity means, as `cgcompile check` says it."""

LABEL = 9
"""Columns of a field's name and the space behind it."""


def names(incomplete: str) -> list[str]:
    """For the shell's completion: the names that begin so."""
    return sorted({each.name for each in _all() if each.name.startswith(incomplete)})


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A finding's rule or an error's code, e.g. host-scalar, input-dtype.",
            show_default=False,
            autocompletion=names,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Explain a finding of `check` or an error: cause and cure.

    Without a name, lists all of them. Names may be typed as --json spells
    them, too: InputDtype is input-dtype.

    \b
    cgcompile explain host-scalar
    cgcompile explain
    """
    from cgcompile.util.explanations import nearest, spelled

    known = _all()
    if name is None:
        if as_json:
            write_json([_plain(each) for each in known])
        else:
            _list(known)
        return
    found = [each for each in known if each.name == spelled(name)]
    if not found:
        close = nearest(name, [each.name for each in known])
        told = f"did you mean {' or '.join(close)}?" if close else "`cgcompile explain` lists all names"
        raise UsageError(f"{name}: no finding or error has that name", told)
    if as_json:
        write_json([_plain(each) for each in found])
        return
    _write("\n\n".join(map(_text, found)))


def _all() -> tuple[Explanation, ...]:
    from cgcompile.util.explanations import explanations

    return explanations({"cgcompile_cli": UsageError.catalogue})


def _plain(each: Explanation) -> dict[str, object]:
    return {**asdict(each), "fields": dict(each.fields), "severities": list(each.severities)}


def about(each: Explanation) -> str:
    """`a finding: host (runs on the host between graphs)`, `an error of cgbundle: CallError, exit status 2`."""
    if each.kind == "error":
        return f"an error of {each.package}: {each.error}, exit status {each.exit_code}"
    told = [f"{severity} ({LEVELS[severity]})" for severity in each.severities]
    return f"a finding: {' or '.join(told)}" if told else "a rule without findings of its own"


def _text(each: Explanation) -> str:
    lines = [f"{each.name}  {about(each)}", f"  {each.headline}"]
    lines += [f"  {label:<{LABEL - 2}} {said}" for label, said in each.fields if said]
    return "\n".join(map(safe, lines))


def _list(known: Sequence[Explanation]) -> None:
    findings = [each for each in known if each.kind == "finding"]
    blocks = [[f"{count(len(findings), 'finding')} of `cgcompile check`"]]
    blocks[0] += _columns([(each.name, "/".join(each.severities), each.headline) for each in findings])
    for package in dict.fromkeys([each.package for each in known if each.package]):
        own = [each for each in known if each.package == package]
        rows = [(each.name, str(each.exit_code), each.headline) for each in own]
        blocks.append([f"{count(len(own), 'error')} of {package}, with the exit status", *_columns(rows)])
    _write("\n\n".join(map("\n".join, blocks)))


def _columns(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Two columns as wide as they need, and the text."""
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{name:<{first}}  {middle:<{second}}  {text}" for name, middle, text in rows]


def _write(text: str) -> None:
    """Text without Rich, which takes a third of the command's time to import."""
    sys.stdout.write(f"{text}\n")
