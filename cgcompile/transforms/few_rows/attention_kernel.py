"""Attention of one row in one kernel: a product with the keys, what is done to the scores, and the product with the values; and
before them the row's own key and value, which are written into the caches.

Inductor makes three or four kernels of it, and each takes 2 to 3 us on an H100 however little it does (torch 2.11).  One program
for every head has all places in its registers.

Private interfaces (torch 2.11, 2.13): `torch._higher_order_ops.triton_kernel_wrap`, `PyCodeCache`, and those of products.py.
"""

from __future__ import annotations

import math, os
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from .products import SUM, Product, call, one_product, shape_of

MOST = 1 << 14
"""Elements of a head's keys, at most: all are in the registers of one program."""

LARGE = 1 << 13
"""Elements from which on a program has eight warps; below it has four."""

aten, prims = torch.ops.aten, torch.ops.prims

DTYPES = {
    torch.float32: "tl.float32", torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.int64: "tl.int64",
    torch.int32: "tl.int32", torch.bool: "tl.int1",
}  # fmt: skip

HALF = (torch.float16, torch.bfloat16)

VIEWS = {
    aten.expand.default, aten.permute.default, aten.reshape.default, aten.select.int, aten.slice.Tensor, aten.split.Tensor,
    aten.split_with_sizes.default, aten.squeeze.dim, aten.unbind.int, aten.unsqueeze.default, aten.view.default, operator.getitem,
}  # fmt: skip
"""Operations whose result is read where the tensor lies that they are given."""

BINARY = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!=",
    "bitwise_and": "&", "bitwise_or": "|", "logical_and": "&", "logical_or": "|",
}  # fmt: skip

CALLS = {"exp": "tl.exp", "maximum": "tl.maximum", "minimum": "tl.minimum", "where": "tl.where", "abs": "tl.abs"}

ROUNDED = {"add", "sub", "mul", "div", "exp"}


class Unknown(Exception):
    """What no kernel is written for: the graph stays as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a tensor's elements lie in the memory of `base`: an offset and a stride for each axis."""

    base: Node
    offset: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """`index_put`: a cache, the place that is written, and with what."""

    node: Node
    cache: Node
    index: Node
    values: Node


def attend_at_once(graph: Graph) -> None:
    """Changes the graph in place."""
    for node in graph.find_nodes(op="call_function", target=SUM):
        product = one_product(node, 1 << 20)
        if product is not None and product.length > 1:
            try:
                kernel = _Kernel(product)
                kernel.write()
            except Unknown:
                import os, traceback
                if os.environ.get("LOOPS_DEBUG"): print(node, traceback.format_exc()[-900:])
                continue
            if os.environ.get("LOOPS_DEBUG"): print(kernel.text())
            _replace(graph, kernel)


