"""export: torch.export with the declared dimensions dynamic, over flat tensors.

The model is wrapped so that export sees only tensors in and tensors out; the nesting is kept as data (trees.py).  Tested with
torch 2.11 and 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from cgbundle.schema import Size, TensorSpec, Tree
from cgbundle.sizes import evaluate, linear

from . import axes
from .errors import ExportFailed, SizeExcluded, StructureUnsupported
from .source import Sample, Source, first_line, sample, user_line
from .trees import Leaf, describe, dtype_name, rebuild

PREFIX = "model."
"""The wrapper's name for the user's module, taken off every weight's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The exported program over flat tensors, and the signature.  `flat` runs the user's own module in eager PyTorch the same
    way."""

    program: ExportedProgram
    flat: Flat
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    call: Tree
    result: Tree


Seen = tuple[dict[str, int], list[tuple[int, ...]]]
"""Sizes, and the shapes of the outputs that eager PyTorch gave at them."""


class Flat(torch.nn.Module):
    """The user's module over flat tensors: a tuple of tensors in, a tuple of tensors out."""

    def __init__(self, model: torch.nn.Module, like: Sample) -> None:
        super().__init__()
        self.model = model
        self._like = like
        self.result: Tree | None = None
        self.names: list[str] = []

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        trees = dict(self._like.call["call"])
        names = iter(trees)
        args = [rebuild(trees[next(names)], list(tensors), value) for value in self._like.args]
        kwargs = {name: rebuild(trees[name], list(tensors), value) for name, value in self._like.kwargs.items()}
        leaves: list[Leaf] = []
        self.result = describe(self.model(*args, **kwargs), "", leaves)
        self.names = [name or "output" for name, _ in leaves]
        return tuple([tensor for _, tensor in leaves])


def export(source: Source, sizes: Mapping[str, tuple[int, ...]]) -> Exported:
    """Exports `source` for all sizes.

    Raises DimensionUnused, ShapeIrregular, SizeExcluded (with the dimension), ExportFailed (with the user's file and line),
    StructureUnsupported.
    """
    shapes = axes.input_shapes(source, sizes)
    like = sample(source, axes.probe_sizes(sizes))
    _make_dense(source.model)
    flat = Flat(source.model, like)
    seen = _try_eager(source, flat, sizes)
    program = _export(source, flat, like, shapes, sizes)
    if flat.result is None or not flat.names:
        raise StructureUnsupported(f"{source.label}: the model's result holds no tensor")
    symbols = _symbols(source, program, shapes, sizes)
    inputs = tuple(
        [
            TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=shape, order=memory_order(tensor))
            for (name, tensor), shape in zip(like.leaves, shapes, strict=True)
        ]
    )
    return Exported(
        program=program,
        flat=flat,
        inputs=inputs,
        outputs=tuple(
            [_as_seen(source, spec, index, seen) for index, spec in enumerate(_outputs(source, program, flat.names, symbols))]
        ),
        call=like.call,
        result=flat.result,
    )


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes from outermost to innermost in memory; row-major where the tensor is not dense in any order."""
    order = tuple(sorted(range(tensor.dim()), key=lambda axis: (-tensor.stride(axis), axis)))
    return order if tensor.permute(order).is_contiguous() and not tensor.is_contiguous() else tuple(range(tensor.dim()))


def run_eager(flat: Flat, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The outputs of eager PyTorch.  Inputs are copied first: a model may write to them."""
    with torch.no_grad():
        outputs: tuple[torch.Tensor, ...] = flat(*[tensor.clone() for tensor in tensors])
    return outputs


