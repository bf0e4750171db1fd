"""`cgcompile inspect`: what a bundle is, from its manifest and tables; nothing is loaded and nothing runs."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from ..options import BundlePath
from ..output import record, say, show, size, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from cgbundle.format.schema import Manifest, Program

    from ..output import Field

WIDTH = 100
"""Columns of a map where the output is no terminal and COLUMNS is not set."""


def inspect(
    bundle: BundlePath,
    graph: Annotated[
        str | None, typer.Option("--graph", metavar="KEY", help="Show steps, values and nodes of one int_key: 8, or 8x128.")
    ] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Show the kernels by number of launches and image size.")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Draw the memory of every int_key; with --graph KEY, what uses it when.")
    ] = False,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write everything as one page; - is stdout.")] = None,
    dot: Annotated[
        bool, typer.Option("--dot", help="Print the nodes of one int_key for Graphviz (default: the first int_key's).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show what a bundle holds.

    Signature, target, sizes, memory, files, findings and proof, from the manifest alone. --graph, --kernels, --memory, --dot and
    --html read the recordings, too. `cgcompile verify` checks every file.
    """
    from cgbundle.validate.bundle import checked_manifest

    from .. import int_keys, summary
    from ..inspection.overview import overview

    _check_options(graph, {"--kernels": kernels, "--memory": memory, "--html": html is not None, "--dot": dot, "--json": as_json})
    manifest = checked_manifest(bundle)
    programs = list(manifest.programs)
    if graph is not None:
        key = int_keys.parse(manifest, graph)
        programs = [next(each for each in programs if each.key == key)]
    if kernels:
        _kernels(bundle, manifest, as_json)
    elif memory:
        _memory(bundle, manifest, programs, as_json)
    elif html is not None:
        _html(bundle, manifest, html)
    elif dot:
        from ..inspection.dot import dot as drawn
        from ..inspection.nodes import read_nodes

        sys.stdout.write(drawn(manifest, programs[0], read_nodes(bundle, manifest, programs[0])))
    elif graph is not None:
        _graph(bundle, manifest, programs[0], as_json)
    elif as_json:
        write_json(summary.plain(bundle, manifest))
    else:
        show(record(overview(bundle, manifest)))


def _check_options(graph: str | None, given: dict[str, bool]) -> None:
    """Raises UsageError where two options ask for different things."""
    views = [name for name in ("--kernels", "--memory", "--html", "--dot") if given[name]]
    if len(views) > 1:
        raise UsageError(
            f"{views[0]} and {views[1]} show different things: they cannot be used together", "run inspect once for each"
        )
    if views and views[0] in ("--html", "--dot") and given["--json"]:
        raise UsageError(f"{views[0]} is not JSON: it cannot be used with --json", "leave one of them out")
    if graph is not None and views and views[0] in ("--html", "--kernels"):
        raise UsageError(f"{views[0]} shows all int_keys: it cannot be used with --graph", "leave one of them out")


def _kernels(path: str, manifest: Manifest, as_json: bool) -> None:
    from ..inspection.kernels import kernel_table, kernels

    rows = kernels(path, manifest)
    if as_json:
        write_json([row._asdict() for row in rows])
    elif rows:
        show(kernel_table(rows))
    else:
        show(record([("kernels", "none: this bundle has no recorded graphs")]))


def _html(path: str, manifest: Manifest, file: str) -> None:
    from ..page.file import check_place, write
    from ..page.page import page

    if file == "-":
        sys.stdout.write(page(path, manifest))
        return
    check_place(file, path)
    written = write(file, page(path, manifest))
    say(f"{file}: {size(written)}")


# --- recordings ---------------------------------------------------------------------------------------------------


def _graph(path: str, manifest: Manifest, program: Program, as_json: bool) -> None:
    from ..inspection.nodes import read_nodes
    from ..inspection.program_text import fitted, heading, node_columns, node_table, program_fields

    steps = read_nodes(path, manifest, program)
    if as_json:
        from .. import summary

        plain = next(p for p in summary.plain(path, manifest)["manifest"]["programs"] if tuple(p["key"]) == program.key)
        write_json(plain | {"nodes": [node.plain() for nodes in steps for node in nodes]})
        return
    show(record(program_fields(manifest, program)))
    cut = False
    for index, nodes in enumerate(steps):
        if program.steps[index].kind == "graph":
            show(record([("", ""), ("nodes", heading(manifest, program, index, nodes))]))
            whole = node_columns(nodes)
            fitting = fitted(whole, _width()) if sys.stdout.isatty() else whole
            show(node_table(fitting))
            cut = cut or fitting != whole
    if cut:
        say("lines are cut to the terminal's width; all of it: | less -S")


def _memory(path: str, manifest: Manifest, programs: Sequence[Program], as_json: bool) -> None:
    from .. import summary
    from ..inspection import memory_map, memory_text
    from ..inspection.nodes import read_nodes

    found = []
    for program in programs:
        steps = read_nodes(path, manifest, program)
        nodes = memory_map.order(steps)
        found.append((program, steps, memory_map.places(manifest, program, nodes)))
    if as_json:
        write_json({
            "memories": dict(manifest.memories),
            "programs": [
                {
                    "key": program.key, "arena": program.arena, "inputs": program.static,
                    "nodes": [(node.step, node.number, node.what) for nodes in steps for node in nodes],
                    "places": [place._asdict() for place in places],
                }
                for program, steps, places in found
            ],
        })  # fmt: skip
        return
    fields: list[Field] = [("memory", summary.memory(manifest)), ("weights", memory_text.weights_line(manifest))]
    if summary.state(manifest):
        fields.append(("state", summary.state(manifest)))
    parts: Sequence[RenderableType] = ()
    if not any(places for _, _, places in found):
        fields.append(("values", "in memory that the caller brings or the host region allocates during the call: nothing to draw"))
    elif len(found) == 1:
        parts = memory_text.one_program(manifest, *found[0], _width())
    else:
        parts = memory_text.all_programs(manifest, found, _width())
    for part in (record(fields), *parts):
        show(part)


def _width() -> int:
    return max(40, shutil.get_terminal_size((WIDTH, 24)).columns)
