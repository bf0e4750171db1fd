"""The input of the rules, and helpers that create findings."""

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

REFUSE: Literal["refuse"] = "refuse"
HOST: Literal["host"] = "host"
NOTE: Literal["note"] = "note"
"""The severities: refuse stops a build, host moves a node to the host, note is information."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleContext:
    """The input of a rule: a program and what is known about it.

    `program` is one of the programs in `exported`.  `functionalized` is the signature of its functional form, which lists
    mutations.  `conditionals`: the recorder creates conditional nodes for branches and loops.  `cross_compiled`: no GPU captures
    the program.  `moved` and `data_dependent`: the nodes that also run on the host if a finding has severity host
    (host_placement.py).  `fallback_ops` are operators that the user keeps on the host.
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
        """Yields every operation, with the name of the top-level node that contains it."""
        return all_calls(self.program.graph_module)

    def obstacles(self, rule: str) -> Iterator[Obstacle]:
        """Yields the obstacles of a rule: effects of a call or of the export that are no operation."""
        return (obstacle for obstacle in self.exported.obstacles if obstacle.rule == rule)

    def effect(self, name: str) -> str:
        """Returns the effect of a finding of severity host, as a text: this node and the nodes that use its value run on the
        host."""
        nodes = {node.name: node for node in self.program.graph.nodes}
        followers: set[str] = set()
        waiting = [nodes[name]] if name in nodes else []
        while waiting:
            for user in waiting.pop().users:
                if user.name not in followers and (user.name in self.data_dependent or user.name in self.moved):
                    followers.add(user.name)
                    waiting.append(user)
        n_followers = sum(computes(nodes[follower]) for follower in followers)
        if not n_followers:
            return "this operation runs on the host between two graphs"
        return f"this operation and the {'one' if n_followers == 1 else n_followers} after it run on the host between two graphs"


def all_calls(module: torch.fx.GraphModule, top: str = "") -> Iterator[tuple[Node, str]]:
    """Yields every operation of a module, with the name of the top-level node that contains it.  `top` is the name of this node for
    a nested module, "" for the program itself."""
    for node in module.graph.nodes:
        if node.op == "call_function":
            yield node, top or node.name
            for source in node.all_input_nodes:
                part = getattr(module, str(source.target), None) if source.op == "get_attr" else None
                if isinstance(part, torch.fx.GraphModule):
                    yield from all_calls(part, top or node.name)


def computes(node: Node) -> bool:
    """Returns whether a node is an operation that a user would count: not a list element, size or assertion."""
    return node.op == "call_function" and (
        isinstance(node.target, torch._ops.HigherOrderOperator)
        or (isinstance(node.target, torch._ops.OpOverload) and not re.search(r"::(_?assert|sym_|_assert)", node.target.name()))
    )


def finding(
    rule: str, severity: Severity, message: str, at: Node | Obstacle | None, effect: str, fix: str, node: str = ""
) -> Finding:
    """Creates a finding at a node or an obstacle, or about the whole model (`at` is None).  `node` is the name of the top-level
    node that contains `at`."""
    where, source = (at.where, at.source) if isinstance(at, Obstacle) else place(at)
    name = node or (at.name if isinstance(at, Node) else "")
    message += called_from(at) if isinstance(at, Node) and severity != NOTE else ""
    return Finding(rule=rule, severity=severity, message=message, node=name, where=where, source=source, effect=effect, fix=fix)


def operator(node: Node) -> str:
    """Returns `nonzero` for aten.nonzero.default, and `mylib.op` for an operator of another library."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        packet = target.name().partition(".")[0].replace("::", ".")
        return packet.removeprefix("aten.")
    return target.name() if isinstance(target, torch._ops.HigherOrderOperator) else getattr(target, "__name__", str(target))