def _make_dense(model: torch.nn.Module) -> None:
    """Weights with gaps or overlaps (an expanded buffer, a slice) become row-major copies: a bundle stores dense tensors only."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.permute(memory_order(buffer)).is_contiguous():
                module._buffers[name] = buffer.contiguous()
        for parameter in module._parameters.values():
            if parameter is not None and not parameter.permute(memory_order(parameter)).is_contiguous():
                parameter.data = parameter.data.contiguous()


def _try_eager(source: Source, flat: Flat, sizes: Mapping[str, tuple[int, ...]]) -> list[Seen]:
    """Runs the model at its smallest and largest sizes: a model that fails in eager PyTorch is reported as such, and so is a
    result whose nesting depends on a size."""
    results, shapes = [], []
    for pick in (0, -1):
        chosen = {name: values[pick] for name, values in sizes.items()}
        at = ", ".join(f"{name}={size}" for name, size in chosen.items())
        try:
            outputs = run_eager(flat, sample(source, chosen).tensors)
        except StructureUnsupported:
            raise
        except Exception as error:
            place = user_line(error, source.label) or source.label
            raise SizeExcluded(f"{place}: the model fails in eager PyTorch at {at or 'its inputs'}: {first_line(error)}") from error
        results.append(flat.result)
        shapes.append((chosen, [tuple(output.shape) for output in outputs]))
    if results[0] != results[1]:
        raise StructureUnsupported(
            f"{source.label}: the result's nesting or constants change with the sizes: {results[0]} and {results[1]}",
            "return tensors, and numbers that do not depend on a declared dimension",
        )
    return shapes


def _export(
    source: Source, flat: Flat, like: Sample, shapes: Sequence[tuple[Size, ...]], sizes: Mapping[str, tuple[int, ...]]
) -> ExportedProgram:
    # export takes a dimension with a single value above 1 for a constant: the range always leaves room above
    roots = {name: Dim(name, min=values[0], max=max(values[0] + 3, values[-1])) for name, values in sizes.items()}
    try:
        return _torch_export(flat, like, shapes, roots)
    except Exception as error:
        narrower = _narrower(str(error), roots)
        if narrower is None:
            raise _explain(source, error, sizes) from error
    try:
        return _torch_export(flat, like, shapes, narrower)
    except Exception as error:
        raise _explain(source, error, sizes) from error


def _torch_export(flat: Flat, like: Sample, shapes: Sequence[tuple[Size, ...]], roots: Mapping[str, Any]) -> ExportedProgram:
    dynamic = tuple([{axis: _dim(size, roots) for axis, size in enumerate(shape) if not isinstance(size, int)} for shape in shapes])
    with torch.no_grad():
        return torch.export.export(flat, like.tensors, dynamic_shapes=(dynamic,), strict=False)


def _dim(size: Size, roots: Mapping[str, Any]) -> Any:
    rule = linear(size)
    assert rule is not None, size
    name, scale, offset = rule
    made = roots[name] if scale == 1 else scale * roots[name]
    return made + offset if offset else made


def _narrower(text: str, roots: Mapping[str, Any]) -> dict[str, Any] | None:
    """torch.export names the constraint that it found as suggested fixes: "batch = Dim('batch', min=2)", "seq = 8*_seq".

    A range or a multiple is taken up, because every declared size is checked against the exported program afterwards; None for
    anything else, a constant above all.
    """
    _, found, fixes = text.partition("Suggested fixes:")
    if not found:
        return None
    made = dict(roots)
    for name, low, high in re.findall(r"^\s*(\w+) = Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)\s*$", fixes, re.MULTILINE):
        made[name] = Dim(name, min=int(low or 1), max=int(high) if high else None)
    for name, scale, root, offset in re.findall(r"^\s*(\w+) = (?:(\d+)\*)?(_\w+)(?: ([+-] \d+))?\s*$", fixes, re.MULTILINE):
        step = int(offset.replace(" ", "")) if offset else 0
        base = made.get(root) or Dim(root)
        made[name] = int(scale or 1) * base + step if step else int(scale or 1) * base
    return made if made != dict(roots) and made.keys() >= roots.keys() and not _constants(fixes) else None


_INPUT_SIZE = r"L\['tensors'\]\[\d+\]\.size\(\)\[\d+\]"
"""How export spells the size of an input's axis."""


def _constants(fixes: str) -> dict[str, str]:
    """Dimensions that export found to be constant, with the value."""
    return dict(re.findall(r"^\s*(\w+) = (\d+)\s*$", fixes, re.MULTILINE))


def _explain(source: Source, error: Exception, sizes: Mapping[str, tuple[int, ...]]) -> SizeExcluded | ExportFailed:
    text = str(error)
    constants = _constants(text)
    for name in sizes:
        if name in constants:
            return SizeExcluded(
                f"{source.label}: dimension {name!r} cannot vary: the model's code fixes it to {constants[name]}",
                f"remove what depends on the value of {name} (an if, int(), a constant in a view), or declare no such dimension",
            )
        if re.search(rf"\b{name}\b", text) and "onstraint" in text:
            lines = [line.strip(" -*") for line in text.splitlines() if re.search(rf"\b{name}\b", line)]
            line = next((line for line in lines if line.startswith("Not all values")), lines[0])
            return SizeExcluded(f"{source.label}: dimension {name!r}: {re.sub(_INPUT_SIZE, name, line)}")
    place = user_line(error, source.label)
    if not place:
        found = re.search(r'File "([^"]+)", line (\d+), in forward', text)
        place = f"{found[1]}:{found[2]}" if found else source.label
    return ExportFailed(f"{place}: torch.export cannot take the model: {type(error).__name__}: {first_line(error)}")


# --- the signature ------------------------------------------------------------------------------------------------


