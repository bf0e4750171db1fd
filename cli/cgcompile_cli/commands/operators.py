"""`cgcompile operators`: shows whether a target supports each PyTorch operator."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer

from ..errors import UsageError
from ..options import AnyTarget, chosen_by_default
from ..output import count, say, show, table, write_json
from ..progress import watching


def operators(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Only operators with this in their name.", show_default=False)
    ] = None,
    target: AnyTarget = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """List how a target handles PyTorch's operators.

    Operators are compiled, run on the host between graphs, or refused. The
    list depends on the operator's name alone; `cgcompile check` looks at
    the calls of a model.

    \b
    cgcompile operators --target sm_90
    cgcompile operators fft cumsum --target sm_90
    """
    from cgcompile.targets.choice import resolved
    from cgcompile.tools.operators import KINDS
    from cgcompile.tools.operators import operators as listed

    with watching(quiet) as progress:
        entries = listed(target, progress)
    matches = [operator for operator in entries if not names or any(name.removeprefix("aten.") in operator.name for name in names)]
    if not matches:
        raise UsageError(f"{' '.join(names or ())}: no operator of PyTorch has this in its name", "leave the name out to see all")
    if as_json:
        write_json({"target": resolved(target), "kinds": KINDS, "operators": [asdict(operator) for operator in matches]})
        return
    if target == "auto":
        say(chosen_by_default(resolved(target)))
    internal = [] if names else [operator for operator in matches if operator.name.removeprefix("aten.").startswith("_")]
    matches = [operator for operator in matches if operator not in internal]
    counts = Counter(operator.kind for operator in matches)
    show(table(("", ">", ""), [(kind, counts[kind], meaning) for kind, meaning in KINDS.items() if counts[kind]]))
    show("")
    show(table(("operator", "", ""), [(operator.name, operator.kind, operator.why) for operator in matches]))
    if internal and not quiet:
        say(f"and {count(len(internal), 'internal one')}, whose names begin with _: cgcompile operators _")
