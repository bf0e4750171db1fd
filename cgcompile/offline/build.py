"""Builds the cuda target's part of a bundle without a GPU: lowers, compiles, plans memory, writes files, interprets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cgbundle.cpu.machine import processor_flags
from cgbundle.format import file_names
from cgbundle.format.schema import IntKey, SelfTest, Weight
from cgbundle.self_test import key_text

from ..bundle.choices import verdict, with_near_ties
from ..bundle.emit import describe_size
from ..bundle.proof import unproved
from ..bundle.self_test import KeySelfTest, eager_self_test, replace_self_tests, with_expected, write_self_test
from ..export.programs import coarsest
from ..targets.architectures import arch
from ..targets.build_spec import BuildSpec, EntryParts, ManifestParts, build_key
from ..targets.cuda.emit import Written, arena_bytes, cuda_target, write_recorded
from ..targets.cuda.host_regions import SplitProgram, host_stage, off_gpu, split_stage
from ..targets.cuda.recorded import RegionKey
from ..targets.instruction_sets import common_level
from ..targets.kernels.graph_driver import graph_driver
from ..targets.kernels.ptxas import lowest_driver
from ..targets.memory_layout import lay_out
from ..targets.weights import frozen_weights, shapes_of, write_tables, write_weights
from ..transforms.error_bounds import error_bounds
from ..transforms.inlining import code_of
from ..transforms.near_ties.judge import Seen, Verdict, indices_text
from ..transforms.output_aliases import with_aliases
from ..transforms.prepared import Prepared
from ..util.content_cache import cache_folder
from ..util.disk_space import size
from ..util.progress import Stages, Tell
from ..util.scratch import scratch_folder
from ..util.tolerance import Difference
from .compile.kernels import CompiledKernel
from .interpret.interpret import Outcome, WeightFiles, interpret
from .lower.jobs import LoweringJob
from .lowered import KernelVariant
from .proof import Trial, interpret_ranks, kernel_sources, make_task, make_trial, proved, weight_files
from .trace import (
    KERNELS,
    CompiledPrograms,
    LoweredPrograms,
    compile_programs,
    configurations,
    jobs_of,
    live_weights_of,
    lower_programs,
    place_programs,
    summary,
)


def build_parts(spec: BuildSpec, stage: Path, stages: Stages) -> ManifestParts:
    """Cross-compiles every int_key and writes tables, images, weights, host regions and the self-test into `stage`.  Raises the
    errors of lowering and of `split_program`, and proof-failed if a result differs from eager PyTorch by more than its bound."""
    target, exported = arch(spec.chosen.target), spec.programs
    tensors, state, varying = exported.weights(), spec.first.state, spec.first.varying
    calls = spec.calls()
    with scratch_folder() as scratch:
        split = split_stage(exported, spec.placements, calls, stages)
        with stages("lower") as tell:
            jobs = jobs_of(spec, exported, split, calls, live_weights_of(spec, tensors))
            code = code_of(spec.first.source, exported)
            lower = partial(lower_programs, split=split, target=target, scratch=scratch, tell=tell, code=code)
            lowered = lower(jobs)
            tell.result(summary(lowered))
        with stages("compile") as tell:
            compiled = compile_programs(lowered, target, tell)
            if spec.first.source.rows:
                from .more_rows import same_launches  # imported here because few models need it

                def lower_and_compile(others: dict[RegionKey, LoweringJob]) -> tuple[LoweredPrograms, CompiledPrograms]:
                    again = lower(others)
                    return again, compile_programs(again, target, tell)

                same_launches(spec, jobs, (lowered, compiled), lower_and_compile)
            tell.result(f"{len(compiled.images)} kernel images, equal ones once")
        shapes = shapes_of(tensors)
        unplaced = lay_out(shapes, state, split.host_only if split else (), varying).rows
        hosts = host_stage(split, unplaced, scratch, stage, stages, common_level(os.uname().machine, processor_flags()))
        layout = lay_out(shapes, state, off_gpu(split, hosts, unplaced), varying)
        with stages("plan") as tell:
            planned = place_programs(spec, lowered, compiled, layout, calls, split)
            recorded = planned.recorded
            largest = max(arena_bytes(recorded).values())
            above = f", {largest / planned.bound - 1:.1%} above the least that the lifetimes allow" if planned.bound else ""
            tell.result(f"arena {size(largest)}{above}")
        with stages("emit") as tell:
            rows = write_weights(stage / file_names.WEIGHTS, tensors, layout.rows)
            rows += write_tables(stage / file_names.TABLES, recorded.tables)
            written = write_recorded(stage, recorded, rows, target.name, split, hosts)
            (stage / KERNELS).write_text(configurations(compiled.kernels))
            self_tests = {entry.name: eager_self_test(entry, written.weights) for entry in spec.entries}
            write_self_test(stage / file_names.SELF_TEST, self_tests)
            tell.result(describe_size(stage))
        parts = [_unproved(spec, number, self_tests[entry.name], written) for number, entry in enumerate(spec.entries)]
        if spec.options.prove == "interpret":
            with stages("interpret") as tell:
                trials = _interpret(
                    spec, parts, written, self_tests, split, compiled.kernels, weight_files(stage, rows), scratch, tell
                )
                proofs = [_proved_entry(spec, number, part, trials[number], written.weights) for number, part in enumerate(parts)]
                parts = [part for part, _ in proofs]
                chosen = {
                    entry.name: self_tests
                    for entry, (_, self_tests) in zip(spec.entries, proofs, strict=True)
                    if self_tests.self_tests
                }
                if chosen:
                    replace_self_tests(stage / file_names.SELF_TEST, {name: choice.self_tests for name, choice in chosen.items()})
                tell.result("; ".join([_proved(spec, parts), *[choice.summary for choice in chosen.values()]]))
    world = planned.world
    peer = [("peer", world.size * world.stride)] if world else []
    driver = max(lowest_driver(target.capability), graph_driver(written.recordings.values()))
    if spec.ranks is None:  # one rank alone cannot run the model in eager PyTorch
        parts = [
            _with_near_ties(entry, part, self_tests[entry.name], written.weights)
            for entry, part in zip(spec.entries, parts, strict=True)
        ]
    return ManifestParts(
        target=cuda_target(target.name, driver, hosts, spec.torch_version),
        weights=written.weights,
        frozen=frozen_weights(stage, written.weights, exported, lowered.sources | hosts.unbound, spec.baked),
        memories=(*written.memories, *peer),
        regions=written.regions,
        module_state="",
        entries=tuple(parts),
        donated=planned.kept.reserved,
        world=world,
    )


def _unproved(spec: BuildSpec, number: int, self_tests: Sequence[KeySelfTest], written: Written) -> EntryParts:
    """The parts of entry number `number`, with no int_key proved."""
    prepared = spec.entries[number]
    program_rows = spec.of_entry(number, dict(zip(spec.programs.by_key, written.programs, strict=True)))
    bounds = error_bounds(prepared, written.weights)
    return EntryParts(
        programs=with_aliases(tuple(program_rows.values()), prepared.aliases, prepared.signature.outputs, written.weights),
        self_test=SelfTest(
            compare="tolerance", calls=prepared.self_test_calls, expected="eager", bounds=tuple([limit.bound for limit in bounds]),
            proofs=tuple([unproved(self_test.key, bounds) for self_test in self_tests]),
        ),
    )  # fmt: skip


def _with_near_ties(entry: Prepared, part: EntryParts, self_tests: Sequence[KeySelfTest], weights: Sequence[Weight]) -> EntryParts:
    """The parts of an entry, with bounds that allow a GPU to select other indices with equally good values."""
    measured, test = error_bounds(entry, weights), part.self_test
    bounds = with_near_ties(test.bounds, entry, self_tests, measured, weights)
    return replace(part, self_test=replace(test, bounds=bounds))


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The self-tests of int_keys whose kernels select other indices than eager PyTorch.  They expect the kernels' indices.
    `summary`: the number of these indices, as text."""

    self_tests: tuple[KeySelfTest, ...]
    summary: str