def _symbols(
    source: Source, program: ExportedProgram, shapes: Sequence[tuple[Size, ...]], sizes: Mapping[str, tuple[int, ...]]
) -> dict[Any, Size]:
    """Export's symbols in terms of the declared dimensions; checks that every declared size satisfies what export found."""
    user = set(program.graph_signature.user_inputs)
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in user]
    found: dict[Any, Size] = {}
    for value, shape in zip(values, shapes, strict=True):
        for actual, size in zip(value.shape, shape, strict=True):
            rule = linear(size)
            if rule is None:
                continue
            name, scale, offset = rule
            expr = actual.node.expr if isinstance(actual, torch.SymInt) else None
            free = sorted(expr.free_symbols, key=str) if expr is not None else []
            if len(free) != 1:
                raise SizeExcluded(f"{source.label}: dimension {name!r} cannot vary: export fixed it to {actual}")
            (symbol,) = free
            assert expr is not None
            step, shift = int(expr.subs(symbol, 1) - expr.subs(symbol, 0)), int(expr.subs(symbol, 0))
            bounds = program.range_constraints.get(symbol)
            for value_of in sizes[name]:
                whole, rest = divmod(scale * value_of + offset - shift, step)
                if rest:
                    raise SizeExcluded(
                        f"{source.label}: {name}={value_of} is excluded: the model needs a multiple of {step // scale}"
                    )
                if bounds is not None and not bounds.lower <= whole <= bounds.upper:
                    low, high = [(step * end + shift - offset) // scale for end in (int(bounds.lower), int(bounds.upper))]
                    raise SizeExcluded(
                        f"{source.label}: {name}={value_of} is excluded: the model works from {name}={low} to {high}"
                    )
            found.setdefault(symbol, _invert(name, scale, offset, step, shift))
    return found


def _invert(name: str, scale: int, offset: int, inner: int, shift: int) -> Size:
    """symbol from inner*symbol + shift = scale*name + offset."""
    size = axes.expression(name, scale, offset - shift)
    return size if inner == 1 else ("//", size, inner)


def _outputs(source: Source, program: ExportedProgram, names: Sequence[str], symbols: Mapping[Any, Size]) -> tuple[TensorSpec, ...]:
    (node,) = [node for node in program.graph.nodes if node.op == "output"]
    count = len(names)
    values = [item.meta["val"] for item in node.args[0][-count:]]
    specs = []
    for name, value in zip(names, values, strict=True):
        shape = tuple([_size(source, name, axis, size, symbols) for axis, size in enumerate(value.shape)])
        specs.append(TensorSpec(name=name, dtype=dtype_name(value.dtype), shape=shape, order=tuple(range(value.dim()))))
    return tuple(specs)


def _as_seen(source: Source, spec: TensorSpec, index: int, seen: Sequence[Seen]) -> TensorSpec:
    """`spec` with the shape that eager PyTorch gave.  Export can be wrong about axes of size 1: torch before 2.13 gives an LSTM's
    states one too many (pytorch issue 151200).  Raises ExportFailed for any other difference."""
    shapes = [spec.shape, *[spec.shape[:axis] + spec.shape[axis + 1 :] for axis, size in enumerate(spec.shape) if size == 1]]
    for shape in shapes:
        if all(tuple([evaluate(size, sizes) for size in shape]) == found[index] for sizes, found in seen):
            return replace(spec, shape=shape, order=tuple(range(len(shape))))
    raise ExportFailed(
        f"{source.label}: output {spec.name!r}: export gives the shape {list(spec.shape)}, "
        f"eager PyTorch {list(seen[-1][1][index])} at {seen[-1][0]}"
    )


def _size(source: Source, name: str, axis: int, size: Any, symbols: Mapping[Any, Size]) -> Size:
    if not isinstance(size, torch.SymInt):
        return int(size)
    unknown = sorted(str(symbol) for symbol in size.node.expr.free_symbols if symbol not in symbols)
    if unknown:
        raise StructureUnsupported(
            f"{source.label}: output {name!r}, axis {axis}: its size {size} depends on data, not on the declared dimensions"
        )
    try:
        return _convert(size.node.expr, symbols)
    except KeyError:
        raise StructureUnsupported(
            f"{source.label}: output {name!r}, axis {axis}: the size {size} cannot be written in a bundle"
        ) from None


def _convert(expr: Any, symbols: Mapping[Any, Size]) -> Size:
    """A sympy expression as a Size.  Raises KeyError for what the format has no operator for."""
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        return symbols[expr]
    kind = type(expr).__name__
    if kind in ("Add", "Mul"):
        parts = sorted((_convert(part, symbols) for part in expr.args), key=lambda part: (isinstance(part, int), str(part)))
        made = parts[0]
        for part in parts[1:]:
            made = (
                ("-", made, -part)
                if kind == "Add" and isinstance(part, int) and part < 0
                else ("+" if kind == "Add" else "*", made, part)
            )
        return made
    if kind == "Pow" and expr.args[1].is_Integer and 1 < int(expr.args[1]) < 5:
        base = _convert(expr.args[0], symbols)
        made = base
        for _ in range(int(expr.args[1]) - 1):
            made = ("*", made, base)
        return made
    operator = {"FloorDiv": "//", "CleanDiv": "//", "IntTrueDiv": "//", "Mod": "%", "PythonMod": "%"}[kind]
    return (operator, _convert(expr.args[0], symbols), _convert(expr.args[1], symbols))


def shape_at(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an input or output at `sizes`."""
    return tuple([evaluate(size, sizes) for size in spec.shape])
