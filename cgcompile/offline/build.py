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
from cgbundle.format.schema import MEMORIES, Dimension, Exam, IntKey, Program, Proof, Weight
from cgbundle.format.spans import HOST_ONLY
from cgbundle.tables.recording import Address, Function

from ..bundle.emit import describe_size
from ..bundle.exam import KeyExam, eager_exam, write_exam
from ..bundle.proof import unproved
from ..export.programs import coarsest
from ..model.source import all_keys, sample
from ..targets.architectures import Arch, arch
from ..targets.build_spec import BuildSpec, ManifestParts
from ..targets.cuda.conditions import condition_function, condition_image, conditional_driver
from ..targets.cuda.emit import Written, arena_bytes, cuda_target, write_recorded
from ..targets.cuda.host_regions import SplitProgram, host_stage, off_gpu, split_stage
from ..targets.cuda.ptxas import lowest_driver
from ..targets.cuda.recorded import RecordedGraph, RecordedProgram, RegionKey
from ..targets.cuda.tensors import input_offsets, static_bytes
from ..targets.memory_layout import PAD, Table, align, lay_out
from ..targets.weights import add_tables, shapes_of, write_weights
from ..transforms.error_bounds import error_bounds
from ..transforms.output_aliases import with_aliases
from ..util.content_cache import cache_folder
from ..util.progress import Stages, Tell
from ..util.scratch import scratch_folder
from .assemble.arena import plan
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
    target, exported = arch(spec.target), spec.prepared.programs
    tensors = exported.weights()
    calls = {key: sample(spec.source, dict(zip(spec.sizes, key, strict=True))).tensors for key in all_keys(spec.sizes)}
    with scratch_folder() as scratch:
        split = split_stage(exported, spec.placements, calls, stages)
        with stages("lower") as tell:
            writes = bool(spec.prepared.state or spec.prepared.written)
            live = live_weights(tensors, spec.prepared.aliases, spec.prepared.state)
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
        unplaced = lay_out(shapes, spec.prepared.state, split.host_only if split else ()).rows
        hosts = host_stage(split, unplaced, scratch, stage, stages)
        layout = lay_out(shapes, spec.prepared.state, off_gpu(split, hosts, unplaced))
        folded, end = folded_tables(traced, layout.weights_end)
        with stages("plan") as tell:
            graphs, bound = _assemble(
                joined, compiled, _places(layout.rows, folded), calls, split, spec.prepared.written, conditions
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
            exams = eager_exam(spec.source, spec.prepared, spec.sizes, written.weights)
            write_exam(stage / archive.EXAM, exams)
            tell(describe_size(stage))
        programs = with_aliases(written.programs, spec.prepared.aliases, spec.prepared.signature.outputs, written.weights)
        written = replace(written, programs=programs)
        bounds = error_bounds(spec.prepared, written.weights)
        kept, proofs = tuple([each.bound for each in bounds]), tuple([unproved(exam.key, bounds) for exam in exams])
        if spec.prove == "interpret":
            with stages("interpret") as tell:
                trials = _interpret(spec, written, exams, split, compiled, stage / archive.WEIGHTS, scratch, tell)
                kept, proofs = proved(spec.dimensions, bounds, proofs, trials, coarsest(exported), spec.waive)
                tell(_proved(spec.dimensions, proofs, spec.prove_budget))
    driver = max(lowest_driver(target.capability), conditional_driver(written.recordings.values()))
    return ManifestParts(
        target=cuda_target(target.name, driver, hosts, spec.torch_version),
        weights=written.weights,
        memories=written.memories,
        regions=written.regions,
        programs=written.programs,
        module_state="",
        exam=Exam(compare="tolerance", calls=spec.prepared.exam_calls, expected="eager", bounds=kept, proofs=proofs),
    )


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
    compiled: Mapping[KernelVariant, CompiledKernel],
    places: Mapping[str, Address],
    calls: Mapping[IntKey, Sequence[torch.Tensor]],
    split: SplitProgram | None,
    written: Collection[int],
    conditions: Function | None,
) -> tuple[dict[RegionKey, RecordedGraph], int]:
    """The rows of every region and key, and the largest lower bound of their arenas.  `places`: of weights and state by name;
    `written`: positions of the inputs that a call changes; `conditions` as `assemble` takes it."""
    graphs, bound = {}, 0
    for key, program in programs.items():
        planned = plan(program.lowered)
        check_plan(program.lowered, planned)
        starts = [*input_offsets(calls[key])[:-1], *[value.offset for value in (split.uploads[key] if split else ())]]
        kernels = [compiled[variant] for variant in program.lowered.variants]
        made = assemble(program, kernels, planned, places, starts, written, conditions)
        graphs.update({(region.name, key): graph for region, graph in zip(program.regions, made, strict=True)})
        bound = max(bound, planned.bound)
    return graphs, bound


def _interpret(
    spec: BuildSpec,
    written: Written,
    exams: Sequence[KeyExam],
    split: SplitProgram | None,
    compiled: Mapping[KernelVariant, CompiledKernel],
    weights: Path,
    scratch: Path,
    tell: Tell,
) -> list[tuple[Trial, Outcome]]:
    """What came of the keys whose kernels were interpreted in time."""
    programs: tuple[Program, ...] = written.programs
    trials = [
        make_trial(each, exam, spec.prepared, written.weights, written.recordings, split)
        for each, exam in zip(programs, exams, strict=True)
    ]
    sources = kernel_sources(compiled)
    tasks = [
        make_task(trial, program, sources, written.memories, weights, written.weights)
        for trial, program in zip(trials, programs, strict=True)
    ]
    done = interpret(tasks, scratch / "interpret", budget=spec.prove_budget, cache=cache_folder(), tell=tell)
    outcomes = {outcome.key: outcome for outcome in done}
    return [(trial, outcomes[trial.key]) for trial in trials if trial.key in outcomes]


def _proved(dimensions: Sequence[Dimension], proofs: Sequence[Proof], budget: float) -> str:
    done = sum(proof.method == "interpret" for proof in proofs)
    left = "; ".join(key_text(dimensions, proof.key) for proof in proofs if proof.method == "none")
    text = f"{done} of {len(proofs)} int_keys over poisoned memory, largest error {max(proof.error for proof in proofs):.1e}"
    return text + (f"; not in {budget:.0f} s: {left}" if left else "")


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