def _proved_entry(
    spec: BuildSpec, number: int, part: EntryParts, trials: Sequence[tuple[Trial, Outcome]], weights: Sequence[Weight]
) -> tuple[EntryParts, Chosen]:
    """The parts of an entry with the proofs of its int_keys, and its changed self-tests.  Raises proof-failed."""
    entry = spec.entries[number]
    bounds = error_bounds(entry, weights)
    within = coarsest(entry.programs)
    self_tests: list[KeySelfTest] = []
    verdicts: list[Verdict] = []

    def judge(self_test: KeySelfTest, seen: Seen) -> Sequence[Difference] | None:
        if spec.ranks is not None:  # one rank alone cannot run the model in eager PyTorch
            return None
        key_verdict = verdict(entry, self_test, seen, bounds, weights)
        if key_verdict is None:
            return None
        verdicts.append(key_verdict)
        self_tests.append(with_expected(self_test, key_verdict.expected, entry, weights))
        return key_verdict.differences

    kept, proofs = proved(entry.dimensions, bounds, part.self_test.proofs, trials, within, spec.options.allow, entry.name, judge)
    chosen = Chosen(self_tests=tuple(self_tests), summary=indices_text(bounds, [key_verdict.indices for key_verdict in verdicts]))
    return replace(part, self_test=replace(part.self_test, bounds=kept, proofs=proofs)), chosen


