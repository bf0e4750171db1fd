"""Generates the text of a Triton kernel for attention of one row: one program per head, with all positions in its registers.

Half precision values are computed as float32, and rounded where the graph rounds them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._inductor.inductor_prims
from torch.fx import Node

from .cache_writes import Write, axis_of, values_of, write_into
from .operation_texts import DTYPES, RESHAPES, ROUNDED, TEXTS, power, rounded
from .places import HALF, Place, on, place_of
from .products import SUM, Product, one_product, shape_of
from .weights_ahead import PROGRAMS, Ahead, lines_of, weights_ahead

MOST = 1 << 14
"""The most elements of a head's keys.  They must fit the registers of one program."""

aten, prims = torch.ops.aten, torch.ops.prims

SOFTMAX = prims.prepare_softmax_online.default


class UnknownOperation(Exception):
    """An operation or a layout that the generator does not support."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionText:
    """A kernel `attention`.  Its parameters are pointers: `arguments` in order, and `out_ptr` for rows of `outcome`'s dtype.  It
    also writes to the arguments named in `writes`.  `programs`: the size of the grid."""

    source: str
    programs: int
    arguments: dict[str, Node]
    writes: dict[str, Write]
    outcome: Node


def attention_text(mixed: Product, *, ahead: bool) -> AttentionText | None:
    """Returns a kernel for the product with the values, `mixed`, the softmax before it, and the product with the keys before that.
    Returns None for other products, and if one program cannot hold the data.  `ahead`: adds programs that prefetch weights."""
    writer = _Writer(mixed)
    try:
        return writer.written(weights_ahead(mixed.total) if ahead else ())
    except UnknownOperation:
        return None


@dataclass(slots=True)
class _Writer:
    """Collects the lines of a kernel.  All `reads` come before the computation.  Each name is assigned once, so that reads can be
    moved up (offline/compile/programmatic_launch.py).  `names`: node -> name of its value.  `reduces`: whether a line reduces a row
    of all positions."""

    mixed: Product
    reads: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    arguments: dict[str, Node] = field(default_factory=dict)
    writes: dict[str, Write] = field(default_factory=dict)
    names: dict[Node, Any] = field(default_factory=dict)
    scores: Product | None = None
    reduces: bool = False

    def written(self, ahead: Sequence[Ahead]) -> AttentionText:
        mixed, length = self.mixed, self.mixed.length
        if length == mixed.rows:  # vectors over heads and over positions would have the same shape
            raise UnknownOperation
        weights = self.vector(mixed.row)
        if (
            self.scores is None
            or not self.reduces
            or any(_depends(argument, self.scores.total) for argument in self.arguments.values())
        ):
            raise UnknownOperation  # not attention, or an argument is computed from the scores
        self.lines.append(f"weights = tl.where(p < {length}, {weights}, 0.0)")
        self.matrix("v", mixed, (-2, -1), mixed.columns)
        users = list(mixed.total.users)
        narrow = len(users) == 1 and users[0].target is prims.convert_element_type.default and users[0].args[1] in HALF
        outcome = users[0] if narrow else mixed.total
        dtype = DTYPES[outcome.meta["val"].dtype]
        named = [self.pointer(prefetch.weight) for prefetch in ahead]
        body = [
            f"p = tl.arange(0, {power(length)})",
            f"k_column = tl.arange(0, {power(self.scores.length)})",
            f"v_column = tl.arange(0, {power(mixed.columns)})",
            *self.reads,
            *self.lines,
            "total = tl.sum(weights[:, None] * v, 0)",
            f"tl.store(out_ptr + h * {mixed.columns} + v_column, total.to({dtype}), v_column < {mixed.columns})",
        ]
        if ahead:
            body = [f"if h < {mixed.rows}:", *["    " + line for line in body], "else:", f"    part = h - {mixed.rows}"]
            body += ["    " + line for line in lines_of(named, ahead, dtype)]
        source = "\n".join([
            "import triton", "import triton.language as tl", "", "", "@triton.jit",
            f"def attention({', '.join([*self.arguments, 'out_ptr'])}):", "    h = tl.program_id(0)",
            *["    " + line for line in body], "",
        ])  # fmt: skip
        programs = mixed.rows + (PROGRAMS if ahead else 0)
        return AttentionText(source=source, programs=programs, arguments=self.arguments, writes=self.writes, outcome=outcome)

    # --- values per position or per head

    def vector(self, value: Any) -> str:
        """Returns the name of a value, and adds the line that computes it if there is none."""
        if not isinstance(value, Node):
            return repr(value) if isinstance(value, bool | int) or math.isfinite(value) else f'float("{value}")'
        if value not in self.names:
            text = self.computed(value)
            if not text.isidentifier():
                name = f"x{len(self.names)}"
                (self.reads if text.startswith("tl.load(") else self.lines).append(f"{name} = {text}")
                text = name
            self.names[value] = text
        return str(self.names[value])

    def computed(self, node: Node) -> str:
        target = node.target
        if not self.kind(node):
            raise UnknownOperation
        if node.op != "call_function":
            return self.loaded(node)
        if target is operator.getitem and node.args[0].target is SOFTMAX:
            return self.softmax(node.args[0])[node.args[1]]
        if target in RESHAPES and self.kind(node.args[0]) == self.kind(node):
            return self.vector(node.args[0])
        if target is SUM and list(node.args[1]) == [-2]:
            return self.product_with_keys(node)
        if target in (SUM, aten.amax.default):
            return self.reduced(node)
        if target is prims.convert_element_type.default:
            return self.converted(node)
        if target is aten.scalar_tensor.default:
            return self.vector(node.args[0])
        if target is aten.full.default:
            return self.vector(node.args[1])
        if target is prims.iota.default:
            step, start, dtype = node.kwargs["step"], node.kwargs["start"], DTYPES[node.kwargs["dtype"]]
            return f"(p * {step} + {start}).to({dtype})"
        return self.by_element(node)

    def by_element(self, node: Node) -> str:
        schema = getattr(node.target, "_schema", None)
        name = "" if schema is None else schema.name.removeprefix("aten::")
        text = TEXTS.get(name, "")
        dtype = node.meta["val"].dtype
        other = any(key != "alpha" or value != 1 for key, value in node.kwargs.items())
        if not text or other or text.count("{}") != len(node.args) or dtype not in DTYPES:
            return self.loaded(node)
        expression = text.format(*[self.vector(argument) for argument in node.args])
        return rounded(expression, dtype) if name in ROUNDED else expression

    def converted(self, node: Node) -> str:
        source_dtype, dtype = node.args[0].meta["val"].dtype, node.args[1]
        if source_dtype not in DTYPES or dtype not in DTYPES:
            raise UnknownOperation
        expression = self.vector(node.args[0])
        if dtype in HALF:
            return rounded(f"{expression}.to(tl.float32)" if source_dtype not in (*HALF, torch.float32) else expression, dtype)
        return expression if source_dtype in HALF and dtype is torch.float32 else f"{expression}.to({DTYPES[dtype]})"

    def softmax(self, node: Node) -> tuple[str, str]:
        """Returns the names of the largest element and of the sum of exponentials."""
        if node not in self.names:
            self.check_row(node.args[0], node.args[1])
            expression, number = self.vector(node.args[0]), len(self.names)
            inside = f"p < {self.mixed.length}"
            self.lines += [
                f'most{number} = tl.max(tl.where({inside}, {expression}, float("-inf")), 0)',
                f"sum{number} = tl.sum(tl.where({inside}, tl.exp({expression} - most{number}), 0.0), 0)",
            ]
            self.names[node] = f"most{number}", f"sum{number}"
        statistic_names: tuple[str, str] = self.names[node]
        return statistic_names

    def reduced(self, node: Node) -> str:
        keeps = len(node.args) > 2 and node.args[2]
        if len(node.args[1]) != 1 or not keeps or node.meta["val"].dtype is not torch.float32:
            raise UnknownOperation
        self.check_row(node.args[0], node.args[1][0])
        neutral, function = ("0.0", "sum") if node.target is SUM else ('float("-inf")', "max")
        return f"tl.{function}(tl.where(p < {self.mixed.length}, {self.vector(node.args[0])}, {neutral}), 0)"

    def check_row(self, node: Node, axis: int) -> None:
        if self.kind(node) != "row" or axis not in (-1, len(shape_of(node)) - 1) or shape_of(node)[-1] != self.mixed.length:
            raise UnknownOperation
        self.reduces = True

    def loaded(self, node: Node) -> str:
        value = node.meta["val"]
        if value.dtype not in DTYPES or not value.is_contiguous():
            raise UnknownOperation
        length, kind = self.mixed.length, self.kind(node)
        where = {"row": f" + h * {length} + p", "shared": " + p", "statistic": " + h", "element": ""}[kind]
        mask = f", p < {length}, other=0" if kind in ("row", "shared") else ""
        text = f"tl.load({self.pointer(node)}{where}{mask})"
        return f"{text}.to(tl.float32)" if value.dtype in HALF else text

    def kind(self, node: Any) -> str:
        """Classifies a value: a "row" of numbers per head, a "statistic" per head, "shared" by all heads, one "element", or ""."""
        shape, mixed = shape_of(node), self.mixed
        if not isinstance(node.meta.get("val"), torch.Tensor) or not all(isinstance(size, int) for size in shape):
            return ""
        count = math.prod(shape)
        last = shape[:-1] if shape[-2:] == (mixed.length, 1) else shape
        if last[-1:] == (mixed.length,) and count in (mixed.length, mixed.rows * mixed.length):
            return "shared" if count == mixed.length else "row"
        if shape[-1:] == (1,) and count == mixed.rows:
            return "statistic"
        return "element" if count == 1 else ""

    # --- products and their operands

    def product_with_keys(self, total: Node) -> str:
        scores, mixed = one_product(total, MOST), self.mixed
        if scores is None or self.scores is not None or (scores.rows, scores.columns) != (mixed.rows, mixed.length):
            raise UnknownOperation
        if power(mixed.length) * max(power(scores.length), power(mixed.columns)) > MOST:
            raise UnknownOperation
        self.scores = scores
        row = _placed(scores.row)
        query = self.at(row, [*self.heads(row), "k_column", None])
        self.reads.append(f"q = tl.load({query}, k_column < {scores.length}, other=0)")
        self.matrix("k", scores, (-1, -2), scores.length)
        return "tl.sum(q.to(tl.float32)[None, :] * k, 1)"

    def matrix(self, name: str, product: Product, axes: tuple[int, int], width: int) -> None:
        """Adds lines that read a matrix (positions, `width`), and store new values in it.  `axes`: the axes of positions and of
        columns in the product's matrix."""
        place, length, column = _placed(product.matrix), self.mixed.length, f"{name}_column"
        write = write_into(place)
        memory = place if write is None else on(place, write.cache)
        heads = self.heads(place)

        def at(memory: Place, row: str, column: str) -> str:
            coordinates: list[str | None] = [*heads, None, None]
            coordinates[axes[0]], coordinates[axes[1]] = row, column
            return self.at(memory, coordinates)

        mask = f"(p[:, None] < {length}) & ({column}[None, :] < {width})"
        self.reads.append(f"{name}_read = tl.load({at(memory, 'p[:, None]', f'{column}[None, :]')}, {mask}, other=0)")
        if write is None:
            self.lines.append(f"{name} = {name}_read.to(tl.float32)")
            return
        index, values, stored = _placed(write.index), values_of(write, place), DTYPES[write.cache.meta["val"].dtype]
        if values is None or values.strides[axes[0]] or memory.strides[axes[0]] != write.cache.meta["val"].stride(axis_of(write)):
            raise UnknownOperation  # the cache is not written along the axis of positions
        self.reads += [
            f"{name}_index = tl.load({self.pointer(index.base)} + {index.offset})",
            f"{name}_new = tl.load({at(values, '0', column)}, {column} < {width}, other=0)",
        ]
        self.lines += [
            f"{name}_place = tl.where({name}_index < 0, {name}_index + {length}, {name}_index)",
            f"{name}_stored = {name}_new.to({stored})",
            f"{name} = tl.where(p[:, None] == {name}_place, {name}_stored[None, :], {name}_read).to(tl.float32)",
            f'tl.device_assert((0 <= {name}_place) & ({name}_place < {length}), "index out of bounds: a place of {length}")',
            f"{name}_inside = ({column} < {width}) & (0 <= {name}_place) & ({name}_place < {length})",
            f"tl.store({at(memory, f'{name}_place', column)}, {name}_stored, {name}_inside)",
        ]
        self.writes[self.pointer(write.cache)] = write

    def heads(self, place: Place) -> list[str | None]:
        """Returns coordinates of the program's head along all axes but the last two."""
        sizes = place.shape[:-2]
        if math.prod(sizes) != self.mixed.rows:
            raise UnknownOperation
        after = [math.prod(sizes[index + 1 :]) for index in range(len(sizes))]
        return [None if size == 1 else f"(h // {inner} % {size})" for size, inner in zip(sizes, after, strict=True)]

    def at(self, place: Place, coordinates: Sequence[str | None]) -> str:
        """Returns the address of an element, or of several."""
        both = zip(coordinates, place.strides, strict=True)
        terms = [f"{coordinate} * {stride}" for coordinate, stride in both if coordinate is not None and stride]
        return " + ".join([self.pointer(place.base), str(place.offset), *terms])

    def pointer(self, node: Node) -> str:
        for name, argument in self.arguments.items():
            if argument is node:
                return name
        name = f"in_ptr{len(self.arguments)}"
        self.arguments[name] = node
        return name


def _depends(node: Node, other: Node) -> bool:
    waiting, seen = [node], set()
    while waiting:
        ancestor = waiting.pop()
        if ancestor is other:
            return True
        if ancestor not in seen and other < ancestor:
            seen.add(ancestor)
            waiting += ancestor.all_input_nodes
    return False


def _placed(node: Node) -> Place:
    place = place_of(node)
    if place is None or place.base.meta["val"].dtype not in DTYPES:
        raise UnknownOperation
    return place
