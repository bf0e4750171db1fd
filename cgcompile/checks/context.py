"""What the rules are given, and how they say what they found."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.export import ExportedProgram, ExportGraphSignature
from torch.fx import Node

from cgbundle.format.schema import Finding

from ..export.exported import Exported
from ..model.side_effects import Obstacle
from ..model.user_code import called_from, place

Severity = Literal["refuse", "host", "note"]
"""As in `Finding`."""

REFUSE: Literal["refuse"] = "refuse"
HOST: Literal["host"] = "host"
NOTE: Literal["note"] = "note"
"""Severities: stops a build; puts a node on the host; information."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleContext:
    """`program`: the one of the exported that is looked at.  `functionalized`: the signature of its functional form; only there are
    writes in place listed.

    `conditionals`: branches and loops of a program become conditional nodes of its graph, as far as these can hold them.
    `cross_compiled`: no GPU captures it.
    `moved` and `data_dependent` follow an obstacle to the host (host_placement.py), `fallback_ops` the user keeps there.
    """

    exported: Exported
    program: ExportedProgram
    functionalized: ExportGraphSignature
    target: str
    conditionals: bool
    cross_compiled: bool
    fallback_ops: tuple[str, ...]
    moved: Mapping[str, str]
    data_dependent: frozenset[str]

    def calls(self) -> Iterator[tuple[Node, str]]:
        """Every operation, with the name of the node of the program that it is a part of."""
        return all_calls(self.program.graph_module)

    def obstacles(self, rule: str) -> Iterator[Obstacle]:
        """What a call of the model showed for a rule, and no operation shows."""
        return (obstacle for obstacle in self.exported.obstacles if obstacle.rule == rule)

    def effect(self, name: str) -> str:
        """What a finding of severity host leads to: the node of this name and what takes its value go to the host."""
        nodes = {node.name: node for node in self.program.graph.nodes}
        followers: set[str] = set()
        waiting = [nodes[name]] if name in nodes else []
        while waiting:
            for user in waiting.pop().users:
                if user.name not in followers and (user.name in self.data_dependent or user.name in self.moved):
                    followers.add(user.name)
                    waiting.append(user)
        after = sum(computes(nodes[follower]) for follower in followers)
        if not after:
            return "this operation runs on the host between two graphs"
        return f"this operation and the {'one' if after == 1 else after} after it run on the host between two graphs"


def all_calls(module: torch.fx.GraphModule, top: str = "") -> Iterator[tuple[Node, str]]:
    """Every operation of a program, with the name of its node `top` that it is a part of (itself for "")."""
    for node in module.graph.nodes:
        if node.op == "call_function":
            yield node, top or node.name
            for source in node.all_input_nodes:
                part = getattr(module, str(source.target), None) if source.op == "get_attr" else None
                if isinstance(part, torch.fx.GraphModule):
                    yield from all_calls(part, top or node.name)


def computes(node: Node) -> bool:
    """Whether a node is an operation that a reader would count: no element of a list, no size, no assertion."""
    return node.op == "call_function" and (
        isinstance(node.target, torch._ops.HigherOrderOperator)
        or (isinstance(node.target, torch._ops.OpOverload) and not re.search(r"::(_?assert|sym_|_assert)", node.target.name()))
    )


def finding(
    rule: str, severity: Severity, message: str, at: Node | Obstacle | None, effect: str, fix: str, node: str = ""
) -> Finding:
    """A finding at a node of the program, at an obstacle, or about the whole model (None).  `node` names the node of the
    program that `at` is a part of."""
    where, source = (at.where, at.source) if isinstance(at, Obstacle) else place(at)
    name = node or (at.name if isinstance(at, Node) else "")
    message += called_from(at) if isinstance(at, Node) and severity != NOTE else ""
    return Finding(rule=rule, severity=severity, message=message, node=name, where=where, source=source, effect=effect, fix=fix)


def operator(node: Node) -> str:
    """`nonzero` for aten.nonzero.default, `mylib.op` for another library's."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        packet = target.name().partition(".")[0].replace("::", ".")
        return packet.removeprefix("aten.")
    return target.name() if isinstance(target, torch._ops.HigherOrderOperator) else getattr(target, "__name__", str(target))
