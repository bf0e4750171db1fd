"""The cpu target's half of a build: the whole model is one host region."""

from __future__ import annotations

import platform
import shutil
import tempfile
from pathlib import Path

import torch

from cgbundle import archive
from cgbundle.schema import Exam, Proof, Region, Target

from . import emit, layouts, lower_cpu
from .job import Job, Parts
from .progress import Stages
from .tolerance import tolerance
from .weights import collect

HOST_FILE = "host/model.so"


def build_parts(job: Job, stage: Path, stages: Stages) -> Parts:
    """Compiles the model, and writes the shared object, the weights and the exam into `stage`."""
    program = job.exported.program
    with tempfile.TemporaryDirectory(prefix="cgcompile-") as scratch:
        with stages("lower") as tell:
            compiled = lower_cpu.compile_cpu(program, Path(scratch), tell)
            tell(f"{HOST_FILE}, {compiled.path.stat().st_size >> 10} KB")
        with stages("emit") as tell:
            weights = collect(program)
            region, constants = layouts.bind_constants(compiled.path, program, weights.rows)
            exams = emit.eager_exam(job.source, job.exported, job.sizes)
            strides = [layouts.output_strides(region, [_own(tensor) for tensor in exam.inputs], exam.outputs) for exam in exams]
            region.close()
            (stage / HOST_FILE).parent.mkdir()
            shutil.copyfile(compiled.path, stage / HOST_FILE)
            emit.write_weights(stage / archive.WEIGHTS, weights)
            emit.write_exam(stage / archive.EXAM, exams)
            tell(f"{sum(file.stat().st_size for file in stage.rglob('*') if file.is_file()) / 1e6:.1f} MB")
    proofs = [Proof(key=exam.key, method="none", error=0.0, tolerance=_tolerance(exam)) for exam in exams]
    return Parts(
        target=Target(kind="cpu", arch=platform.machine(), features=compiled.features, torch=job.torch_version, driver=0),
        weights=weights.rows,
        memories=(("weights", weights.bytes),),
        regions=(Region(name="model", kind="host", reason="the cpu target has no graphs", file=HOST_FILE, constants=constants),),
        programs=emit.cpu_programs(exams, strides),
        module_state="",
        exam=Exam(compare="tolerance", proofs=tuple(proofs)),
    )


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides: the compiled code writes to inputs of models that do."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def _tolerance(exam: emit.KeyExam) -> float:
    return max(tolerance(tensor.dtype) for tensor in (*exam.outputs, *[tensor for _, tensor in exam.written]))