@dataclass(slots=True)
class _Kernel:
    """The text of a kernel, as it is written; `arguments`: its pointers' names and what is given for them."""

    product: Product
    lines: list[str] = field(default_factory=list)
    arguments: dict[str, Node] = field(default_factory=dict)
    values: dict[Node, Any] = field(default_factory=dict)
    scores: Product | None = None
    writes: dict[str, Write] = field(default_factory=dict)

    def write(self) -> None:
        product = self.product
        mixed = self.vector(product.row)
        if self.scores is None:
            raise Unknown
        self.lines.append(f"mixed = tl.where(p < {product.length}, {mixed}, 0.0)")
        self.matrix("v", product.matrix, product, (-2, -1), product.columns)
        self.lines.append(f"total = tl.sum(mixed[:, None] * v, 0)")

    @property
    def outcome(self) -> Node:
        """The node whose value the kernel gives: the sum, or it in half precision."""
        (*_, last) = [self.product.total]
        users = list(last.users)
        if len(users) == 1 and users[0].target is prims.convert_element_type.default and users[0].args[1] in HALF:
            return users[0]
        return last

    def text(self) -> str:
        product, scores = self.product, self.scores
        assert scores is not None
        names = [*self.arguments, "out_ptr"]
        dtype = DTYPES[self.outcome.meta["val"].dtype]
        return "\n".join([
            "import triton", "import triton.language as tl", "", "", "@triton.jit", f"def attention({', '.join(names)}):",
            "    h = tl.program_id(0)",
            f"    p = tl.arange(0, {_power(product.length)})",
            f"    d = tl.arange(0, {_power(scores.length)})",
            f"    e = tl.arange(0, {_power(product.columns)})",
            *["    " + line for line in self.lines],
            f"    tl.store(out_ptr + h * {product.columns} + e, total.to({dtype}), e < {product.columns})", "",
        ])  # fmt: skip

    # --- values for every place, or one for the head

    def vector(self, node: Any) -> str:
        """The name of a value: of every place, or one."""
        if not isinstance(node, Node):
            return repr(node) if isinstance(node, bool | int) or math.isfinite(node) else f'float("{node}")'
        if node not in self.values:
            made = self._made(node)
            if isinstance(made, str) and not made.isidentifier():
                name = f"x{len(self.values)}"
                self.lines.append(f"{name} = {made}")
                made = name
            self.values[node] = made
        return str(self.values[node])

    def _made(self, node: Node) -> Any:
        if node.op != "call_function":
            return self.load(node)
        target = node.target
        if target is operator.getitem and node.args[0].target is prims.prepare_softmax_online.default:
            return self.softmax(node.args[0])[node.args[1]]
        if target in VIEWS or target is prims.inductor_force_stride_order.default:
            if target in (aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default,
                          prims.inductor_force_stride_order.default) and self.kind(node.args[0]) == self.kind(node) != "":
                return self.vector(node.args[0])
            return self.load(node)
        if target is SUM and list(node.args[1]) == [-2]:
            return self.dot(node)
        if not self.kind(node):
            raise Unknown
        if target is prims.convert_element_type.default:
            return self.converted(self.vector(node.args[0]), node.args[0].meta["val"].dtype, node.args[1])
        if target in (aten.amax.default, SUM) and list(node.args[1]) in ([-1], [len(shape_of(node.args[0])) - 1]):
            if len(node.args) < 3 or not node.args[2]:
                raise Unknown
            rest, function = ('float("-inf")', "max") if target is aten.amax.default else ("0.0", "sum")
            return f"tl.{function}(tl.where(p < {self.product.length}, {self.vector(node.args[0])}, {rest}), 0)"
        if target in (aten.scalar_tensor.default, aten.full.default):
            return self.vector(node.args[0] if target is aten.scalar_tensor.default else node.args[1])
        if target is prims.iota.default:
            start, step = node.kwargs["start"], node.kwargs["step"]
            return f"(p * {step} + {start}).to({DTYPES[node.kwargs['dtype']]})"
        return self.by_element(node)

    def by_element(self, node: Node) -> str:
        name = node.target._schema.name.removeprefix("aten::")
        value = node.meta["val"]
        if torch.Tag.pointwise not in node.target.tags or value.dtype not in DTYPES:
            return self.load(node)
        if any(key != "alpha" or given != 1 for key, given in node.kwargs.items()) or len(node.args) > 3:
            return self.load(node)
        given = [self.vector(each) for each in node.args]
        if name in BINARY and len(given) == 2:
            made = f"({given[0]} {BINARY[name]} {given[1]})"
        elif name == "neg":
            made = f"(-{given[0]})"
        elif name == "logical_not":
            made = f"({given[0]} == 0)"
        elif name in CALLS:
            made = f"{CALLS[name]}({', '.join(given)})"
        else:
            return self.load(node)
        return self.rounded(made, value.dtype) if name in ROUNDED else made

    def rounded(self, text: str, dtype: torch.dtype) -> str:
        """Numbers of half precision are computed with as float32."""
        return f"{text}.to({DTYPES[dtype]}).to(tl.float32)" if dtype in HALF else text

    def converted(self, text: str, given: torch.dtype, dtype: torch.dtype) -> str:
        if dtype not in DTYPES or given not in DTYPES:
            raise Unknown
        if dtype in HALF:
            return self.rounded(text, dtype)
        return text if given in HALF and dtype is torch.float32 else f"{text}.to({DTYPES[dtype]})"

    def softmax(self, node: Node) -> tuple[str, str]:
        if node not in self.values:
            if self.kind(node.args[0]) != "row" or node.args[1] not in (-1, len(shape_of(node.args[0])) - 1):
                raise Unknown
            given, number = self.vector(node.args[0]), len(self.values)
            self.lines += [
                f'most{number} = tl.max(tl.where(p < {self.product.length}, {given}, float("-inf")), 0)',
                f"sum{number} = tl.sum(tl.where(p < {self.product.length}, tl.exp({given} - most{number}), 0.0), 0)",
            ]
            self.values[node] = f"most{number}", f"sum{number}"
        return self.values[node]

    def kind(self, node: Any) -> str:
        shape, product = shape_of(node), self.product
        count = math.prod(shape)
        if not all(isinstance(size, int) for size in shape) or not isinstance(node, Node):
            return ""
        inner = shape[:-1] if shape[-1:] == (1,) and shape[-2:-1] == (product.length,) else shape
        if inner[-1:] == (product.length,) and count == product.rows * product.length and (len(inner) > 1 or product.rows == 1):
            return "row"
        if inner[-1:] == (product.length,) and count == product.length:
            return "shared"
        if shape[-1:] == (1,) and count == product.rows:
            return "statistic"
        return "element" if count == 1 else ""

    def load(self, node: Node) -> str:
        kind = self.kind(node)
        if not kind or node.meta["val"].dtype not in DTYPES:
            raise Unknown
        if isinstance(node.meta["val"], torch.Tensor) and not node.meta["val"].is_contiguous():
            raise Unknown
        where = {"row": f"h * {self.product.length} + p", "shared": "p", "statistic": "h", "element": "0"}[kind]
        mask = f", p < {self.product.length}" if kind in ("row", "shared") else ""
        text = f"tl.load({self.pointer(node)} + {where}{mask})"
        return f"{text}.to(tl.float32)" if node.meta["val"].dtype in HALF else text

    def pointer(self, node: Node) -> str:
        for name, given in self.arguments.items():
            if given is node:
                return name
        name = f"in_ptr{len(self.arguments)}"
        self.arguments[name] = node
        return name

    # --- products

    def dot(self, total: Node) -> str:
        found = one_product(total, 1 << 20)
        if found is None or found.columns != self.product.length or found.rows != self.product.rows or self.scores is not None:
            raise Unknown
        if max(found.length, self.product.columns) * _power(self.product.length) > MOST:
            raise Unknown
        self.scores = found
        row = _placed(found.row)
        self.lines.append(f"q = {self.read(row, (*self.leading(row, found), 'd', None), 'd < ' + str(found.length))}")
        self.matrix("k", found.matrix, found, (-1, -2), found.length)
        return "tl.sum(q[None, :] * k, 1)"

    def matrix(self, name: str, node: Node, product: Product, axes: tuple[int, int], width: int) -> None:
        """Reads a matrix of (places, width), of which `axes` are these two; what is written into it before is written here."""
        place, write = _placed(node), None
        axis, inner = ("d" if name == "k" else "e"), place.shape
        if place.base.target is aten.index_put.default and place.base.args[0].op == "placeholder":
            write = _write(place.base, place, axes[0])
        cache = place if write is None else Place(base=write.cache, offset=place.offset, strides=place.strides, shape=inner)
        coordinates = [*self.leading(place, product), None, None]
        coordinates[axes[0]], coordinates[axes[1]] = "p[:, None]", f"{axis}[None, :]"
        length = self.product.length
        mask = f"(p[:, None] < {length}) & ({axis}[None, :] < {width})"
        self.lines.append(f"{name} = {self.read(cache, tuple(coordinates), mask)}")
        if write is None:
            return
        values = _placed(write.values)
        if values.shape[-1] != width or math.prod(values.shape) != product.rows * width or write.index.meta["val"].numel() != 1:
            raise Unknown
        lead = self.leading(values, product, 2)
        dtype = DTYPES[write.cache.meta["val"].dtype]
        self.lines += [
            f"{name}_index = tl.load({self.pointer(_placed(write.index).base)})",
            f"{name}_index = tl.where({name}_index < 0, {name}_index + {length}, {name}_index)",
            f"{name}_new = {self.read(values, (*lead, None, axis), f'{axis} < {width}')}",
            f"{name} = tl.where(p[:, None] == {name}_index, {name}_new[None, :], {name})",
        ]
        coordinates = [*self.leading(place, product), None, None]
        coordinates[axes[0]], coordinates[axes[1]] = f"{name}_index", axis
        self.lines.append(
            f"tl.store({self.at(cache, tuple(coordinates))}, {name}_new.to({dtype}), "
            f"({axis} < {width}) & ({name}_index >= 0) & ({name}_index < {length}))"
        )
        self.writes[self.pointer(write.cache)] = write

    def leading(self, place: Place, product: Product, last: int = 2) -> list[str | None]:
        """Coordinates of the head `h` along all axes but the last ones."""
        sizes = place.shape[: len(place.shape) - last]
        if math.prod(sizes) != product.rows:
            raise Unknown
        found: list[str | None] = []
        for index, size in enumerate(sizes):
            after = math.prod(sizes[index + 1 :])
            found.append(None if size == 1 else f"(h // {after} % {size})" if after > 1 else f"(h % {size})")
        return found

    def at(self, place: Place, coordinates: tuple[str | None, ...]) -> str:
        terms = [f"{each} * {stride}" for each, stride in zip(coordinates, place.strides, strict=True) if each is not None and stride]
        return " + ".join([self.pointer(place.base), *([str(place.offset)] if place.offset else []), *terms])

    def read(self, place: Place, coordinates: tuple[str | None, ...], mask: str) -> str:
        return f"tl.load({self.at(place, coordinates)}, {mask}, other=0.0).to(tl.float32)"


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _write(node: Node, place: Place, axis: int) -> Write:
    """An `index_put` of one place of a cache."""
    cache, indices, values, *rest = node.args
    if rest and rest[0] or node.kwargs.get("accumulate"):
        raise Unknown
    given = [(number, each) for number, each in enumerate(indices) if each is not None]
    if len(given) != 1 or not isinstance(cache, Node) or shape_of(given[0][1]) != (1,):
        raise Unknown
    strides = cache.meta["val"].stride()
    number, index = given[0]
    if strides[number] != place.strides[axis] or shape_of(cache)[number] != place.shape[axis]:
        raise Unknown
    if shape_of(values)[number : number + 1] != (1,) or len(shape_of(values)) != len(shape_of(cache)):
        raise Unknown
    if any(user is not node and user.target is not aten.copy_.default for user in cache.users):
        raise Unknown
    return Write(node=node, cache=cache, index=index, values=values)


