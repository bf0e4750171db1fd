"""The candidate in Triton alone: the program, exported on the GPU, is lowered as if the GPU were not here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.export import ExportedProgram

from cgbundle.format.schema import IntKey

from ...capture.build import CutProgram, example_calls, graph_names
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
    """What is lowered: all of it on the CPU, independent of the GPU's memory."""

    jobs: dict[RegionKey, LoweringJob] = field(repr=False)
    calls: Calls = field(repr=False)
    split: SplitProgram | None


def traceable(spec: BuildSpec, cut: CutProgram) -> Traceable:
    """Copies the program to the CPU.  Raises target-unavailable for a GPU that nobody described, and inputs-unlike where the host's
    part would not be the one of the captured recordings."""
    arch(spec.target)
    programs = _on_cpu(spec.programs)
    calls: dict[IntKey, tuple[torch.Tensor, ...]] = {
        key: tuple([tensor.cpu() for tensor in args]) for key, (args, _) in example_calls(spec).items()
    }
    split = None
    if cut.split is not None:
        placements = spec.by_key({entry.name: entry.placements for entry in spec.entries})
        split = split_program(programs, placements, calls)
        if (split.uploads, split.host_only) != (cut.split.uploads, cut.split.host_only):
            what = "what crosses between host and GPU is laid out otherwise where the CPU computed it"
            raise BuildError("inputs-unlike", what, DEFECT)
    live = live_weights_of(spec, spec.programs.weights())
    return Traceable(jobs=jobs_of(spec, programs, split, calls, live), calls=calls, split=split)


def trace(
    spec: BuildSpec, what: Traceable, recordable: Recordable, scratch: Path, tell: Tell, seconds: float | None = None
) -> Candidate:
    """Lowers, compiles and plans.  Raises the refusals of lowering, of the compiler and of the plan, and TimeoutError when lowering
    takes more than so many `seconds`."""
    target = arch(spec.target)
    code = code_of(spec.entries[0].source, spec.programs)
    lowered = lower_programs(what.jobs, what.split, target, scratch, tell, code=code, seconds=seconds)
    compiled = compile_programs(lowered, target, tell)
    placed = place_programs(spec, lowered, compiled, recordable.layout, what.calls, what.split)
    program = placed.recorded
    graphs = {
        key: tuple([program.graphs[name, key] for name in graph_names(what.split, key)])
        for key in what.calls
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
    """The programs as if they had been exported on the CPU; weights that are one tensor stay one."""
    copies: dict[object, torch.Tensor] = {}

    def copied(value: torch.Tensor) -> torch.Tensor:
        same = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride()) if value.numel() else id(value)
        if same not in copies:
            copies[same] = value.detach().cpu()
        return copies[same]

    def moved(program: ExportedProgram) -> ExportedProgram:
        tensors = {name: copied(value) for name, value in weight_tensors(program).items()}
        cpu_program = on_device(program, torch.device("cpu"), tensors)
        cpu_program._example_inputs = None  # they are on the GPU, and who loads the program sees none
        return cpu_program

    return programs.changed(moved)
