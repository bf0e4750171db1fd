"""Runs two graphs with the same operators side by side: at a short size, and padded at a long size.  Tries each operator
separately."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg
from torch.utils._pytree import tree_leaves, tree_map

from ...model.devices.index_guard import FAILURES
from .operator_trials import padded_operator, run_once
from .padded_call import SHAPE_ONLY, Body, ChangedByPadding, PaddedCall, place_of
from .padded_values import PaddedDimension, PaddedValue, alike, placed, same_spot

BLOCKS = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast"})
"""Higher-order operators that run a graph once."""

WHOLE = frozenset({"flex_attention"})
"""Higher-order operators that are tried as one operator, because their graphs compute only one element."""


@dataclass(frozen=True, slots=True)
class PaddedRun:
    """A run of two graphs.  The dimension is short in one and padded in the other."""

    along: PaddedDimension

    def graphs(self, short: GraphModule, long: GraphModule, inputs: Sequence[PaddedValue]) -> list[PaddedValue]:
        """Returns the results of both graphs.  Raises ChangedByPadding."""
        if operators(short) != operators(long):  # the graphs may be bodies of a branch or a loop
            raise ChangedByPadding(f"the model has other operators at another size of {self.along.name}")
        values: dict[Node, Any] = {}
        remaining_inputs = iter(inputs)
        pairs = list(zip(short.graph.nodes, long.graph.nodes, strict=True))
        last = {source: node for node, _ in pairs for source in node.all_input_nodes}
        needed = _needed(short)
        for node, twin in pairs:
            if node.op == "placeholder":
                values[node] = next(remaining_inputs)
            elif node.op == "get_attr":
                values[node] = self._attribute(_attribute(short, node.target), _attribute(long, twin.target))
            elif node.op == "output":
                outputs = tree_leaves(map_arg(node.args[0], values.__getitem__))
                return [output if isinstance(output, PaddedValue) else PaddedValue(output, output) for output in outputs]
            elif node in needed:
                values[node] = self._called(node, twin, values)
            for source in node.all_input_nodes:
                if last[source] is node:
                    values.pop(source, None)
        raise AssertionError("a graph ends with its output")

    def _attribute(self, short: Any, long: Any) -> Any:
        if isinstance(short, GraphModule):
            return Body(short, long)
        same_tensor = isinstance(short, torch.Tensor) and short.shape == long.shape and alike(short, long)
        if short is long or same_tensor:
            return PaddedValue(short, short)
        return PaddedValue(short, long, why=f"a constant of the model differs between the sizes of {self.along.name}")

    def _called(self, node: Node, twin: Node, values: Mapping[Node, Any]) -> Any:
        counterparts = dict(zip(twin.all_input_nodes, node.all_input_nodes, strict=True))
        short = map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        long = map_arg((twin.args, dict(twin.kwargs)), lambda operand: values[counterparts[operand]])
        if node.target is operator.getitem and not isinstance(short[0][0], PaddedValue):
            return short[0][0][node.args[1]]
        call = PaddedCall(node, short, long, [leaf for leaf in tree_leaves(short) if isinstance(leaf, PaddedValue)])
        if call.name not in SHAPE_ONLY and (why := next((value.why for value in call.values if value.why), "")):
            raise ChangedByPadding(why)
        if not call.grows:
            base = {id(value): (value.short, value.short) for value in call.values}
            return tree_map(lambda leaf: PaddedValue(leaf, leaf, depends=call.depends), run_once(call, call.at_short, base))
        if not isinstance(node.target, torch._ops.HigherOrderOperator) or call.name in WHOLE:
            try:
                return padded_operator(call, self.along)
            except FAILURES as failure:  # a comparison fails: PyTorch has no minimum or no equality for some dtypes
                raise ChangedByPadding(f"{call.name} cannot be compared at two sizes{place_of(call.node)}") from failure
        return self._higher_order(call)

    def _higher_order(self, call: PaddedCall) -> Any:
        args = call.short[0]
        if call.name in BLOCKS:
            at = next(at for at, argument in enumerate(args) if isinstance(argument, Body))
            return tuple(self.graphs(args[at].short, args[at].long, tree_leaves(args[at + 1 :])))
        if call.name == "cond":
            return self._cond(call, *args)
        if call.name == "while_loop":
            return self._while_loop(call, *args)
        raise ChangedByPadding(
            f"the effect of {call.name} on padded elements along {self.along.name} is not known{place_of(call.node)}"
        )

    def _cond(self, call: PaddedCall, condition: Any, first: Body, second: Body, operands: Sequence[PaddedValue]) -> Any:
        branches = [self.graphs(body.short, body.long, operands) for body in (first, second)]
        chosen = branches[not bool(condition.short if isinstance(condition, PaddedValue) else condition)]
        return tuple([self._either(call, output, pair) for output, pair in zip(chosen, zip(*branches, strict=True), strict=True)])

    def _either(self, call: PaddedCall, output: PaddedValue, pair: Sequence[PaddedValue]) -> PaddedValue:
        """Returns the output of the branch that ran.  Its padded elements are unknown: another call may run the other branch."""
        why = next((padded.why for padded in pair if padded.why), "")
        if not why and not same_spot(*[padded.spot for padded in pair]):
            where = f"along {self.along.name} at different positions{place_of(call.node)}"
            why = f"the branches of {call.name} return the elements {where}"
        return replace(_unknown(output), why=why)

    def _while_loop(
        self, call: PaddedCall, condition: Body, body: Body, carried: Sequence[PaddedValue], others: Sequence[PaddedValue]
    ) -> Any:
        """Proves by induction: one iteration keeps every carried value equal at both sizes, whatever the padded elements are."""
        before = [_unknown(padded) for padded in carried]
        (continues,) = self.graphs(condition.short, condition.long, [*before, *others])
        after = self.graphs(body.short, body.long, [*before, *others])
        if why := next((padded.why for padded in (continues, *after) if padded.why), ""):
            raise ChangedByPadding(why)
        if not all(same_spot(one.spot, two.spot) for one, two in zip(before, after, strict=True)):
            raise ChangedByPadding(f"{call.name} moves what lies along {self.along.name}{place_of(call.node)}")
        chosen = {id(value): (value.short, value.long) for value in call.values}
        final_values = [tree_leaves(run_once(call, run, chosen)) for run in (call.at_short, call.at_long)]
        return tuple(
            [
                replace(padded, short=short, long=placed(long, padded.spot, short) if padded.spot else short)
                for padded, short, long in zip(before, *final_values, strict=True)
            ]
        )


def _unknown(value: PaddedValue) -> PaddedValue:
    """Returns the value with unknown padded elements."""
    return replace(value, fixed=None, depends=True)


def operators(module: GraphModule) -> list[str]:
    """Returns the operators of a graph in order.  Two graphs can be compared if their operators are equal."""
    return [f"{node.op} {node.target}" if node.op == "call_function" else node.op for node in module.graph.nodes]


def _needed(graph: GraphModule) -> frozenset[Node]:
    """Returns the nodes that the graph's results depend on.  Assertions are not among them."""
    live_nodes: set[Node] = set()
    for node in reversed(graph.graph.nodes):
        if node.op == "output" or not live_nodes.isdisjoint(node.users):
            live_nodes.add(node)
    return frozenset(live_nodes)


def _attribute(module: Any, path: Any) -> Any:
    for name in str(path).split("."):
        module = getattr(module, name)
    return module
