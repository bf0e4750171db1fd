"""The cuda target's half of a build without that GPU: lower to Triton, compile, plan, lay out as files, interpret."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cgbundle.exam import key_text
from cgbundle.format import archive
from cgbundle.format.schema import MEMORIES, Exam, IntKey, Weight
from cgbundle.format.spans import HOST_ONLY
from cgbundle.tables.recording import Address, Function

from ..bundle.emit import describe_size
from ..bundle.exam import KeyExam, eager_exam, write_exam
from ..bundle.proof import unproved
from ..export.programs import coarsest
from ..model.source import sample
from ..targets.architectures import Arch, arch
from ..targets.build_spec import BuildSpec, EntryParts, EntrySpec, ManifestParts, build_key
from ..targets.cuda.chains import chained_outputs
from ..targets.cuda.conditions import condition_function, condition_image, conditional_driver
from ..targets.cuda.emit import Written, arena_bytes, cuda_target, write_recorded
from ..targets.cuda.host_regions import SplitProgram, host_stage, off_gpu, split_stage
from ..targets.cuda.ptxas import lowest_driver
from ..targets.cuda.recorded import RecordedGraph, RecordedProgram, RegionKey
from ..targets.cuda.tensors import input_offsets, static_bytes
from ..targets.memory_layout import PAD, Table, align, lay_out
from ..targets.weights import add_tables, fixed_weights, shapes_of, write_weights
from ..transforms.error_bounds import error_bounds
from ..transforms.output_aliases import with_aliases
from ..util.content_cache import cache_folder
from ..util.progress import Stages, Tell
from ..util.scratch import scratch_folder
from .assemble.arena import plan
from .assemble.kept import Kept, keep_outputs
from .assemble.merge import LoweredRegion, merge, whole
from .assemble.plan_check import check_plan
from .assemble.rows import assemble
from .compile.kernels import CompiledKernel, compile_variants
from .interpret.interpret import Outcome, interpret
from .lower.jobs import lower_all
from .lowered import KernelVariant, Lowered, LoweredProgram, SetCondition
from .lowering_jobs import live_weights, region_jobs, whole_jobs
from .proof import Trial, kernel_sources, make_task, make_trial, proved
from .tuning.measurements import table_file

KERNELS = "kernels.json"
"""The file of a bundle that says which configuration each kernel has, and why; for people, the runtime never reads it."""

BLOCKS = re.compile(r"\b(BLOCK_[MNK]|GROUP_M)\b[^=\n]*= (\d+)$", re.MULTILINE)
"""Configuration in the text of a kernel that Inductor made of a template."""


def build_parts(spec: BuildSpec, stage: Path, stages: Stages) -> ManifestParts:
    """Traces every int_key, and writes tables, images, weights, host regions and the exam into `stage`.  Raises the refusals of
    lowering and of `split_program`, and proof-failed when a key differs from eager PyTorch by more than the dtype allows."""
    target, exported = arch(spec.target), spec.programs
    tensors, state = exported.weights(), spec.entries[0].prepared.state
    calls = spec.by_key({entry.name: _calls(entry) for entry in spec.entries})
    prepared = spec.by_key({entry.name: dict.fromkeys(entry.keys, entry.prepared) for entry in spec.entries})
    with scratch_folder() as scratch:
        split = split_stage(exported, spec.by_key({entry.name: entry.placements for entry in spec.entries}), calls, stages)
        with stages("lower") as tell:
            writes = {key: bool(own.changes or own.written) for key, own in prepared.items()}
            live = live_weights(tensors, [alias for entry in spec.entries for alias in entry.prepared.aliases], state)
            jobs = region_jobs(split, live) if split else whole_jobs(exported, calls, writes, live)
            lowered = lower_all(jobs, target.name, scratch, cache=cache_folder(), table=table_file(target.name), tell=tell)
            joined = _programs(lowered, split)
            traced = {key: each.lowered for key, each in joined.items()}
            tell(_summary(traced))
        with stages("compile") as tell:
            compiled = _compile(traced, target, tell)
            images = {kernel.sha256: kernel.image for kernel in compiled.values()}
            conditions = None
            if any(isinstance(event, SetCondition) for each in traced.values() for event in each.events):
                image = condition_image(target.name)
                conditions = condition_function(image)
                images[conditions.image] = image
            tell(f"{len(images)} kernel images")
        shapes = shapes_of(tensors)
        unplaced = lay_out(shapes, state, split.host_only if split else ()).rows
        hosts = host_stage(split, unplaced, scratch, stage, stages)
        layout = lay_out(shapes, state, off_gpu(split, hosts, unplaced))
        folded, end = folded_tables(traced, layout.weights_end)
        sources = {name for each in lowered.values() for constant in each.constants for name in constant.sources}
        with stages("plan") as tell:
            kept = keep_outputs(joined, chained_outputs(spec, split))
            graphs, bound = _assemble(
                joined,
                kept,
                compiled,
                _places(layout.rows, folded),
                calls,
                split,
                {key: own.written for key, own in prepared.items()},
                conditions,
            )
            uploads = split.uploads if split else {}
            recorded = RecordedProgram(
                graphs=graphs,
                images=images,
                static={key: static_bytes(given, uploads.get(key, ())) + PAD for key, given in calls.items()},
                weights=layout.rows,
                tables=tuple(folded.values()),
                weights_bytes=end + PAD,
                state_bytes=layout.state_end + PAD if layout.state_end else 0,
            )
            largest = max(arena_bytes(recorded).values())
            above = f", {largest / bound - 1:.1%} above the least that the lifetimes allow" if bound else ""
            tell(f"arena {largest:,} bytes{above}")
        with stages("emit") as tell:
            rows = write_weights(stage / archive.WEIGHTS, tensors, layout.rows)
            rows = add_tables(stage / archive.WEIGHTS, rows, recorded.tables)
            written = write_recorded(stage, recorded, rows, target.name, split, hosts)
            (stage / KERNELS).write_text(_choices(compiled))
            exams = {each.name: eager_exam(each.source, each.prepared, each.sizes, written.weights) for each in spec.entries}
            write_exam(stage / archive.EXAM, exams)
            tell(describe_size(stage))
        parts = [_unproved(spec, number, exams[entry.name], written) for number, entry in enumerate(spec.entries)]
        if spec.prove == "interpret":
            with stages("interpret") as tell:
                trials = _interpret(spec, parts, written, exams, split, compiled, stage / archive.WEIGHTS, scratch, tell)
                parts = [_proved_entry(spec, number, part, trials[number], written.weights) for number, part in enumerate(parts)]
                tell(_proved(spec, parts))
    driver = max(lowest_driver(target.capability), conditional_driver(written.recordings.values()))
    return ManifestParts(
        target=cuda_target(target.name, driver, hosts, spec.torch_version),
        weights=written.weights,
        fixed=fixed_weights(stage, written.weights, exported, sources | hosts.unbound),
        memories=written.memories,
        regions=written.regions,
        module_state="",
        entries=tuple(parts),
        reserved=kept.reserved,
    )


def _calls(entry: EntrySpec) -> dict[IntKey, tuple[torch.Tensor, ...]]:
    return {key: sample(entry.source, dict(zip(entry.sizes, key, strict=True))).tensors for key in entry.keys}


def _unproved(spec: BuildSpec, number: int, exams: Sequence[KeyExam], written: Written) -> EntryParts:
    """The rows of entry number `number`, none of whose int_keys was compared yet."""
    prepared = spec.entries[number].prepared
    own = spec.own(number, dict(zip(spec.programs.by_key, written.programs, strict=True)))
    bounds = error_bounds(prepared, written.weights)
    return EntryParts(
        programs=with_aliases(tuple(own.values()), prepared.aliases, prepared.signature.outputs, written.weights),
        exam=Exam(
            compare="tolerance", calls=prepared.exam_calls, expected="eager", bounds=tuple([each.bound for each in bounds]),
            proofs=tuple([unproved(exam.key, bounds) for exam in exams]),
        ),
    )  # fmt: skip


def _proved_entry(
    spec: BuildSpec, number: int, part: EntryParts, trials: Sequence[tuple[Trial, Outcome]], weights: Sequence[Weight]
) -> EntryParts:
    """The rows of an entry with what came of interpreting it.  Raises proof-failed."""
    entry = spec.entries[number]
    bounds = error_bounds(entry.prepared, weights)
    within = coarsest(entry.prepared.programs)
    kept, proofs = proved(entry.dimensions, bounds, part.exam.proofs, trials, within, spec.waive, entry.name)
    return replace(part, exam=replace(part.exam, bounds=kept, proofs=proofs))


def _programs(lowered: Mapping[RegionKey, Lowered], split: SplitProgram | None) -> dict[IntKey, LoweredProgram]:
    """What was lowered, as one program per key."""
    if split is None:
        return {key: whole(traced) for (_, key), traced in lowered.items()}
    programs = {}
    for key, uploads in split.uploads.items():
        planned = split.partitions[key]
        regions = [
            LoweredRegion(name=each.name, inputs=each.inputs, outputs=each.outputs, lowered=lowered.get((each.name, key)))
            for each in planned.regions
        ]
        given = [*planned.inputs, *[value.name for value in uploads]]
        programs[key] = merge(key, regions, given, planned.outputs)
    return programs


def _summary(traced: Mapping[IntKey, Lowered]) -> str:
    chosen = [variant.selected_by for each in traced.values() for variant in each.variants]
    counts = {how: chosen.count(how) for how in ("table", "nearest", "heuristic") if how in chosen}
    found = ", ".join(f"{count} by {how}" for how, count in counts.items())
    return f"{len(chosen)} kernels" + (f"; configurations: {found}" if found else "")


def _compile(traced: Mapping[IntKey, Lowered], target: Arch, tell: Tell) -> dict[KernelVariant, CompiledKernel]:
    variants = list(dict.fromkeys(variant for each in traced.values() for variant in each.variants))
    made = compile_variants(variants, target.name, shared_limit=target.shared_optin, cache=cache_folder(), tell=tell)
    return dict(zip(variants, made, strict=True))


def folded_tables(traced: Mapping[IntKey, Lowered], end: int) -> tuple[dict[str, Table], int]:
    """What was computed when lowering, behind the program's own tensors, each once; and the new end of memory `weights`."""
    found: dict[str, Table] = {}
    for constant in [constant for each in traced.values() for constant in each.constants]:
        if constant.name not in found:
            found[constant.name] = Table(offset=end, contents=constant.contents)
            end = align(end + len(constant.contents))
    return found, end


