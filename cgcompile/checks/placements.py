"""placements: which nodes of the program run on the host, and why.  What the partitioner is given."""

from __future__ import annotations

from collections.abc import Sequence

from cgbundle.format.schema import Finding

from ..export.exported import Exported, Traced
from . import flow
from .subject import HOST
from .weights import weight_names

FOLLOWER = "data-dependent-follower"
"""The reason of an operation that has no finding of its own: it takes, or gives, a value whose size or number depends on data, and
such values never leave the host."""


def placements(findings: Sequence[Finding], exported: Exported | Traced) -> dict[str, str]:
    """node name -> rule, for every operation of `exported.program.graph` that runs on the host: those with a finding of severity
    host, those that follow them, and those that the user's code runs on the CPU.  Empty without such findings."""
    causes = {each.node: each.rule for each in findings if each.severity == HOST and each.node}
    if not causes:
        return {}
    graph = exported.program.graph
    found = dict.fromkeys(flow.loose(graph), FOLLOWER) | dict(flow.moved(graph, weight_names(exported.program))) | causes
    return {node.name: found[node.name] for node in graph.nodes if node.name in found}
