"""`cgcompile inspect`: describes a bundle by its manifest and tables; loads and runs nothing."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from ..options import BundlePath, recorded_keys
from ..output import record, say, show, size, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from cgbundle.format.schema import EntrySpec, Manifest, Program

    from ..inspection.memory_map import Place
    from ..inspection.nodes import NodeRow
    from ..output import Field

WIDTH = 100
"""Columns of a map and of the kernels, if stdout is not a terminal and COLUMNS is not set."""


def inspect(
    bundle: BundlePath,
    graph: Annotated[
        str | None,
        typer.Option(
            "--graph",
            metavar="KEY",
            help="Show steps, values and nodes of one int_key: 8, 8x128, decode:8.",
            autocompletion=recorded_keys,
        ),
    ] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Show the kernels by number of launches and image size.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Draw the memory of every int_key; with --graph KEY, by step.")] = False,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write everything as one page; - is stdout.")] = None,
    dot: Annotated[
        bool, typer.Option("--dot", help="Print the nodes of one int_key for Graphviz (default: the first int_key's).")
    ] = False,
    variant: Annotated[
        str | None,
        typer.Option("--variant", metavar="NAME", help="The variant, if there are several, e.g. sm_90 (default: the first)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show what a bundle holds.

    Show signature, target, sizes, memory, files, findings and verification,
    from the manifest alone. --graph, --kernels, --memory, --dot and --html
    also read the recordings. `cgcompile verify` checks every file.
    """
    from dataclasses import replace

    from cgbundle.validate.bundle import checked_manifest

    from .. import int_keys, summary
    from ..inspection.overview import overview

    _check_options(graph, {"--kernels": kernels, "--memory": memory, "--html": html is not None, "--dot": dot, "--json": as_json})
    manifest = checked_manifest(bundle, variant)
    if manifest.engine is not None:
        views = {"--graph": graph is not None, "--kernels": kernels, "--memory": memory, "--html": html is not None, "--dot": dot}
        return _engine(bundle, manifest, [name for name, chosen in views.items() if chosen], as_json)
    entry, chosen = manifest.entries[0], None
    if graph is not None:
        entry, chosen = int_keys.find(manifest, graph)
    programs = tuple([program for program in entry.programs if chosen in (None, program.key)])
    if kernels:
        _kernels(bundle, manifest, as_json)
    elif memory:
        _memory(bundle, manifest, manifest.entries if chosen is None else (replace(entry, programs=programs),), as_json)
    elif html is not None:
        _html(bundle, manifest, html)
    elif dot:
        from ..inspection.dot import dot as drawn
        from ..inspection.nodes import read_nodes

        sys.stdout.write(drawn(manifest, programs[0], read_nodes(bundle, manifest, entry, programs[0])))
    elif graph is not None:
        _graph(bundle, manifest, entry, programs[0], as_json)
    elif as_json:
        write_json(summary.plain(bundle, manifest))
    else:
        show(record(overview(bundle, manifest)))


def _check_options(graph: str | None, options: dict[str, bool]) -> None:
    """Raises UsageError for options that exclude each other."""
    views = [name for name in ("--kernels", "--memory", "--html", "--dot") if options[name]]
    if len(views) > 1:
        raise UsageError(
            f"{views[0]} and {views[1]} show different things: they cannot be used together", "run inspect once for each"
        )
    if views and views[0] in ("--html", "--dot") and options["--json"]:
        raise UsageError(f"{views[0]} is not JSON: it cannot be used with --json", "leave one of them out")
    if graph is not None and views and views[0] in ("--html", "--kernels"):
        raise UsageError(f"{views[0]} shows all int_keys: it cannot be used with --graph", "leave one of them out")


def _engine(path: str, manifest: Manifest, views: Sequence[str], as_json: bool) -> None:
    """Shows a bundle with graphs of an engine.  Raises UsageError for `views` that it does not support."""
    from ..inspection import engine

    if views:
        text = f"{views[0]} shows programs: {path} holds graphs of an engine"
        raise UsageError(text, "leave the option out: inspect lists the graphs and their tensors")
    if as_json:
        write_json(engine.plain(path, manifest))
    else:
        show(record(engine.overview(path, manifest)))


def _kernels(path: str, manifest: Manifest, as_json: bool) -> None:
    from ..inspection.kernels import kernel_table, kernels

    rows = kernels(path, manifest)
    if as_json:
        write_json([row._asdict() for row in rows])
    elif rows:
        show(kernel_table(rows), width=_width())
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


def _graph(path: str, manifest: Manifest, entry: EntrySpec, program: Program, as_json: bool) -> None:
    from ..inspection.nodes import read_nodes
    from ..inspection.program_text import fitted, heading, node_columns, node_table, program_fields

    steps = read_nodes(path, manifest, entry, program)
    if as_json:
        from .. import summary

        rows = summary.plain_programs(manifest, entry)
        plain = next(row for row in rows if tuple(row["key"]) == program.key)
        write_json(plain | {"nodes": [node.plain() for nodes in steps for node in nodes]})
        return
    show(record(program_fields(manifest, entry, program)))
    truncated = False
    for index, nodes in enumerate(steps):
        if program.steps[index].kind == "graph":
            show(record([("", ""), ("nodes", heading(manifest, program, index, nodes))]))
            columns = node_columns(nodes)
            fitted_columns = fitted(columns, _width()) if sys.stdout.isatty() else columns
            show(node_table(fitted_columns))
            truncated = truncated or fitted_columns != columns
    if truncated:
        say("lines are cut to the terminal's width; all of it: | less -S")


def _memory(path: str, manifest: Manifest, entries: Sequence[EntrySpec], as_json: bool) -> None:
    """Shows memory.  `entries`: the entries and programs to show."""
    from .. import summary
    from ..inspection import memory_map, memory_text
    from ..inspection.nodes import read_nodes

    by_entry: list[list[tuple[Program, Sequence[Sequence[NodeRow]], list[Place]]]] = []
    for entry in entries:
        by_entry.append([])
        for program in entry.programs:
            steps = read_nodes(path, manifest, entry, program)
            by_entry[-1].append((program, steps, memory_map.places(manifest, entry, program, memory_map.order(steps))))
    if as_json:
        write_json({
            "memories": dict(manifest.memories),
            "programs": [
                {
                    "entry": entry.name, "key": program.key, "arena": program.arena, "inputs": program.static,
                    "nodes": [(node.step, node.number, node.what) for nodes in steps for node in nodes],
                    "places": [place._asdict() for place in places],
                }
                for entry, rows in zip(entries, by_entry, strict=True)
                for program, steps, places in rows
            ],
        })  # fmt: skip
        return
    fields: list[Field] = [("memory", summary.memory(manifest)), ("weights", memory_text.weights_line(manifest))]
    if summary.state(manifest):
        fields.append(("state", summary.state(manifest)))
    parts: list[RenderableType] = []
    if not any(places for rows in by_entry for _, _, places in rows):
        fields.append(("values", "in memory that the caller brings or the host region allocates during the call: nothing to draw"))
        entries = ()
    for entry, rows in zip(entries, by_entry, strict=False):
        if len(entries) > 1:
            parts.append(record([("entry", entry.name)]))
        drawn = memory_text.one_program(entry, *rows[0], _width()) if len(rows) == 1 else ()
        parts += drawn or memory_text.all_programs(manifest, entry, rows, _width())
    for part in (record(fields), *parts):
        show(part)


def _width() -> int:
    return max(40, shutil.get_terminal_size((WIDTH, 24)).columns)