def _places(rows: Sequence[Weight], folded: Mapping[str, Table]) -> dict[str, Address]:
    """Where weights and state lie on the GPU, by name."""
    memories = {name: MEMORIES.index(name) for name in ("weights", "state")}
    own = {row.name: Address(memory=memories[row.memory], offset=row.offset) for row in rows if row.offset != HOST_ONLY}
    return own | {name: Address(memory=memories["weights"], offset=table.offset) for name, table in folded.items()}


def _assemble(
    programs: Mapping[IntKey, LoweredProgram],
    kept: Kept,
    compiled: Mapping[KernelVariant, CompiledKernel],
    places: Mapping[str, Address],
    calls: Mapping[IntKey, Sequence[torch.Tensor]],
    split: SplitProgram | None,
    written: Mapping[IntKey, Collection[int]],
    conditions: Function | None,
) -> tuple[dict[RegionKey, RecordedGraph], int]:
    """The rows of every region and key, and the largest lower bound of their arenas.  `places`: of weights and state by name;
    `written`: positions of the inputs that a call changes; `conditions` as `assemble` takes it."""
    graphs, bound = {}, 0
    for key, program in programs.items():
        planned = plan(program.lowered, kept.offsets.get(key, {}), kept.start)
        check_plan(program.lowered, planned)
        starts = [*input_offsets(calls[key])[:-1], *[value.offset for value in (split.uploads[key] if split else ())]]
        kernels = [compiled[variant] for variant in program.lowered.variants]
        made = assemble(program, kernels, planned, places, starts, written[key], conditions)
        graphs.update({(region.name, key): graph for region, graph in zip(program.regions, made, strict=True)})
        bound = max(bound, planned.bound)
    return graphs, bound


