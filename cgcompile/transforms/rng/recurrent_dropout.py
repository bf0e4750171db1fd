"""Recurrent networks with dropout between their layers: one operator per layer, and the dropouts as separate operators.

PyTorch 2.11 and 2.13 decompose LSTM, GRU and RNN where they compile them, and leave out the dropout
(torch/_decomp/decompositions.py, `_rnn_helper`).
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
    """Inserts the layers one by one before a node of RECURRENT with dropout.  Its arguments: (input, hx, params, has_biases,
    num_layers, dropout, train, bidirectional, batch_first).  Returns a replacement for each of its users, which are getitem
    nodes."""
    x, states, params, biases, layers, p, _, bidirectional, batch_first = node.args
    outputs = node.meta["val"]
    graph, dirs, per_layer = node.graph, 2 if bidirectional else 1, len(params) // layers
    states = list(states) if isinstance(states, list | tuple) else [states]
    final_states: list[list[Node]] = [[] for _ in states]

    def call(target: Any, *args: Any, value: Any) -> Node:
        new = graph.call_function(target, args)
        new.meta = {"val": value, **origin}
        return new

    with graph.inserting_before(node), outputs[0].fake_mode:
        for layer in range(layers):
            parts = [
                call(aten.narrow.default, state, 0, layer * dirs, dirs, value=state.meta["val"].narrow(0, layer * dirs, dirs))
                for state in states
            ]
            layer_states = parts if node.target is aten.lstm.input else parts[0]
            weights = list(params[layer * per_layer : (layer + 1) * per_layer])
            values = (outputs[0], *[part.meta["val"] for part in parts])
            call_node = call(node.target, x, layer_states, weights, biases, 1, 0.0, False, bidirectional, batch_first, value=values)
            x = call(operator.getitem, call_node, 0, value=outputs[0])
            for index, layer_ends in enumerate(final_states):
                layer_ends.append(call(operator.getitem, call_node, index + 1, value=values[index + 1]))
            if layer < layers - 1:
                x = call(aten.dropout.default, x, p, True, value=outputs[0])
        results = [
            x,
            *[call(aten.cat.default, layer_ends, value=value) for layer_ends, value in zip(final_states, outputs[1:], strict=True)],
        ]
    return {user: results[user.args[1]] for user in node.users}
