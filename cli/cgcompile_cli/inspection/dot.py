"""`inspect --dot`: the nodes of one int_key as Graphviz DOT.  Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..int_keys import spell
from ..output import safe
from .nodes import NodeRow
from .program_text import axes, memory

if TYPE_CHECKING:
    from cgbundle.format.schema import Manifest, Program

NODE_ATTRIBUTES = {
    "kernel": "shape=box", "memset": "shape=note", "memcpy": "shape=box, style=rounded", "empty": "shape=point",
    "conditional": "shape=diamond",
    "copy": "shape=box, style=rounded", "host": "shape=box3d",
}  # fmt: skip
LABEL_WIDTH = 120
"""Maximum characters of a line in a label."""


def dot(manifest: Manifest, program: Program, steps: Sequence[Sequence[NodeRow]]) -> str:
    """Returns the digraph.  Every graph step is a cluster of its nodes; a copy or host step is a node.  Dashed edges order the
    steps."""
    return "\n".join(["digraph {", *(f"  {line}" for line in _lines(manifest, program, steps)), "}", ""])


def _lines(manifest: Manifest, program: Program, steps: Sequence[Sequence[NodeRow]]) -> Iterator[str]:
    yield f"label={quoted(f'{manifest.name}, int_key {spell(program.key)}')}; labelloc=t; fontname=sans;"
    yield 'node [fontname=sans, fontsize=10]; edge [color="#666666"];'
    last: list[str] = []
    for index, nodes in enumerate(steps):
        step = program.steps[index]
        if step.kind != "graph":
            (node,) = nodes
            yield _node_line(node, f"step {index}")
        else:
            title = f"step {index}, graph {manifest.regions[step.region].name}"
            yield f"subgraph cluster_{index} {{"
            yield f"  label={quoted(title)}; style=rounded; color=gray;"
            for node in nodes:
                yield "  " + _node_line(node, str(node.number))
            yield "}"
        first = [_name(node) for node in nodes if not node.after and not node.depth]
        if len(last) * len(first) > 1:  # a point node avoids an edge for every pair
            yield f"s{index} [shape=point, width=0.05];"
            yield from [f"{node_name} -> s{index} [style=dashed];" for node_name in last]
            yield from [f"s{index} -> {node_name} [style=dashed];" for node_name in first]
        else:
            yield from [f"{source_name} -> {target_name} [style=dashed];" for source_name in last for target_name in first]
        for node in nodes:
            for source in node.after:
                style = ' [label="early"]' if source in node.early else ""
                yield f"n{index}_{source} -> {_name(node)}{style};"
        for node in nodes:
            for body, label in zip(node.bodies, _body_labels(node), strict=True):
                heads = [_name(node) for node in nodes if node.body == body and not node.after]
                yield from [f"{_name(node)} -> {head} [style=dotted, label={label}];" for head in heads]
        sources = {source for node in nodes for source in node.after}
        last = [_name(node) for node in nodes if node.number not in sources and not node.depth] or last


def _body_labels(node: NodeRow) -> tuple[str, ...]:
    """Returns the labels of the edges from a conditional node to its bodies."""
    if node.what.startswith("switch"):
        return tuple(map(str, range(len(node.bodies))))
    return ("iteration",) if node.what.startswith("while") else ("true", "false")[: len(node.bodies)]


def _name(node: NodeRow) -> str:
    return f"n{node.step}_{node.number}"


def _node_line(node: NodeRow, head: str) -> str:
    size = f"grid {axes(node.grid)}  block {axes(node.block)}" if node.grid else ""
    lines = [line for line in (f"{head}  {node.what}", size, *memory(node).split("; ")) if line]
    label = "\\l".join([_escaped(line if len(line) <= LABEL_WIDTH else f"{line[:LABEL_WIDTH]}...") for line in lines]) + "\\l"
    return f'{_name(node)} [{NODE_ATTRIBUTES[node.kind]}, label="{label}", tooltip={quoted(node.what)}];'


def quoted(text: str) -> str:
    """Quotes `text` as a DOT string."""
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    """Escapes text inside quotes, so that it neither ends the string nor begins a Graphviz escape."""
    return safe(text).replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;")
