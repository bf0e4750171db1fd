"""Recurrent networks with dropout between their layers: one operator per layer, and the dropouts as operators of their own.

PyTorch 2.11 and 2.13 write LSTM, GRU and RNN with others where they compile them (torch/_decomp/decompositions.py, `_rnn_helper`),
and leave the dropout out there.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten

RECURRENT = frozenset({aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input})


def split_layers(node: Node, origin: Mapping[str, Any]) -> dict[Node, Node]:
    """Inserts before a node of RECURRENT with dropout, (input, hx, params, has_biases, num_layers, dropout, train, bidirectional,
    batch_first), what it does layer by layer.  Gives what stands for each of its users, which take its results apart."""
    x, states, params, biases, layers, p, _, both_ways, batch_first = node.args
    outputs = node.meta["val"]
    graph, ways, per_layer = node.graph, 2 if both_ways else 1, len(params) // layers
    states = list(states) if isinstance(states, list | tuple) else [states]
    last: list[list[Node]] = [[] for _ in states]

    def call(target: Any, *args: Any, value: Any) -> Node:
        new = graph.call_function(target, args)
        new.meta = {"val": value, **origin}
        return new

    with graph.inserting_before(node), outputs[0].fake_mode:
        for layer in range(layers):
            parts = [
                call(aten.narrow.default, state, 0, layer * ways, ways, value=state.meta["val"].narrow(0, layer * ways, ways))
                for state in states
            ]
            layer_states = parts if node.target is aten.lstm.input else parts[0]
            weights = list(params[layer * per_layer : (layer + 1) * per_layer])
            values = (outputs[0], *[part.meta["val"] for part in parts])
            ran = call(node.target, x, layer_states, weights, biases, 1, 0.0, False, both_ways, batch_first, value=values)
            x = call(operator.getitem, ran, 0, value=outputs[0])
            for index, ends in enumerate(last):
                ends.append(call(operator.getitem, ran, index + 1, value=values[index + 1]))
            if layer < layers - 1:
                x = call(aten.dropout.default, x, p, True, value=outputs[0])
        results = [x, *[call(aten.cat.default, ends, value=value) for ends, value in zip(last, outputs[1:], strict=True)]]
    return {user: results[user.args[1]] for user in node.users}
