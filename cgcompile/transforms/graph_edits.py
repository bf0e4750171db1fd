"""Adds operations and buffers to an exported program's graph.  Private interface (torch 2.11, 2.13):
`torch._dispatch.python.enable_python_dispatcher`, which decomposes composite operators as in torch.export.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg


def add_buffer(graph: Graph, specs: Sequence[InputSpec], name: str, value: Tensor) -> tuple[Node, list[InputSpec]]:
    """Adds a buffer after the parameters and buffers.  Returns its placeholder, and the new input specs."""
    specs = list(specs)
    position = max(
        [index + 1 for index, spec in enumerate(specs) if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)], default=0
    )
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_before(placeholders[position]):
        placeholder = graph.placeholder(f"b_{name}")
    mode = next(fake.fake_mode for node in placeholders if isinstance(fake := node.meta.get("val"), FakeTensor))
    with mode:
        placeholder.meta["val"] = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    spec = InputSpec(kind=InputKind.BUFFER, arg=TensorArgument(name=placeholder.name), target=name, persistent=True)
    specs.insert(position, spec)
    return placeholder, specs


def insert(
    place: Node,
    inputs: Sequence[Node],
    function: Callable[..., Any],
    table: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
    origin: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Inserts the operations of `function` on the values of `inputs`, decomposed by `table`, before `place`.  `origin`: metadata of
    the new nodes.  Returns the nodes of the results."""
    graph, values = place.graph, [node.meta["val"] for node in inputs]
    with values[0].fake_mode, enable_python_dispatcher(), torch.no_grad():
        traced = make_fx(function, decomposition_table=dict(table))(*values)
    traced.graph.eliminate_dead_code()
    node_map = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with graph.inserting_before(place):
        for node in traced.graph.nodes:
            if node.op == "call_function":
                node_map[node] = graph.node_copy(node, node_map.__getitem__)
                node_map[node].meta = {"val": node.meta.get("val"), **origin}
            else:
                assert node.op in ("placeholder", "output"), f"{node.format_node()}: a constant among inserted operations"
    (output,) = traced.graph.find_nodes(op="output")
    return map_arg(output.args[0], node_map.__getitem__)
