"""Checks that launches do not depend on the rows of state: lowers an int_key of each entry with more rows, and compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..errors import ModelError
from ..model.flat_module import PREFIX
from ..targets.build_spec import BuildSpec
from ..targets.cuda.recorded import RegionKey
from ..targets.memory_layout import MORE
from ..transforms.state_rows import with_more_rows
from .lower.jobs import LoweringJob
from .lowered import WEIGHT, Lowered
from .trace import CompiledPrograms, LoweredPrograms


def same_launches(
    spec: BuildSpec,
    jobs: Mapping[RegionKey, LoweringJob],
    reference: tuple[LoweredPrograms, CompiledPrograms],
    make: Callable[[dict[RegionKey, LoweringJob]], tuple[LoweredPrograms, CompiledPrograms]],
) -> None:
    """Compares `reference`, the result of `jobs`, with the result for more rows.  `make` lowers and compiles.  Raises state-refused
    for a difference."""
    rows = spec.first.source.rows
    firsts: dict[int, RegionKey] = {}
    for region, key in jobs:
        firsts.setdefault(key[0] if len(spec.entries) > 1 else 0, (region, key))
    others = {place: replace(jobs[place], program=with_more_rows(jobs[place].program, rows, MORE)) for place in firsts.values()}
    varying = {PREFIX + name for group in rows for name in group.buffers}
    changed = make(others)
    for key in changed[0].traced:
        inputs = [_recording_inputs(lowered.traced[key], compiled, varying) for lowered, compiled in (reference, changed)]
        if inputs[0] != inputs[1]:
            text = f"int_key {key}: with more {' or '.join([group.name for group in rows])} the kernels or their arguments differ"
            raise ModelError("state-refused", text, "let no operator of the model read the size of the state")


def _recording_inputs(lowered: Lowered, compiled: CompiledPrograms, varying: set[str]) -> object:
    """Everything that determines a program's recording, except the size of state with a variable number of rows.  Compares images
    of kernels, because their source may contain a size that the compiler drops."""
    buffers = [replace(row, nbytes=0) if row.kind == WEIGHT and row.name in varying else row for row in lowered.buffers]
    kernels = [(compiled.kernels[variant].sha256, compiled.kernels[variant].symbol) for variant in lowered.variants]
    return buffers, kernels, lowered.events, lowered.inputs, lowered.outputs
