"""Gives bounds to outputs whose sizes depend on data, and checks the result against eager PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.export import ExportedProgram

from cgbundle.format.schema import IntKey, Size

from ...errors import ModelError
from ...export.bounded.axes import Unsupported
from ...export.exported import Exported
from ...export.programs import Programs, coarsest
from ...export.signature.output_sizes import fitted, tabled
from ...export.signature.signature import size_of, symbols_of
from ...model.dynamic_axes import BoundedAxis, bounded_outputs, bounded_shapes, names_of_counts
from ...model.flat_module import ProgramModule, Reference, run_eager
from ...model.source import CPU, SEED, SELF_TEST_SEED, sample
from ...model.user_code import first_line
from ...util.tolerance import compare, is_float
from .rewrite import Bounded, with_bounds


def with_bounded_outputs(exported: Exported) -> Exported:
    """Returns the export with bounds for outputs of data-dependent size.  Its `flat` pads these outputs from then on.

    Returns the export unchanged if there is no such output.  Sets `unbounded` to the reason if `with_bounds` does not support the
    program, or if the results differ from eager PyTorch's.  The check data-dependent-shape then refuses the model.
    """
    if any(obstacle.rule == "data-dependent-branch" for obstacle in exported.obstacles):
        return exported
    bounds: dict[int, Bounded] = {}
    try:
        for _, program in exported.programs.distinct:
            if (bounded := with_bounds(program, told_gpu=exported.source.target_device != CPU)) is None:
                return exported
            bounds[id(program)] = bounded
        programs = exported.programs.changed(lambda program: bounds[id(program)].program)
        rows = _rows(exported, programs, [bound.axes for bound in bounds.values()])
    except (Unsupported, ModelError) as error:
        return replace(exported, unbounded=first_line(error))
    if not all(_agrees(exported, programs, rows, key) for key in programs.by_key):
        return replace(exported, unbounded="with a bound, the results differ from eager PyTorch's")
    flat = exported.flat
    flat.bounded, flat.shapes = rows, exported.shapes
    flat.names += names_of_counts(flat.names, rows)
    shapes = tuple([(sizes, bounded_shapes(plain_shapes, rows, sizes)) for sizes, plain_shapes in exported.eager_shapes])
    return replace(exported, programs=programs, eager_shapes=shapes)


def _rows(exported: Exported, programs: Programs, axes: Sequence[Sequence[tuple[int, int, int]]]) -> tuple[BoundedAxis, ...]:
    """Returns the padded axes, with bounds in terms of the declared dimensions.  Raises Unsupported, ModelError."""
    if len(set(map(tuple, axes))) > 1:
        raise Unsupported("the axes of data-dependent size differ between the declared sizes")
    source, sizes = exported.source, exported.sizes
    symbols = symbols_of(source, programs.first, exported.shapes, sizes) if programs.dynamic else {}
    rows = []
    for output, axis, count in axes[0]:
        extents = [_output(program, output).shape[axis] for _, program in programs.distinct]
        bound: Size | None
        if programs.dynamic:
            bound = size_of(source, str(output), axis, extents[0], symbols)
        else:
            points = [(dict(zip(sizes, key, strict=True)), int(size)) for key, size in zip(programs.by_key, extents, strict=True)]
            bound = fitted(points) or tabled(points)
        if bound is None:
            raise Unsupported("the bound is no expression of the declared sizes")
        rows.append(BoundedAxis(output=output, axis=axis, count=count, bound=bound))
    return tuple(rows)


def _output(program: ExportedProgram, index: int) -> torch.Tensor:
    value: torch.Tensor = program.graph.output_node().args[0][index].meta["val"]
    return value


def _agrees(exported: Exported, programs: Programs, rows: Sequence[BoundedAxis], key: IntKey) -> bool:
    """Whether the program of an int_key agrees with eager PyTorch on inputs of two seeds."""
    bound, sizes = coarsest(programs), dict(zip(exported.sizes, key, strict=True))
    module = ProgramModule([programs.at(key)])
    for seed in (SEED, SELF_TEST_SEED):
        tensors = sample(exported.source, sizes, seed).tensors
        expected = bounded_outputs(_seeded(exported.flat, tensors), rows, sizes)
        actual = _seeded(module, tensors)
        pairs = zip(expected, actual, strict=True)
        if any(compare(want, got).error > (bound if is_float(want.dtype) else 0.0) for want, got in pairs):
            return False
    return True


def _seeded(reference: Reference, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns the outputs of a run with a fixed random seed."""
    with torch.random.fork_rng(devices=sorted({tensor.device.index or 0 for tensor in tensors if tensor.is_cuda})):
        torch.manual_seed(SEED)
        return run_eager(reference, tensors).outputs
