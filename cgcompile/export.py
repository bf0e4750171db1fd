"""export: torch.export with the declared dimensions dynamic, over flat tensors.

The model is wrapped so that export sees only tensors in and tensors out; the nesting is kept as data (trees.py).  Tested with
torch 2.11 and 2.13.
"""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from cgbundle.schema import Size, TensorSpec, Tree
from cgbundle.sizes import evaluate, linear

from . import axes
from .aliases import Shared
from .attributes import ATTRIBUTE_FIX, changed, marks, place
from .errors import BranchOnData, ExportFailed, OutputSizeUnknown, SizeExcluded, StateChanged, StructureUnsupported
from .flat import Computed, Eager, Flat, nobody, run_eager
from .obstacles import BRANCH, BRANCH_FIX, Obstacle, Run, user_place
from .source import Sample, Source, first_line, sample, user_line
from .trees import dtype_name

PREFIX = "model."
"""The wrapper's name for the user's module, taken off every weight's name."""


Seen = tuple[dict[str, int], list[tuple[int, ...]]]
"""Sizes, and the shapes of the outputs that eager PyTorch gave at them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """What torch.export made of a model, before the signature: all that the checks look at.  `shapes` are those of the inputs,
    `seen` what eager PyTorch gave at the smallest and the largest sizes, `obstacles` what leaves no operation in the program."""

    source: Source
    sizes: Mapping[str, tuple[int, ...]]
    program: ExportedProgram
    flat: Flat
    like: Sample
    shapes: tuple[tuple[Size, ...], ...]
    seen: tuple[Seen, ...]
    obstacles: tuple[Obstacle, ...]

    @property
    def call(self) -> Tree:
        """The structure of the call's inputs."""
        return self.like.call


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The exported program over flat tensors, and the signature.  `flat` runs the user's own module in eager PyTorch the same
    way.  `written`: positions of the inputs that the program writes to; `state`: its buffers that it writes to, by their names
    in the program, which are the user's behind PREFIX: the checks find both.
    `aliases`: outputs that share memory (see aliases.py).  `calls`: how often the exam calls each int_key.
    `computed`: the program itself, where it computes its random numbers, which eager PyTorch would draw otherwise."""

    program: ExportedProgram
    flat: Flat
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    call: Tree
    result: Tree
    obstacles: tuple[Obstacle, ...] = ()
    written: tuple[int, ...] = ()
    state: tuple[str, ...] = ()
    calls: int = 1
    computed: Computed | None = None

    @property
    def eager(self) -> Eager:
        """What eager PyTorch runs to know what a call has to give."""
        return self.computed or self.flat

    aliases: tuple[Shared, ...] = ()


def export(source: Source, sizes: Mapping[str, tuple[int, ...]]) -> Exported:
    """Exports `source` for all sizes.

    Raises DimensionUnused, ShapeIrregular, SizeExcluded (with the dimension), ExportFailed (with the user's file and line) and
    BranchOnData, StructureUnsupported and OutputSizeUnknown.
    """
    traced = trace(source, sizes)
    for obstacle in traced.obstacles:
        if obstacle.rule == "data-dependent-branch":
            raise _branch(obstacle.where or source.label, obstacle.source)
    return describe_signature(traced)


def trace(source: Source, sizes: Mapping[str, tuple[int, ...]]) -> Traced:
    """The exported program, whatever it holds.  Where Python branched on the value of a tensor, it is one of several: the obstacles
    say so, and nothing may be built from it.  Raises as `export` does."""
    shapes = axes.input_shapes(source, sizes)
    like = sample(source, axes.probe_sizes(sizes))
    _make_dense(source.model)
    flat = Flat(source.model, like)
    runs: list[Run] = []
    flat.watch = runs.append
    seen = _try_eager(source, flat, sizes)
    flat.run = runs[0]
    left = _left_behind(source, flat, sizes)
    try:
        program, obstacles = _past_branches(source, flat, shapes, sizes, runs)
    except (ExportFailed, SizeExcluded) as error:
        if left:  # the likelier cause, and one that has to go anyway
            raise StateChanged(
                f"{left[0].where or source.label}: {left[0].message}, which is no buffer: {error}", ATTRIBUTE_FIX
            ) from error
        raise
    flat.watch = nobody
    return Traced(
        source=source, sizes=sizes, program=program, flat=flat, like=like, shapes=tuple(shapes), seen=tuple(seen),
        obstacles=(*left, *obstacles),
    )  # fmt: skip


def _past_branches(
    source: Source, flat: Flat, shapes: Sequence[tuple[Size, ...]], sizes: Mapping[str, tuple[int, ...]], runs: list[Run]
) -> tuple[ExportedProgram, tuple[Obstacle, ...]]:
    """The program and the obstacles.  Where a branch on a number that Python read out of a tensor stops the export, it is made
    again with that number as eager PyTorch had it, so that the checks see what comes after."""
    passed: list[Obstacle] = []
    while True:
        try:
            program = _export(source, flat, flat.like, shapes, sizes)
        except BranchOnData as error:
            stop = error.__cause__
            more = runs[-1].reads_of(_free_symbols(stop)) - flat.known
            if not more or stop is None:
                raise
            where, line = user_place(stop)
            passed.append(Obstacle(rule="data-dependent-branch", message=BRANCH, where=where, source=line))
            flat.known = flat.known | more
        else:
            return program, tuple(dict.fromkeys([*passed, *runs[-1].obstacles]))


def _free_symbols(error: BaseException | None) -> frozenset[Any]:
    """The symbols of the condition that stopped an export."""
    return frozenset(getattr(getattr(error, "cond", None), "free_symbols", ()))


def describe_signature(traced: Traced) -> Exported:
    """The inputs and outputs in terms of the declared dimensions.  Raises SizeExcluded, ExportFailed, StructureUnsupported,
    OutputSizeUnknown."""
    source, program, flat = traced.source, traced.program, traced.flat
    if flat.result is None or not flat.names:
        raise StructureUnsupported(f"{source.label}: the model's result holds no tensor")
    symbols = _symbols(source, program, traced.shapes, traced.sizes)
    inputs = tuple(
        [
            TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=shape, order=memory_order(tensor))
            for (name, tensor), shape in zip(traced.like.leaves, traced.shapes, strict=True)
        ]
    )
    outputs = _outputs(source, program, flat.names, symbols)
    return Exported(
        program=program,
        flat=flat,
        inputs=inputs,
        outputs=tuple([_as_seen(source, spec, index, traced.seen) for index, spec in enumerate(outputs)]),
        call=traced.call,
        result=flat.result,
        obstacles=traced.obstacles,
    )


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes from outermost to innermost in memory; row-major where the tensor is not dense in any order."""
    order = tuple(sorted(range(tensor.dim()), key=lambda axis: (-tensor.stride(axis), axis)))
    return order if tensor.permute(order).is_contiguous() and not tensor.is_contiguous() else tuple(range(tensor.dim()))


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
        except (StructureUnsupported, StateChanged):
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


def _left_behind(source: Source, flat: Flat, sizes: Mapping[str, tuple[int, ...]]) -> tuple[Obstacle, ...]:
    """The attributes that a call changes, at every call: the first ones may fill caches."""
    tensors = sample(source, {name: values[0] for name, values in sizes.items()}).tensors
    watch, flat.watch = flat.watch, nobody
    run_eager(flat, tensors)
    before = marks(source.model)
    run_eager(flat, tensors)
    flat.watch = watch
    names = changed(before, marks(source.model))
    places = {name: place(source.model, name) for name in names}
    return tuple(
        [
            Obstacle(rule="mutated-attribute", message=f"forward() changes {name!r}", where=where, source=line)
            for name, (where, line) in places.items()
        ]
    )


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
    said = io.StringIO()
    with torch.no_grad(), redirect_stderr(said), _quiet(logging.getLogger("torch.fx.experimental.symbolic_shapes")):
        program = torch.export.export(flat, _apart(like.tensors), dynamic_shapes=(dynamic,), strict=False)
    sys.stderr.write(said.getvalue())
    return program


def _apart(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors, each in a storage of its own where it shared one: in a bundle no input is a view of another, and torch cannot
    make a program functional that writes to such.  One whose elements share memory stays as it is."""
    seen: set[int] = set()
    made = []
    for tensor in tensors:
        home = tensor.untyped_storage().data_ptr()
        if home in seen and all(stride or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
        seen.add(home)
        made.append(tensor)
    return tuple(made)


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """A failing export logs what it could not guard on, and prints its graph: what they mean is in the exception."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


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
    if isinstance(error, GuardOnDataDependentSymNode):
        place, line = user_place(error)
        return _branch(place or source.label, line)
    place = user_line(error, source.label)
    if not place:
        found = re.search(r'File "([^"]+)", line (\d+), in forward', text)
        place = f"{found[1]}:{found[2]}" if found else source.label
    return ExportFailed(f"{place}: torch.export cannot take the model: {type(error).__name__}: {first_line(error)}")


def _branch(where: str, line: str) -> BranchOnData:
    return BranchOnData(f"{where}: data-dependent-branch: {BRANCH}: {line}", BRANCH_FIX)


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
        raise OutputSizeUnknown(
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
