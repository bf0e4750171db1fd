"""Passes a graph to Inductor directly: AOTAutograd functionalizes it, and Dynamo is not used.  Dynamo would trace the exported
program again, and rejects some programs (operators with results other than tensors, kernels that lack a fake implementation).

Private interfaces of torch (2.11, 2.13): `torch._inductor.compile_fx.compile_fx`, `torch._guards.TracingContext` and `tracing`,
`FakeTensorMode`, `ShapeEnv`, `StatelessSymbolicContext`, `ConstantSource`.  torch/_inductor/standalone_compile.py combines them in
the same way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from ...errors import BuildError, ModelError
from ...transforms.few_rows.decompositions import PRODUCTS, added_product, argmax, product, read_in_order
from ..compiler_errors import explain

TESTED = "2.11 and 2.13"

Compiled = Callable[..., tuple[Any, ...]]


def compile_graph(module: GraphModule, leaves: Sequence[Any], options: Mapping[str, Any], dynamic: bool) -> Compiled:
    """Compiles `module` for inputs like `leaves`, the flat arguments of a call.  Returns a function `(*leaves) -> flat outputs`.

    Weights are arguments of the compiled graph, which reads and writes them at their present addresses.  Without `dynamic` every
    size is a constant.  With `dynamic`, sizes of inputs are symbols if they are symbols in the exported program.  Raises
    lowering-failed, with the operator and the user's line, and torch-unsupported.
    """
    graph, weights, leaf_nodes = lifted(module, leaves)
    try:
        from torch._dynamo.source import ConstantSource
        from torch._guards import TracingContext, tracing
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.virtualized import V
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

        from ...transforms.few_rows.fewer_kernels import fewer_kernels
        from ...transforms.few_rows.row_blocks import RowBlocks
        from ...transforms.inductor_passes import mended, passes, unchecked_puts
    except ImportError as error:
        text = f"torch {torch.__version__} has no {error.name}: {error}; cgcompile was tested with {TESTED}"
        raise BuildError("torch-unsupported", text) from error
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())

    def fake(name: str, tensor: torch.Tensor, varies: Sequence[bool]) -> torch.Tensor:
        sizes = [DimDynamic.DUCK if vary else DimDynamic.STATIC for vary in varies]
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        return mode.from_tensor(tensor, source=ConstantSource(name), symbolic_context=context)

    fakes = [fake(f"weight_{i}", tensor.detach(), [False] * tensor.dim()) for i, tensor in enumerate(weights)]
    fakes += [
        fake(f"input_{i}", leaves[i], _varying(node, leaves[i]) if dynamic else [False] * leaves[i].dim()) for i, node in leaf_nodes
    ]

    try:
        with tracing(TracingContext(mode)), mended(), unchecked_puts(module), V.set_choices_handler(RowBlocks()), torch.no_grad():
            table = None if dynamic else _decompositions()
            patches = {**options, **passes(), **fewer_kernels(ahead=True)}
            compiled: Any = compile_fx(graph, fakes, config_patches=patches, decompositions=table)
    except Exception as error:
        failure = explain(error, module)
        raise ModelError("lowering-failed", str(failure), failure.hint("inductor")) from error
    weight_tensors = [tensor.detach() for tensor in weights]
    positions = [i for i, _ in leaf_nodes]

    def run(*inputs: Any) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = tuple(compiled(*weight_tensors, *[inputs[i] for i in positions]))
        return outputs

    return run


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns Inductor's table with two changes: argmax of cgcompile, and matrix-vector products as sums if sums are faster than a
    library."""
    from torch._inductor.decomposition import select_decomp_table

    aten, table = torch.ops.aten, dict(select_decomp_table())
    ours: dict[Any, Callable[..., Any]] = {aten.mm.default: product, aten.bmm.default: product, aten.addmm.default: added_product}

    def either(as_sum: Callable[..., Any], other: Callable[..., Any] | None) -> Callable[..., Any]:
        def decompose(*args: Any, **kwargs: Any) -> Any:
            a, b = args[-2:]
            vector = a.dtype in PRODUCTS and 1 in (a.shape[-2], b.shape[-1]) and read_in_order(a, b)
            total = as_sum(*args, **kwargs) if vector else NotImplemented
            return other(*args, **kwargs) if total is NotImplemented and other is not None else total

        return decompose

    return {
        **table,
        **{operation: either(as_sum, table.get(operation)) for operation, as_sum in ours.items()},
        aten.argmax.default: argmax,
    }


def lifted(module: GraphModule, leaves: Sequence[Any]) -> tuple[GraphModule, list[torch.Tensor], list[tuple[int, Node]]]:
    """Returns (graph, weights, positions).  The graph of the module gets the weights as arguments before those of the call, and
    flat outputs.  Tied weights are one argument.  `positions`: for each tensor of the call, its position among `leaves` and its
    node.  Raises inputs-unlike."""
    graph = Graph()
    env: dict[Node, Any] = {}
    arguments: dict[tuple[object, ...], Node] = {}
    weights: list[torch.Tensor] = []
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(value := operator.attrgetter(node.target)(module), torch.Tensor):
            identity = value.data_ptr() or id(value), value.dtype, tuple(value.shape), value.stride()
            if identity not in arguments:
                arguments[identity] = graph.placeholder(f"weight_{len(weights)}")
                weights.append(value)
            env[node] = arguments[identity]
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(leaves):
        raise BuildError("inputs-unlike", f"the program takes {len(placeholders)} values, the call has {len(leaves)}")
    leaf_nodes = [(i, node) for i, node in enumerate(placeholders) if isinstance(leaves[i], torch.Tensor)]
    for i, node in leaf_nodes:
        env[node] = graph.placeholder(f"input_{i}")
    env |= {node: leaf for node, leaf in zip(placeholders, leaves, strict=True) if not isinstance(leaf, torch.Tensor)}
    for node in module.graph.nodes:
        if node in env:
            continue
        if node.op == "output":
            graph.output(tuple([env[leaf] if isinstance(leaf, Node) else leaf for leaf in tree_leaves(node.args[0])]))
            continue
        env[node] = copied = graph.create_node(node.op, node.target, *_mapped((node.args, node.kwargs), env), name=node.name)
        copied.meta = dict(node.meta)
    return GraphModule(module, graph), weights, leaf_nodes


def _mapped(value: Any, env: Mapping[Node, Any]) -> Any:
    """Replaces the nodes in arguments by the nodes or values to which `env` maps them."""
    return torch.fx.node.map_aggregate(value, lambda leaf: env[leaf] if isinstance(leaf, Node) else leaf)


def _varying(node: Node, tensor: torch.Tensor) -> list[bool]:
    """Returns for each axis of an input whether its size is a symbol in the exported program."""
    example = node.meta.get("val")
    sizes = example.shape if isinstance(example, torch.Tensor) else [None] * tensor.dim()
    return [not isinstance(size, int) for size in sizes]
