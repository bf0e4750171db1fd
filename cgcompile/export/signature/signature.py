"""The signature of an exported model: inputs and outputs in terms of the declared dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram

from cgbundle.format.schema import DataSize, Size, TensorSpec
from cgbundle.format.shapes import evaluate, linear

from ...errors import ModelError
from ...model import dynamic_axes as axes
from ...model.flat_module import PREFIX
from ...model.pytree import dtype_name
from ...model.source import Source
from ..exported import EagerShapes, Exported, Signature, memory_order
from .index_ranges import index_ranges
from .output_sizes import fitted, tabled


def describe_signature(exported: Exported) -> Signature:
    """Returns the signature.  Raises size-excluded, export-failed, structure-unsupported, data-dependent-output."""
    source, programs, flat = exported.source, exported.programs, exported.flat
    assert flat.result is not None  # the first call of `flat` set it
    varying = [PREFIX + name for row in source.rows for name in row.buffers]
    ranges = list(map(_widest, zip(*[index_ranges(program, varying) for _, program in programs.distinct], strict=True)))
    inputs = [
        TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=shape, order=memory_order(tensor), range=limits)
        for (name, tensor), shape, limits in zip(flat.like.leaves, exported.shapes, ranges, strict=True)
    ]
    if programs.dynamic:
        symbols = symbols_of(source, programs.first, exported.shapes, exported.sizes)
        try:
            specs = _outputs(source, programs.first, flat.names, symbols)
        except ModelError as error:
            if error.code != "data-dependent-output" or not exported.unbounded:
                raise
            raise ModelError("data-dependent-output", f"{error}, and has no bound: {exported.unbounded}", error.hint) from error
        outputs = [_as_eager(source, spec, index, exported.eager_shapes) for index, spec in enumerate(specs)]
    else:
        outputs = [_inferred(exported, name, index) for index, name in enumerate(flat.names)]
    return Signature(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        call=flat.like.call,
        parameters=flat.like.parameters,
        result=flat.result,
        data_sizes=tuple([DataSize(output=row.output, axis=row.axis, count=row.count) for row in flat.bounded]),
    )


def symbols_of(
    source: Source, program: ExportedProgram, shapes: Sequence[tuple[Size, ...]], sizes: Mapping[str, tuple[int, ...]]
) -> dict[Any, Size]:
    """Returns {the export's symbol: size in the declared dimensions}.  Raises size-excluded for a declared size that violates the
    export's constraints."""
    user = set(program.graph_signature.user_inputs)
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in user]
    by_symbol: dict[Any, Size] = {}
    for value, shape in zip(values, shapes, strict=True):
        for actual, size in zip(value.shape, shape, strict=True):
            rule = linear(size)
            if rule is None:
                continue
            name, scale, offset = rule
            expr = actual.node.expr if isinstance(actual, torch.SymInt) else None
            free = sorted(expr.free_symbols, key=str) if expr is not None else []
            if len(free) != 1:
                raise ModelError("size-excluded", f"{source.label}: dimension {name!r} cannot vary: export fixed it to {actual}")
            (symbol,) = free
            assert expr is not None
            step, shift = int(expr.subs(symbol, 1) - expr.subs(symbol, 0)), int(expr.subs(symbol, 0))
            bounds = program.range_constraints.get(symbol)
            for value_of in sizes[name]:
                quotient, remainder = divmod(scale * value_of + offset - shift, step)
                if remainder:
                    raise ModelError(
                        "size-excluded",
                        f"{source.label}: the program is only valid for {name} in steps of {step // scale}, not for {value_of}",
                    )
                if bounds is not None and not bounds.lower <= quotient <= bounds.upper:
                    low, high = [(step * end + shift - offset) // scale for end in (int(bounds.lower), int(bounds.upper))]
                    raise ModelError(
                        "size-excluded",
                        f"{source.label}: the program is only valid from {name}={low} to {high}, not for {value_of}",
                    )
            by_symbol.setdefault(symbol, _invert(name, scale, offset, step, shift))
    return by_symbol


def _invert(name: str, scale: int, offset: int, inner: int, shift: int) -> Size:
    """Solves inner*symbol + shift = scale*name + offset for the symbol."""
    size = axes.expression(name, scale, offset - shift)
    return size if inner == 1 else ("//", size, inner)


def _widest(ranges: Sequence[tuple[int, int] | None]) -> tuple[int, int] | None:
    """Returns the range that contains the index ranges of all programs: an index outside it fails at all sizes."""
    bounds = [limits for limits in ranges if limits is not None]
    return (min(low for low, _ in bounds), max(high for _, high in bounds)) if len(bounds) == len(ranges) else None


def _inferred(exported: Exported, name: str, index: int) -> TensorSpec:
    """Returns the spec of an output of programs with constant sizes, with a shape from eager PyTorch.  Raises
    structure-unsupported if its dtype or number of axes changes with the sizes, shape-irregular if its sizes follow no rule."""
    label, nodes = exported.source.label, []
    for _, program in exported.programs.distinct:
        (last,) = [node for node in program.graph.nodes if node.op == "output"]
        nodes.append(last.args[0][-len(exported.flat.names) :][index].meta["val"])
    shapes = [(sizes, output_shapes[index]) for sizes, output_shapes in exported.eager_shapes]
    if len({node.dtype for node in nodes}) > 1 or len({len(shape) for _, shape in shapes}) > 1:
        raise ModelError(
            "structure-unsupported", f"{label}: output {name!r}: its dtype or its number of axes changes with the sizes"
        )
    axis_sizes = []
    for axis in range(len(shapes[0][1])):
        points = [(sizes, shape[axis]) for sizes, shape in shapes]
        at = {tuple(sizes.values()): size for sizes, size in points}
        declared = [(dict(zip(exported.sizes, key, strict=True)), at[key]) for key in exported.programs.by_key]
        size = fitted(points) or fitted(declared)
        if size is None and (size := tabled(declared)) is None:
            examples = ", ".join(f"{shape[axis]} at {'x'.join(map(str, sizes.values()))}" for sizes, shape in shapes[:4])
            raise ModelError(
                "shape-irregular",
                f"{label}: output {name!r}, axis {axis}: its sizes follow no rule, and are too many to list: {examples}, ...",
            )
        axis_sizes.append(size)
    return TensorSpec(name=name, dtype=dtype_name(nodes[0].dtype), shape=tuple(axis_sizes), order=tuple(range(len(axis_sizes))))


def _outputs(source: Source, program: ExportedProgram, names: Sequence[str], symbols: Mapping[Any, Size]) -> tuple[TensorSpec, ...]:
    (node,) = [node for node in program.graph.nodes if node.op == "output"]
    count = len(names)
    values = [item.meta["val"] for item in node.args[0][-count:]]
    specs = []
    for name, value in zip(names, values, strict=True):
        shape = tuple([size_of(source, name, axis, size, symbols) for axis, size in enumerate(value.shape)])
        specs.append(TensorSpec(name=name, dtype=dtype_name(value.dtype), shape=shape, order=tuple(range(value.dim()))))
    return tuple(specs)


def _as_eager(source: Source, spec: TensorSpec, index: int, eager: Sequence[EagerShapes]) -> TensorSpec:
    """Returns `spec` with the shape from eager PyTorch.  An export may add an axis of size 1, as torch before 2.13 does to an
    LSTM's states (pytorch issue 151200).  Raises export-failed for any other difference."""
    shapes = [spec.shape, *[spec.shape[:axis] + spec.shape[axis + 1 :] for axis, size in enumerate(spec.shape) if size == 1]]
    for shape in shapes:
        if all(tuple([evaluate(size, sizes) for size in shape]) == output_shapes[index] for sizes, output_shapes in eager):
            return replace(spec, shape=shape, order=tuple(range(len(shape))))
    raise ModelError(
        "export-failed",
        f"{source.label}: output {spec.name!r}: export gives the shape {list(spec.shape)}, "
        f"eager PyTorch {list(eager[-1][1][index])} at {eager[-1][0]}",
    )


def size_of(source: Source, name: str, axis: int, size: Any, symbols: Mapping[Any, Size]) -> Size:
    """Returns the size of an axis of output `name` in terms of the declared dimensions.  Raises data-dependent-output,
    structure-unsupported."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    unknown = sorted(str(symbol) for symbol in size.node.expr.free_symbols if symbol not in symbols)
    if unknown:
        raise ModelError(
            "data-dependent-output",
            f"{source.label}: output {name!r}, axis {axis}: its size {size} depends on data, not on the declared dimensions",
        )
    try:
        return _convert(size.node.expr, symbols)
    except KeyError:
        raise ModelError(
            "structure-unsupported", f"{source.label}: output {name!r}, axis {axis}: the size {size} cannot be written in a bundle"
        ) from None


def _convert(expr: Any, symbols: Mapping[Any, Size]) -> Size:
    """Converts a sympy expression to a Size.  Raises KeyError for an operator that the format does not have."""
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        return symbols[expr]
    kind = type(expr).__name__
    if kind in ("Add", "Mul"):
        parts = sorted((_convert(part, symbols) for part in expr.args), key=lambda part: (isinstance(part, int), str(part)))
        expression = parts[0]
        for part in parts[1:]:
            expression = (
                ("-", expression, -part)
                if kind == "Add" and isinstance(part, int) and part < 0
                else ("+" if kind == "Add" else "*", expression, part)
            )
        return expression
    if kind == "Pow" and expr.args[1].is_Integer and 1 < int(expr.args[1]) < 5:
        base = _convert(expr.args[0], symbols)
        expression = base
        for _ in range(int(expr.args[1]) - 1):
            expression = ("*", expression, base)
        return expression
    operator = {"FloorDiv": "//", "CleanDiv": "//", "IntTrueDiv": "//", "Mod": "%", "PythonMod": "%"}[kind]
    return (operator, _convert(expr.args[0], symbols), _convert(expr.args[1], symbols))
