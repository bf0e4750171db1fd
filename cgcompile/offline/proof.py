"""The self-test of a bundle that cannot run on this machine.  The steps of a program become stages for the interpreter, whose
results are compared with eager PyTorch.  The stages come from the manifest, so the order of the steps and the copies are tested,
too.  Host regions do not run: eager PyTorch computes their outputs from the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from cgbundle.format import file_names
from cgbundle.format.file_names import FORWARD
from cgbundle.format.schema import Dimension, IntKey, Program, Proof, Value, Weight
from cgbundle.self_test import key_text
from cgcompile.bundle.recordings import Recording

from ..bundle.proof import REPORT, accepted, measured
from ..bundle.ranks import Ranks
from ..bundle.self_test import KeySelfTest, state_after
from ..errors import BuildError
from ..model.flat_module import PREFIX
from ..partition.isolated import eager_values
from ..targets.cuda.host_regions import SplitProgram
from ..targets.weights import row_major
from ..transforms.error_bounds import ErrorBound
from ..transforms.near_ties.judge import Seen
from ..transforms.prepared import Prepared
from ..util.tolerance import Difference, compare, is_float
from .compile.kernels import CompiledKernel
from .interpret.interpret import Outcome, Stage, Task, WeightFiles
from .lowered import KernelVariant

Sources = tuple[tuple[tuple[str, str], KernelVariant], ...]
"""For each kernel: (sha256 of its image, its symbol), and the variant that it was compiled from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The stages of a program, and the values that eager PyTorch computed.  `crossing`: the values that are copied to the host.
    `compared`: the last call's outputs, then the mutated inputs and the state after the calls.  `early`: for each call but the
    last, a tensor like each integer output, None for other outputs.  `order`: the kind of each value that is read, CROSSING, EARLY
    or COMPARED."""

    key: IntKey
    stages: tuple[Stage, ...]
    crossing: tuple[torch.Tensor, ...] = field(repr=False)
    compared: tuple[torch.Tensor, ...] = field(repr=False)
    self_test: KeySelfTest = field(repr=False)
    early: tuple[tuple[torch.Tensor | None, ...], ...] = field(repr=False)
    order: tuple[str, ...]

    def read(self, outcome: Outcome, kind: str) -> list[bytes]:
        """The contents that were read, of the values of one kind."""
        return [contents for which, contents in zip(self.order, outcome.read, strict=True) if which == kind]

    def seen(self, outcome: Outcome) -> Seen:
        early = iter(self.read(outcome, EARLY))
        calls = [tuple([torch.empty(0) if like is None else _tensor(like, next(early)) for like in call]) for call in self.early]
        compared = tuple([_tensor(want, got) for want, got in zip(self.compared, self.read(outcome, COMPARED), strict=True)])
        return Seen(calls=(*calls, compared[: len(self.self_test.outputs)]), compared=compared)


CROSSING, EARLY, COMPARED = "crossing", "early", "compared"


def make_trial(
    program: Program,
    self_test: KeySelfTest,
    prepared: Prepared,
    weights: Sequence[Weight],
    recordings: Mapping[str, Recording],
    split: SplitProgram | None,
    key: IntKey,
) -> Trial:
    """Builds the stages of a program for the self-test's inputs and number of calls.  `weights`: the manifest's rows.
    `recordings`: by file name.  `split`: None for a single graph.  `key`: the build key (`targets.build_spec.build_key`)."""
    builder = _Stages()
    crossing, order = [], []
    early = [None if is_float(value.dtype) else value for value in self_test.outputs]
    for call, contents in enumerate(_contents(program, self_test, prepared, weights, split, key)):
        builder.give([(program.values[index], contents[index]) for index in program.inputs])
        for step in program.steps:
            if step.kind == "graph":
                builder.run(recordings[step.file])
            elif step.kind == "copy":
                source, target = step.inputs[0], step.outputs[0]
                if program.values[target].memory != "host":
                    builder.give([(program.values[target], contents[source])])
                else:
                    builder.read.append(program.values[source])
                    crossing.append(contents[source])
                    order.append(CROSSING)
        if call < prepared.self_test_calls - 1:
            builder.read += [program.values[at] for at, like in zip(program.outputs, early, strict=True) if like is not None]
            order += [EARLY for like in early if like is not None]
    state = state_after(self_test, prepared, weights)
    builder.read += [program.values[index] for index in program.outputs]
    builder.read += [program.values[program.inputs[index]] for index in prepared.written]
    builder.read += [
        Value(dtype=row.dtype, shape=tuple(value.shape), strides=(1,), memory="state", offset=row.offset) for row, value in state
    ]
    builder.close()
    compared = (*self_test.outputs, *[tensor for _, tensor in self_test.mutated], *[value for _, value in state])
    return Trial(
        key=program.key, stages=tuple(builder.stages), crossing=tuple(crossing), compared=compared, self_test=self_test,
        early=(tuple(early),) * (prepared.self_test_calls - 1), order=(*order, *[COMPARED] * len(compared)),
    )  # fmt: skip


def _contents(
    program: Program, self_test: KeySelfTest, prepared: Prepared, weights: Sequence[Weight], split: SplitProgram | None, key: IntKey
) -> Iterator[dict[int, torch.Tensor]]:
    """Yields for each call the contents of the program's values by position, computed by eager PyTorch on the CPU.  Inputs and
    state have their contents at the start of the call."""
    input_contents = dict(zip(program.inputs, self_test.inputs, strict=True))
    if split is None:
        yield from [input_contents] * prepared.self_test_calls
        return
    planned, exported = split.partitions[key], prepared.programs.at(self_test.key)
    rows: dict[tuple[str, int], str] = {(row.memory, row.offset): row.name for row in weights}
    names = {name.removeprefix(PREFIX): placeholder for placeholder, name in split.state[key].items()}
    for values in eager_values(exported, split.regions[key], planned, self_test.inputs, prepared.self_test_calls):
        contents = dict(input_contents)
        for index, value in enumerate(program.values):
            if value.memory == "state" and (name := names.get(rows.get((value.memory, value.offset), ""))):
                contents[index] = values[name]
        regions = iter([region for region in planned.regions if region.kind == "graph" or region.operations])
        for step in program.steps:
            if step.kind == "copy":
                contents[step.outputs[0]] = contents[step.inputs[0]]
            else:
                contents.update(zip(step.outputs, [values[name] for name in next(regions).module_outputs], strict=True))
        yield contents


def kernel_sources(compiled: Mapping[KernelVariant, CompiledKernel]) -> Sources:
    """The variants that the kernels of a build were compiled from."""
    return tuple({(kernel.sha256, kernel.symbol): variant for variant, kernel in compiled.items()}.items())


def weight_files(stage: Path, rows: Sequence[Weight]) -> WeightFiles:
    """The weight files in `stage` with the rows that each contains."""
    files = ((file_names.WEIGHTS, False), (file_names.TABLES, True))
    chosen = [(stage / name, tuple([row for row in rows if row.computed == computed])) for name, computed in files]
    return tuple([(path, placed) for path, placed in chosen if placed])


def make_task(
    trial: Trial,
    key: IntKey,
    program: Program,
    sources: Sources,
    memories: Sequence[tuple[str, int]],
    weights: WeightFiles,
) -> Task:
    """Returns the interpreter's task for the build key `key`.  The memories have the sizes that the program needs."""
    functions = {function for stage in trial.stages if stage.recording for function in stage.recording.functions}
    used = {(function.image, function.symbol) for function in functions}
    shared = [(name, size) for name, size in memories if name in ("weights", "state")]
    return Task(
        key=key,
        stages=trial.stages,
        variants=tuple([pair for pair in sources if pair[0] in used]),
        sizes=(*shared, ("inputs", program.static), ("arena", program.arena)),
        weights=weights,
    )