def _placed(node: Node) -> Place:
    """Where a tensor lies, beneath views and widening conversions."""
    chain = []
    base = node
    while base.op == "call_function":
        if base.target is prims.convert_element_type.default:
            wide = base.args[1] is torch.float32 and base.args[0].meta["val"].dtype in (*HALF, torch.float32)
            if not wide:
                break
        elif base.target is prims.inductor_force_stride_order.default:
            if tuple(base.args[1]) != base.args[0].meta["val"].stride():
                break
        elif base.target not in VIEWS:
            break
        if base.target is operator.getitem and base.args[0].target not in VIEWS:
            break
        chain.append(base)
        base = base.args[0]
    value = base.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise Unknown
    made: Any = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    storage = made.untyped_storage()._cdata
    for each in reversed(chain):
        if each.target is prims.convert_element_type.default or each.target is prims.inductor_force_stride_order.default:
            continue
        made = made[each.args[1]] if each.target is operator.getitem else each.target(made, *each.args[1:], **each.kwargs)
    if made.untyped_storage()._cdata != storage or not _dense(value):
        raise Unknown
    return Place(base=base, offset=made.storage_offset(), strides=made.stride(), shape=tuple(made.shape))


def _dense(value: torch.Tensor) -> bool:
    return value.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(value))