def _interpret(
    spec: BuildSpec,
    parts: Sequence[EntryParts],
    written: Written,
    self_tests: Mapping[str, Sequence[KeySelfTest]],
    split: SplitProgram | None,
    compiled: Mapping[KernelVariant, CompiledKernel],
    weights: WeightFiles,
    scratch: Path,
    tell: Tell,
) -> list[list[tuple[Trial, Outcome]]]:
    """Interprets all int_keys.  Returns each entry's (trial, outcome) pairs, without trials that did not end in time."""
    sources = kernel_sources(compiled)
    trials: dict[IntKey, Trial] = {}
    tasks = []
    for number, (entry, part) in enumerate(zip(spec.entries, parts, strict=True)):
        for program, self_test in zip(part.programs, self_tests[entry.name], strict=True):
            key = build_key(spec, number, program.key)
            trials[key] = make_trial(program, self_test, entry, written.weights, written.recordings, split, key)
            tasks.append(make_task(trials[key], key, program, sources, written.memories, weights))
    run = partial(interpret, folder=scratch / "interpret", budget=spec.options.prove_budget, cache=cache_folder(), tell=tell)
    outcomes = run(tasks) if spec.ranks is None else interpret_ranks(tasks, spec.ranks, run)
    pairs = {outcome.key: (trials[outcome.key], outcome) for outcome in outcomes}
    return [list(spec.of_entry(number, pairs).values()) for number in range(len(spec.entries))]


def _proved(spec: BuildSpec, parts: Sequence[EntryParts]) -> str:
    """A text: how many int_keys were proved, and which were not."""
    proofs = [(entry, proof) for entry, part in zip(spec.entries, parts, strict=True) for proof in part.self_test.proofs]
    count = sum(proof.method == "interpret" for _, proof in proofs)
    unproved_keys = "; ".join(
        key_text(entry.dimensions, proof.key, entry.name) for entry, proof in proofs if proof.method == "none"
    )
    largest_error = max(proof.error for _, proof in proofs)
    text = f"{count} of {len(proofs)} int_keys over poisoned memory, largest error {largest_error:.1e}"
    return text + (f"; not in {spec.options.prove_budget:g} s: {unproved_keys}" if unproved_keys else "")
