"""Values of inputs that a graph writes to, read before it writes: a pass of Inductor's.

A graph ends with copies of new values to what it writes to.  Inductor takes operations out that change nothing, copies too
(`remove_noop_ops` in torch/_inductor/fx_passes/post_grad.py).  Two buffers that are swapped then get one and the same value: the
second one reads the first when that is written already (torch 2.11 and 2.13).  The pass runs before, and makes such values by an
operation that stays: turning a tensor over along no axis.

Private interfaces (torch 2.11, 2.13): the option `post_grad_custom_pre_pass`, `CustomGraphPass`, `get_hash_for_files`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

COPY = torch.ops.aten.copy_.default

INPUTS = ("placeholder", "get_attr")
"""Kinds of nodes for what a graph is given; code that is compiled ahead for a processor has buffers as attributes."""

SIMPLE = frozenset({
    "clone", "contiguous", "to", "_to_copy", "add", "sub", "mul", "div", "pow", "copy", "cat", "repeat", "where", "alias", "slice",
    "slice_scatter", "constant_pad_nd", "convert_element_type", "device_put", "ceil", "floor", "round", "trunc",
})  # fmt: skip
"""Operations beside views that may change nothing, depending on what they are given."""


class ReadOldValues(CustomGraphPass):
    """The pass, for the option above."""

    def __call__(self, graph: Graph) -> None:
        read_old_values(graph)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def read_old_values(graph: Graph) -> None:
    """Changes the graph in place: what is copied to an input, and may be another one that was written before it, is made first.
    What may be an attribute that is written at all is: Inductor does not keep the order of such copies."""
    copies = [node for node in graph.find_nodes(op="call_function", target=COPY) if node.args[0].op in INPUTS]
    written = {str(copy.args[0].target) for copy in copies if copy.args[0].op == "get_attr"}
    for copy in copies:
        place, value = copy.args[:2]
        if simple_sources(value) & (written - {str(place.target)}):
            first = next(node for node in graph.nodes if node.op != "placeholder")
            with graph.inserting_before(first) if value.op == "placeholder" else graph.inserting_after(value):
                made = graph.call_function(torch.ops.prims.rev.default, (value, []))
            made.meta = {name: value.meta[name] for name in ("val", "tensor_meta") if name in value.meta}
            copy.update_arg(1, made)
        written.add(str(place.target))


def simple_sources(value: Node) -> set[str]:
    """The inputs that a value may be, for all that a compiler can find out about its operations, by name."""
    found: set[str] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        packet = getattr(each.target, "overloadpacket", None)
        view = getattr(each.target, "is_view", False) or each.target is operator.getitem
        if each.op in INPUTS:
            found.add(str(each.target))
        elif view or getattr(packet, "__name__", "") in SIMPLE:
            waiting += each.all_input_nodes
    return found