def _interpret(
    spec: BuildSpec,
    parts: Sequence[EntryParts],
    written: Written,
    exams: Mapping[str, Sequence[KeyExam]],
    split: SplitProgram | None,
    compiled: Mapping[KernelVariant, CompiledKernel],
    weights: Path,
    scratch: Path,
    tell: Tell,
) -> list[list[tuple[Trial, Outcome]]]:
    """By entry, what came of the keys whose kernels were interpreted in time."""
    sources = kernel_sources(compiled)
    trials: dict[IntKey, Trial] = {}
    tasks = []
    for number, (entry, part) in enumerate(zip(spec.entries, parts, strict=True)):
        for program, exam in zip(part.programs, exams[entry.name], strict=True):
            key = build_key(spec, number, program.key)
            trials[key] = make_trial(program, exam, entry.prepared, written.weights, written.recordings, split, key)
            tasks.append(make_task(trials[key], key, program, sources, written.memories, weights, written.weights))
    done = interpret(tasks, scratch / "interpret", budget=spec.prove_budget, cache=cache_folder(), tell=tell)
    pairs = {outcome.key: (trials[outcome.key], outcome) for outcome in done}
    return [list(spec.own(number, pairs).values()) for number in range(len(spec.entries))]


def _proved(spec: BuildSpec, parts: Sequence[EntryParts]) -> str:
    """How many int_keys were proved, and which were not."""
    proofs = [(entry, proof) for entry, part in zip(spec.entries, parts, strict=True) for proof in part.exam.proofs]
    done = sum(proof.method == "interpret" for _, proof in proofs)
    left = "; ".join(key_text(entry.dimensions, proof.key, entry.name) for entry, proof in proofs if proof.method == "none")
    worst = max(proof.error for _, proof in proofs)
    text = f"{done} of {len(proofs)} int_keys over poisoned memory, largest error {worst:.1e}"
    return text + (f"; not in {spec.prove_budget:g} s: {left}" if left else "")


def _choices(compiled: Mapping[KernelVariant, CompiledKernel]) -> str:
    """The configuration of every kernel and what chose it, as JSON."""
    rows = {}
    for variant, kernel in compiled.items():
        sizes = {name: value for name, value in variant.constants if isinstance(value, int) and not isinstance(value, bool)}
        sizes |= {name: int(value) for name, value in BLOCKS.findall(variant.source)}
        words = [f"{name}={value}" for name, value in sorted(sizes.items()) if name.isupper() or "BLOCK" in name]
        words += [f"warps={variant.warps}", f"stages={variant.stages}"]
        rows[kernel.sha256, kernel.symbol] = " ".join(words), variant.selected_by
    listed = [
        {"image": image, "symbol": symbol, "configuration": words, "chosen": how} for (image, symbol), (words, how) in rows.items()
    ]
    return json.dumps(sorted(listed, key=lambda row: (row["symbol"], row["image"])), indent=0) + "\n"
