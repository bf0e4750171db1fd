"""The proof of a bundle that cannot run here: its steps as stages for the interpreter, and what was read, against eager PyTorch.
The stages follow from the manifest's rows, so that the order of steps and the places of copies are proved too.  Host regions do not
run: what they make is what eager PyTorch makes of the same inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cgbundle.exam import key_text
from cgbundle.format.schema import Dimension, IntKey, Program, Proof, Value, Weight
from cgbundle.tables.recording import Recording

from ..bundle.exam import KeyExam
from ..bundle.proof import REPORT, accepted, measured
from ..errors import BuildError
from ..partition.isolated import eager_values
from ..targets.cuda.host_regions import SplitProgram
from ..targets.weights import row_major
from ..transforms.error_bounds import ErrorBound
from ..util.tolerance import compare
from .compile.kernels import CompiledKernel
from .interpret.interpret import Outcome, Stage, Task
from .lowered import KernelVariant

Sources = tuple[tuple[tuple[str, str], KernelVariant], ...]
"""(image's sha256, symbol) of a kernel, and what it was compiled from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The stages of a program, and what eager PyTorch says of all that is read, in order: first what goes to the host, then the
    call's outputs."""

    key: IntKey
    stages: tuple[Stage, ...]
    crossing: tuple[torch.Tensor, ...] = field(repr=False)
    outputs: tuple[torch.Tensor, ...] = field(repr=False)


def make_trial(program: Program, exam: KeyExam, recordings: Mapping[str, Recording], split: SplitProgram | None) -> Trial:
    """The steps of a program on the exam's inputs.  `recordings` by the file of the step; `split` None for one graph alone."""
    contents = _contents(program, exam, split)
    growing = _Stages()
    crossing = []
    growing.give([(program.values[index], contents[index]) for index in program.inputs])
    for step in program.steps:
        if step.kind == "graph":
            growing.run(recordings[step.file])
        elif step.kind == "copy":
            source, target = step.inputs[0], step.outputs[0]
            if program.values[target].memory != "host":
                growing.give([(program.values[target], contents[source])])
            else:
                growing.read.append(program.values[source])
                crossing.append(contents[source])
    growing.read += [program.values[index] for index in program.outputs]
    growing.close()
    return Trial(key=program.key, stages=tuple(growing.stages), crossing=tuple(crossing), outputs=exam.outputs)


def _contents(program: Program, exam: KeyExam, split: SplitProgram | None) -> dict[int, torch.Tensor]:
    """Position of a value -> what eager PyTorch says it holds, on the CPU."""
    found = dict(zip(program.inputs, exam.inputs, strict=True))
    if split is None:
        return found
    planned = split.partitions[exam.key]
    values = eager_values(split.regions[exam.key], planned, exam.inputs)
    regions = iter([region for region in planned.regions if region.kind == "graph" or region.operations])
    for step in program.steps:
        if step.kind == "copy":
            found[step.outputs[0]] = found[step.inputs[0]]
        else:
            found.update(zip(step.outputs, [values[name] for name in next(regions).outputs], strict=True))
    return found


def kernel_sources(compiled: Mapping[KernelVariant, CompiledKernel]) -> Sources:
    """What the kernels of a build were compiled from."""
    return tuple({(kernel.sha256, kernel.symbol): variant for variant, kernel in compiled.items()}.items())


def make_task(
    trial: Trial, program: Program, sources: Sources, memories: Sequence[tuple[str, int]], weights: Path, placed: tuple[Weight, ...]
) -> Task:
    """What the interpreter is asked for: the memories are as large as this key needs them."""
    functions = {each for stage in trial.stages if stage.recording for each in stage.recording.functions}
    used = {(function.image, function.symbol) for function in functions}
    return Task(
        key=trial.key,
        stages=trial.stages,
        variants=tuple([pair for pair in sources if pair[0] in used]),
        sizes=(("weights", dict(memories)["weights"]), ("inputs", program.static), ("arena", program.arena)),
        weights=weights,
        placed=placed,
    )


def proved(
    dimensions: Sequence[Dimension],
    bounds: Sequence[ErrorBound],
    proofs: Sequence[Proof],
    trials: Sequence[tuple[Trial, Outcome]],
    within: float,
    waive: Sequence[str] = (),
) -> tuple[tuple[float, ...], tuple[Proof, ...]]:
    """The exam's bounds and proofs as the outcomes make them; a proof without one stays as it is.

    `within` bounds what goes to the host: of integers there it is the share that may differ.  Rounding may turn a comparison over,
    and what follows is computed with eager PyTorch's.  Raises proof-failed.
    """
    found = {}
    for trial, outcome in trials:
        count = len(trial.crossing)
        for want, got in zip(trial.crossing, outcome.read[:count], strict=True):
            given = compare(want, _tensor(want, got))
            if not given.error <= within:
                raise BuildError(
                    "proof-failed",
                    f"int_key {key_text(dimensions, trial.key)}: what the interpreted kernels give to the host differs from "
                    f"eager PyTorch by {given.error:.1e}, allowed {within:.1e}: {given.text}",
                    REPORT,
                )
        pairs = zip(trial.outputs, outcome.read[count:], strict=True)
        found[trial.key] = [compare(want, _tensor(want, got)) for want, got in pairs]
    kept = accepted(dimensions, bounds, found, waive, "the interpreted kernels differ")
    made = {key: measured(key, "interpret", differences, kept) for key, differences in found.items()}
    return kept, tuple([made.get(proof.key, proof) for proof in proofs])


def _tensor(like: torch.Tensor, contents: bytes) -> torch.Tensor:
    if not like.numel():
        return torch.empty_like(like)
    return torch.frombuffer(bytearray(contents), dtype=like.dtype).reshape(like.shape)


class _Stages:
    """Stages, growing: what is given after a recording ran begins the next."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.given: list[tuple[Value, bytes]] = []
        self.recording: Recording | None = None
        self.read: list[Value] = []

    def give(self, tensors: Sequence[tuple[Value, torch.Tensor]]) -> None:
        if self.recording or self.read:
            self.close()
        self.given += [(value, row_major(tensor)) for value, tensor in tensors]

    def run(self, recording: Recording) -> None:
        if self.recording or self.read:
            self.close()
        self.recording = recording

    def close(self) -> None:
        self.stages.append(Stage(given=tuple(self.given), recording=self.recording, read=tuple(self.read)))
        self.given, self.recording, self.read = [], None, []