def _replace(graph: Graph, kernel: _Kernel) -> None:
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional

    product, outcome = kernel.product, kernel.outcome
    warps = 8 if kernel.product.columns * _power(product.length) > LARGE else 4
    flags = os.environ.get("LOOPS_V", "").split(",")
    warps = 8 if "aw8" in flags else 2 if "aw2" in flags else warps
    function = _function(kernel.text(), warps)
    value = outcome.meta["val"]
    with graph.inserting_before(outcome):
        named = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        out = graph.call_function(aten.empty.memory_format, (list(value.shape),), named)
        out.meta["val"] = value.new_empty(value.shape)
        given = {}
        for name, node in kernel.arguments.items():
            given[name] = node
            if node.op == "call_function" and node.target is not aten.index_put.default:
                given[name] = call(graph, prims.inductor_force_stride_order.default, node, node.meta["val"].stride())
        arguments = {**given, "out_ptr": out}
        changed = ["out_ptr", *kernel.writes]
        made = graph.call_function(
            triton_kernel_wrapper_functional,
            (),
            {
                "kernel_idx": kernel_side_table.add_kernel(function),
                "constant_args_idx": kernel_side_table.add_constant_args({}),
                "grid": [(product.rows, 1, 1)],
                "tma_descriptor_metadata": {},
                "kwargs": arguments,
                "tensors_to_clone": changed,
            },
        )
        made.meta["val"] = {name: arguments[name].meta["val"] for name in changed}
        results = {}
        for name in changed:
            results[name] = graph.call_function(operator.getitem, (made, name))
            results[name].meta["val"] = arguments[name].meta["val"]
    outcome.replace_all_uses_with(results["out_ptr"])
    for name, write in kernel.writes.items():
        write.node.replace_all_uses_with(results[name], delete_user_cb=lambda user: user.target is aten.copy_.default)
    graph.eliminate_dead_code()


def _function(text: str, warps: int) -> Callable[..., Any]:
    """The kernel of a text."""
    import triton
    from torch._inductor.codecache import PyCodeCache

    made = PyCodeCache.load(text).attention
    return made if warps == 4 else triton.autotune([triton.Config({}, num_warps=warps)], key=[])(made)
