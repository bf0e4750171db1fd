"""Programs with bounds, checked against eager PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cgbundle.format.schema import Size, Sizes

from ...errors import ModelError
from ...model.bounded_outputs import BoundedAxis, bounded_outputs
from ...model.flat_module import FlatModule, ProgramModule, call_eager
from ...model.source import EXAM_SEED, SEED, Source, sample
from ...util.tolerance import compare, is_float
from ..programs import Programs, coarsest
from ..signature.output_sizes import fitted, tabled
from ..signature.signature import size_of, symbols_of
from .axes import Unsupported
from .rewrite import Bounded, with_bounds


def bounded_programs(
    source: Source, flat: FlatModule, programs: Programs, shapes: Sequence[Sizes], sizes: Mapping[str, tuple[int, ...]]
) -> Programs:
    """The programs with bounds for outputs of sizes that depend on data; `flat` fills its outputs up from then on.

    As they were where no output has such a size, and where one follows from what `with_bounds` does not support, which
    data-dependent-shape refuses.
    """
    made: dict[int, Bounded] = {}
    try:
        for _, program in programs.each:
            if (bounded := with_bounds(program)) is None:
                return programs
            made[id(program)] = bounded
        changed = programs.changed(lambda program: made[id(program)].program)
        rows = _rows(source, flat, changed, [each.axes for each in made.values()], shapes, sizes)
    except (Unsupported, ModelError):
        return programs
    if not all(_agrees(source, flat, changed, rows, key, sizes) for key in programs.by_key):
        return programs
    flat.bounded, flat.shapes = rows, tuple(shapes)
    return changed


def _rows(
    source: Source,
    flat: FlatModule,
    programs: Programs,
    axes: Sequence[Sequence[tuple[int, int, int]]],
    shapes: Sequence[Sizes],
    sizes: Mapping[str, tuple[int, ...]],
) -> tuple[BoundedAxis, ...]:
    """The padded axes, with their bounds in terms of the declared dimensions.  Raises Unsupported, ModelError."""
    if len(set(axes)) > 1:
        raise Unsupported("axes that change with the sizes")
    symbols = symbols_of(source, programs.first, shapes, sizes) if programs.dynamic else {}
    rows = []
    for output, axis, count in axes[0]:
        found = [_output(program, output).shape[axis] for _, program in programs.each]
        bound: Size | None
        if programs.dynamic:
            bound = size_of(source, str(output), axis, found[0], symbols)
        else:
            points = [(dict(zip(sizes, key, strict=True)), int(size)) for key, size in zip(programs.by_key, found, strict=True)]
            bound = fitted(points) or tabled(points)
        if bound is None:
            raise Unsupported("a bound that follows no rule")
        rows.append(BoundedAxis(output=output, axis=axis, count=count, bound=bound))
    return tuple(rows)


def _output(program: torch.export.ExportedProgram, index: int) -> torch.Tensor:
    value: torch.Tensor = program.graph.output_node().args[0][index].meta["val"]
    return value


def _agrees(
    source: Source,
    flat: FlatModule,
    programs: Programs,
    rows: Sequence[BoundedAxis],
    key: tuple[int, ...],
    sizes: Mapping[str, tuple[int, ...]],
) -> bool:
    """Whether the program of an int_key gives what eager PyTorch gives, on inputs of two seeds; a model that fails is not asked."""
    bound, chosen = coarsest(programs), dict(zip(sizes, key, strict=True))
    module = ProgramModule([programs.at(key)])
    for seed in (SEED, EXAM_SEED):
        tensors = sample(source, chosen, seed).tensors
        wanted = bounded_outputs(call_eager(flat, [tensor.clone() for tensor in tensors], seed), rows, chosen)
        given = call_eager(module, [tensor.clone() for tensor in tensors], seed)
        flat.snapshot.restore()
        if any(
            compare(want, got).error > (bound if is_float(want.dtype) else 0.0) for want, got in zip(wanted, given, strict=True)
        ):
            return False
    return True
