"""The cpu target's half of a build: the whole model is one host region."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import torch

from cgbundle.format import archive
from cgbundle.format.schema import Exam, Proof, Region, Target

from ...bundle import emit
from ...export.weights import collect
from ...transforms.output_aliases import with_aliases
from ...util.progress import Stages
from ...util.scratch import scratch_folder
from ...util.tolerance import tolerance
from ..job import Job, Parts
from . import aoti as lower_cpu
from . import layouts

HOST_FILE = "host/model.so"


def build_parts(job: Job, stage: Path, stages: Stages) -> Parts:
    """Compiles the model, and writes the shared object, the weights and the exam into `stage`."""
    program = job.prepared.program
    with scratch_folder() as scratch:
        with stages("lower") as tell:
            shared = job.prepared.aliases
            changing = bool(job.prepared.state) or any(each.name for each in shared)
            compiled = lower_cpu.compile_cpu(program, scratch, tell, [each.output for each in shared], changing)
            tell(f"{HOST_FILE}, {compiled.path.stat().st_size >> 10} KB")
        with stages("emit") as tell:
            weights = collect(program, job.prepared.state)
            bound = layouts.bind_constants(compiled.path, program, weights.rows)
            exams = emit.eager_exam(job.source, job.prepared, job.sizes, weights.rows)
            strides = [layouts.output_strides(bound, [_own(tensor) for tensor in exam.inputs], exam.outputs) for exam in exams]
            bound.region.close()
            (stage / HOST_FILE).parent.mkdir()
            shutil.copyfile(compiled.path, stage / HOST_FILE)
            emit.write_weights(stage / archive.WEIGHTS, weights)
            emit.write_exam(stage / archive.EXAM, exams)
            tell(f"{sum(file.stat().st_size for file in stage.rglob('*') if file.is_file()) / 1e6:.1f} MB")
    proofs = [Proof(key=exam.key, method="none", error=0.0, tolerance=_tolerance(exam)) for exam in exams]
    return Parts(
        target=Target(kind="cpu", arch=platform.machine(), features=compiled.features, torch=job.torch_version, driver=0),
        weights=weights.rows,
        memories=weights.memories,
        regions=(
            Region(name="model", kind="host", reason="the cpu target has no graphs", file=HOST_FILE, constants=bound.constants),
        ),
        programs=with_aliases(
            emit.cpu_programs(exams, strides), job.prepared.aliases, job.prepared.signature.outputs, weights.rows
        ),
        module_state="",
        exam=Exam(compare="tolerance", calls=job.prepared.exam_calls, proofs=tuple(proofs)),
    )


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides: the compiled code writes to inputs of models that do."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def _tolerance(exam: emit.KeyExam) -> float:
    compared = (*exam.outputs, *[tensor for _, tensor in exam.written], *[elements for _, _, elements in exam.state])
    return max(tolerance(tensor.dtype) for tensor in compared)
