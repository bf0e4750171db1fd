"""Attention of one row in one kernel: the product with the keys, the softmax, and the product with the values.  Before that, the
kernel stores the row's key and value in the caches.

Inductor generates three or four kernels for it.  Each takes 2 to 3 us on an H100, however little it does (torch 2.11).

Private interfaces (torch 2.11, 2.13): `torch._higher_order_ops.triton_kernel_wrap`, `PyCodeCache`, and those of products.py.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph

from .attention_text import MOST, AttentionText, attention_text
from .products import SUM, Product, call, one_product, shape_of

LARGE = 1 << 12
"""The most elements of a head's keys for which a kernel uses four warps.  For more elements, it uses eight."""

aten, prims = torch.ops.aten, torch.ops.prims


def attend_at_once(graph: Graph, *, ahead: bool) -> None:
    """Changes the graph in place.  `ahead`: additional programs prefetch the next weights into the GPU's L2 cache."""
    for node in graph.find_nodes(op="call_function", target=SUM):
        product = one_product(node, MOST) if node.users else None
        text = None if product is None else attention_text(product, ahead=ahead)
        if product is not None and text is not None:
            _replace(graph, product, text)


def _replace(graph: Graph, product: Product, text: AttentionText) -> None:
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional

    value, written = text.outcome.meta["val"], ["out_ptr", *text.writes]
    with graph.inserting_before(text.outcome):
        arguments = dict(text.arguments)
        for name, node in text.arguments.items():
            if node.op == "call_function":  # its memory must have the strides of its value
                arguments[name] = call(graph, prims.inductor_force_stride_order.default, node, node.meta["val"].stride())
        named = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        arguments["out_ptr"] = graph.call_function(aten.empty.memory_format, (list(shape_of(text.outcome)),), named)
        arguments["out_ptr"].meta["val"] = value.new_empty(value.shape)
        named = {
            "kernel_idx": kernel_side_table.add_kernel(_function(text.source, product)),
            "constant_args_idx": kernel_side_table.add_constant_args({}),
            "grid": [(text.programs, 1, 1)],
            "tma_descriptor_metadata": {},
            "kwargs": arguments,
            "tensors_to_clone": written,
        }
        launch = graph.call_function(triton_kernel_wrapper_functional, (), named)
        launch.meta["val"] = {name: arguments[name].meta["val"] for name in written}
        outputs = {name: call(graph, operator.getitem, launch, name) for name in written}
    text.outcome.replace_all_uses_with(outputs["out_ptr"])
    for name, write in text.writes.items():
        write.put.replace_all_uses_with(outputs[name], delete_user_cb=lambda user: user.target is aten.copy_.default)
    graph.eliminate_dead_code()


def _function(source: str, product: Product) -> Any:
    """Compiles a kernel's text.  It is written to a file, because Triton reads the source from there."""
    import triton
    from torch._inductor.codecache import PyCodeCache

    kernel = PyCodeCache.load(source).attention
    large = product.length * product.columns > LARGE
    return triton.autotune([triton.Config({}, num_warps=8)], key=[])(kernel) if large else kernel
