"""Makes the candidate with Triton kernels only: cross-compiles the program that was exported on the GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.export import ExportedProgram

from ...capture.build import CutProgram, graph_names
from ...capture.recordable import Recordable
from ...capture.recorder import Recorded
from ...errors import DEFECT, BuildError
from ...export.programs import Programs
from ...export.torch_program import on_device
from ...export.weights import weight_tensors
from ...offline.lower.jobs import LoweringJob
from ...offline.trace import Calls, compile_programs, configurations, jobs_of, live_weights_of, lower_programs, place_programs
from ...targets.architectures import arch
from ...targets.build_spec import BuildSpec
from ...targets.cuda.host_regions import SplitProgram, split_program
from ...targets.cuda.recorded import RegionKey
from ...targets.kernels.ptxas import lowest_driver
from ...transforms.inlining import code_of
from ...util.progress import Tell
from .candidates import Candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class Traceable:
    """The inputs of cross-compiling.  All tensors are on the CPU."""

    jobs: dict[RegionKey, LoweringJob] = field(repr=False)
    calls: Calls = field(repr=False)
    split: SplitProgram | None


def traceable(spec: BuildSpec, cut: CutProgram) -> Traceable:
    """Copies the program to the CPU.  Raises target-unavailable for an unknown GPU architecture.  Raises inputs-unlike if the host
    regions would differ from those of the captured recordings."""
    arch(spec.chosen.target)
    programs = _on_cpu(spec.programs)
    calls = {key: tuple([tensor.cpu() for tensor in tensors]) for key, tensors in spec.calls().items()}
    split = None
    if cut.split is not None:
        split = split_program(programs, spec.placements, calls)
        if (split.uploads, split.host_only) != (cut.split.uploads, cut.split.host_only):
            problem = "tensors copied between host and GPU have another layout when the CPU computes them"
            raise BuildError("inputs-unlike", problem, DEFECT)
    live = live_weights_of(spec, spec.programs.weights())
    return Traceable(jobs=jobs_of(spec, programs, split, calls, live), calls=calls, split=split)


def trace(
    spec: BuildSpec, inputs: Traceable, recordable: Recordable, scratch: Path, tell: Tell, seconds: float | None = None
) -> Candidate:
    """Lowers and compiles the program, and plans its memory.  Raises the errors of these steps, and TimeoutError if lowering takes
    more than `seconds`."""
    target = arch(spec.chosen.target)
    code = code_of(spec.first.source, spec.programs)
    lowered = lower_programs(inputs.jobs, inputs.split, target, scratch, tell, code=code, seconds=seconds)
    compiled = compile_programs(lowered, target, tell)
    placed = place_programs(spec, lowered, compiled, recordable.layout, inputs.calls, inputs.split)
    program = placed.recorded
    graphs = {
        key: tuple([program.graphs[name, key] for name in graph_names(inputs.split, key)])
        for key in inputs.calls
        if any(key == other for _, other in program.graphs)
    }
    recorded = Recorded(
        graphs=graphs,
        static=dict(program.static),
        replays={},
        weights=program.weights,
        stored=recordable.stored,
        tables=program.tables,
        weights_bytes=program.weights_bytes,
        state_bytes=program.state_bytes,
        states=(),
        reserved=placed.kept.reserved,
        images=dict(program.images),
        arch=target.name,
        driver=lowest_driver(target.capability),
    )
    return Candidate(recorded=recorded, folded=lowered.sources, configurations=configurations(compiled.kernels))


def _on_cpu(programs: Programs) -> Programs:
    """Copies the programs to the CPU.  Weights that share a tensor still share one."""
    copies: dict[object, torch.Tensor] = {}

    def copied(value: torch.Tensor) -> torch.Tensor:
        identity = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride()) if value.numel() else id(value)
        if identity not in copies:
            copies[identity] = value.detach().cpu()
        return copies[identity]

    def moved(program: ExportedProgram) -> ExportedProgram:
        tensors = {name: copied(value) for name, value in weight_tensors(program).items()}
        cpu_program = on_device(program, torch.device("cpu"), tensors)
        cpu_program._example_inputs = None  # they are on the GPU, but a process that loads the program sees no GPU
        return cpu_program

    return programs.changed(moved)
