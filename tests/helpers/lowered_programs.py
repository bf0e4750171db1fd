"""Assembles a lowered program into one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cgbundle.format.schema import MEMORIES
from cgbundle.validate.module_state import Address
from cgcompile.offline.assemble.arena import Plan
from cgcompile.offline.assemble.rows import assemble
from cgcompile.offline.compile.kernels import CompiledKernel
from cgcompile.offline.lowered import Lowered, LoweredProgram, RegionEvents
from cgcompile.targets.cuda.recorded import RecordedGraph
from tests.helpers.bundles.conditional_rows import function


def assembled(
    lowered: Lowered,
    compiled: Sequence[CompiledKernel],
    plan: Plan,
    weights: Mapping[str, int],
    inputs: Sequence[int],
    written: Sequence[int] = (),
    memory: str = "weights",
) -> RecordedGraph:
    """Returns the graph; `weights` are offsets in `memory`."""
    places = {name: Address(memory=MEMORIES.index(memory), offset=offset) for name, offset in weights.items()}
    region = RegionEvents(name="model", start=0, stop=len(lowered.events), inputs=lowered.inputs, outputs=lowered.outputs)
    program = LoweredProgram(lowered=lowered, regions=(region,))
    (graph,) = assemble(program, compiled, plan, places, inputs, written, function("cd" * 32))
    return graph