def interpret_ranks(tasks: Sequence[Task], ranks: Ranks, run: Callable[[Sequence[Task]], Sequence[Outcome]]) -> tuple[Outcome, ...]:
    """Returns the outcomes of this rank's tasks.  Rank 0 calls `run` for all ranks, with one task per int_key: see
    `Task.others`."""
    rank_tasks = ranks.gathered(tuple(tasks))
    outcomes: Sequence[Outcome] = ()
    if not ranks.rank:
        outcomes = run([replace(task, others=tuple(rest)) for task, *rest in zip(*rank_tasks, strict=True)])
    by_rank = [tuple([(outcome, *outcome.others)[rank] for outcome in outcomes]) for rank in range(ranks.size if outcomes else 0)]
    return ranks.scattered(by_rank or [()] * ranks.size)


Judge = Callable[[KeySelfTest, Seen], Sequence[Difference] | None]
"""Compares a bundle's results with an eager run that selects the same indices.  Returns the differences, or None if no equally good
selection gives these results."""


def nobody(self_test: KeySelfTest, seen: Seen) -> None:
    """A `Judge` that accepts no other indices."""


def proved(
    dimensions: Sequence[Dimension],
    bounds: Sequence[ErrorBound],
    proofs: Sequence[Proof],
    trials: Sequence[tuple[Trial, Outcome]],
    within: float,
    allow: Sequence[str] = (),
    entry: str = FORWARD,
    judge: Judge = nobody,
) -> tuple[tuple[float, ...], tuple[Proof, ...]]:
    """Returns the self-test's bounds and the proofs of the outcomes; a proof without an outcome stays unchanged.  `judge` is called
    for int_keys that exceed their bounds.

    `within`: the allowed error of values that are copied to the host.  Of integers, this fraction may differ, because rounding can
    change a comparison.  Later stages use eager PyTorch's values.  Raises proof-failed.
    """
    key_differences: dict[IntKey, Sequence[Difference]] = {}
    for trial, outcome in trials:
        for want, got in zip(trial.crossing, trial.read(outcome, CROSSING), strict=True):
            crossing_difference = compare(want, _tensor(want, got))
            if not crossing_difference.error <= within:
                raise BuildError(
                    "proof-failed",
                    f"int_key {key_text(dimensions, trial.key, entry)}: the values from interpreted kernels to the host differ "
                    f"from eager PyTorch by {crossing_difference.error:.1e}, allowed {within:.1e}: {crossing_difference.text}",
                    REPORT,
                )
        seen = trial.seen(outcome)
        key_differences[trial.key] = [compare(want, got) for want, got in zip(trial.compared, seen.compared, strict=True)]
        if not all(difference.error <= bound.bound for difference, bound in zip(key_differences[trial.key], bounds, strict=True)):
            key_differences[trial.key] = judge(trial.self_test, seen) or key_differences[trial.key]
    allowed = accepted(dimensions, bounds, key_differences, allow, "the interpreted kernels differ", entry=entry)
    measured_proofs = {key: measured(key, "interpret", differences, allowed) for key, differences in key_differences.items()}
    return allowed, tuple([measured_proofs.get(proof.key, proof) for proof in proofs])


def _tensor(like: torch.Tensor, contents: bytes) -> torch.Tensor:
    if not like.numel():
        return torch.empty_like(like)
    return torch.frombuffer(bytearray(contents), dtype=like.dtype).reshape(like.shape)


class _Stages:
    """Collects stages.  An input or recording begins a new stage if the current stage has a recording or reads."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.inputs: list[tuple[Value, bytes]] = []
        self.recording: Recording | None = None
        self.read: list[Value] = []

    def give(self, tensors: Sequence[tuple[Value, torch.Tensor]]) -> None:
        if self.recording or self.read:
            self.close()
        self.inputs += [(value, row_major(tensor)) for value, tensor in tensors]

    def run(self, recording: Recording) -> None:
        if self.recording or self.read:
            self.close()
        self.recording = recording

    def close(self) -> None:
        self.stages.append(Stage(inputs=tuple(self.inputs), recording=self.recording, read=tuple(self.read)))
        self.inputs, self.recording, self.read = [], None, []
