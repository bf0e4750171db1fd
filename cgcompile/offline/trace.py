"""Lowers exported programs to Triton, compiles kernels and plans memory, for a GPU that need not be present.  Every cross-compiled
recording takes these three steps."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cgbundle.format.schema import HOST, MEMORIES, IntKey, Weight, World
from cgbundle.validate.module_state import Address
from cgcompile.bundle.recordings import Function

from ..export.programs import Programs
from ..targets.architectures import Arch
from ..targets.build_spec import BuildSpec
from ..targets.collectives.exchange_nodes import ExchangeKernels, needed_memory, transfer
from ..targets.collectives.kernels import collective_image
from ..targets.cuda.donations import donated_outputs
from ..targets.cuda.host_regions import SplitProgram
from ..targets.cuda.recorded import RecordedGraph, RecordedProgram, RegionKey
from ..targets.cuda.tensors import input_offsets, static_bytes
from ..targets.kernels.conditions import condition_function, condition_image
from ..targets.memory_layout import PAD, Table, WeightLayout, align
from ..util.content_cache import cache_folder
from ..util.progress import Tell
from .assemble.arena import plan
from .assemble.kept import Kept, keep_outputs
from .assemble.merge import LoweredRegion, merge, whole
from .assemble.plan_check import check_plan
from .assemble.rows import assemble
from .compile.kernels import CompiledKernel, compile_variants
from .compile.programmatic_launch import MIN_CAPABILITY, begin_early
from .lower.jobs import LoweringJob, lower_all
from .lowered import Exchange, KernelVariant, LoweredProgram, SetCondition
from .lowered import Lowered as LoweredGraph
from .lowering_jobs import live_weights, region_jobs, whole_jobs
from .tuning.measurements import table_file

KERNELS = "kernels.json"
"""The file of a bundle with the configuration of each kernel and the reason for it.  The runtime never reads it."""

BLOCKS = re.compile(r"\b(BLOCK_[MNK]|GROUP_M)\b[^=\n]*= (\d+)$", re.MULTILINE)
"""Matches the block sizes in the text of a kernel that Inductor generated from a template."""


Calls = Mapping[IntKey, Sequence[torch.Tensor]]
"""Example inputs by build key (`targets.build_spec.build_key`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredPrograms:
    """The programs by build key.  `sources`: the names of the weights that constants were folded from."""

    by_key: Mapping[IntKey, LoweredProgram] = field(repr=False)
    sources: frozenset[str]

    @property
    def traced(self) -> dict[IntKey, LoweredGraph]:
        """The `Lowered` of every program, over all regions."""
        return {key: program.lowered for key, program in self.by_key.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledPrograms:
    """The kernels of all programs, and all images by sha256.  `conditions`: the kernel that sets conditions of branches and
    loops."""

    kernels: Mapping[KernelVariant, CompiledKernel] = field(repr=False)
    images: Mapping[str, bytes] = field(repr=False)
    conditions: Function | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedPrograms:
    """The recordings of all programs.  `bound`: no plan can have a smaller arena, in bytes.  `world`: None, or this rank's part of
    a model over several devices."""

    recorded: RecordedProgram = field(repr=False)
    kept: Kept
    bound: int
    world: World | None = None


def live_weights_of(spec: BuildSpec, tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """See `live_weights`.  `tensors`: those of the spec's programs."""
    aliases = [alias for entry in spec.entries for alias in entry.aliases]
    return live_weights(tensors, aliases, spec.first.state)


def jobs_of(
    spec: BuildSpec, programs: Programs, split: SplitProgram | None, calls: Calls, live: tuple[str, ...]
) -> dict[RegionKey, LoweringJob]:
    """Returns the lowering jobs.  `programs` (the spec's), `calls` and `split` are on the CPU.  `live`: see `live_weights`."""
    if split:
        return region_jobs(split, live)
    by_key = spec.entry_by_key()
    return whole_jobs(programs, calls, {key: bool(entry.changes or entry.written) for key, entry in by_key.items()}, live)


def lower_programs(
    jobs: Mapping[RegionKey, LoweringJob],
    split: SplitProgram | None,
    target: Arch,
    scratch: Path,
    tell: Tell,
    *,
    code: str = "",
    seconds: float | None = None,
) -> LoweredPrograms:
    """Lowers all jobs and joins the regions of a key into one program.  Kernels overlap where the target supports it.  `code`: see
    `lower_all`.  Raises the errors of lowering, and TimeoutError after `seconds`."""
    table = table_file(target.name)
    lowered = lower_all(jobs, target.name, scratch, code=code, cache=cache_folder(), table=table, tell=tell, seconds=seconds)
    sources = {name for graph in lowered.values() for constant in graph.constants for name in constant.sources}
    programs = _programs(lowered, split)
    if target.capability >= MIN_CAPABILITY:
        programs = {key: begin_early(program) for key, program in programs.items()}
    return LoweredPrograms(by_key=programs, sources=frozenset(sources))


def compile_programs(lowered: LoweredPrograms, target: Arch, tell: Tell) -> CompiledPrograms:
    """Compiles all kernels for the target.  Raises kernel-failed, kernel-too-large, kernel-unsupported."""
    variants = list(dict.fromkeys(variant for graph in lowered.traced.values() for variant in graph.variants))
    compiled = compile_variants(variants, target.name, shared_limit=target.shared_optin, cache=cache_folder(), tell=tell)
    images, conditions = {kernel.sha256: kernel.image for kernel in compiled}, None
    if any(isinstance(event, SetCondition) for graph in lowered.traced.values() for event in graph.events):
        image = condition_image(target.name)
        conditions = condition_function(image)
        images[conditions.image] = image
    return CompiledPrograms(kernels=dict(zip(variants, compiled, strict=True)), images=images, conditions=conditions)


def place_programs(
    spec: BuildSpec,
    lowered: LoweredPrograms,
    compiled: CompiledPrograms,
    layout: WeightLayout,
    calls: Calls,
    split: SplitProgram | None,
) -> PlacedPrograms:
    """Plans every key's arena and builds the rows.  Raises donation-refused, parameter-mismatch, place-invalid and the errors of
    the plan's check."""
    folded, end = folded_tables(lowered.traced, layout.weights_end)
    kept = keep_outputs(lowered.by_key, donated_outputs(spec, split))
    written = {key: entry.written for key, entry in spec.entry_by_key().items()}
    places = _places(layout.rows, folded)
    exchanges = _exchange_kernels(spec, lowered) if spec.ranks else None
    graphs, bound = _assemble(lowered.by_key, kept, compiled.kernels, places, calls, split, written, compiled.conditions, exchanges)
    uploads = split.uploads if split else {}
    recorded = RecordedProgram(
        graphs=graphs,
        images=dict(compiled.images) | ({exchanges.sha256: exchanges.image} if exchanges else {}),
        static={key: static_bytes(tensors, uploads.get(key, ())) + PAD for key, tensors in calls.items()},
        weights=layout.rows,
        tables=tuple(folded.values()),
        weights_bytes=end + PAD,
        state_bytes=layout.state_end + PAD if layout.state_end else 0,
    )
    return PlacedPrograms(recorded=recorded, kept=kept, bound=bound, world=exchanges.world if exchanges else None)


def _exchange_kernels(spec: BuildSpec, lowered: LoweredPrograms) -> ExchangeKernels:
    """The kernels for all collectives of the programs.  Raises extra-missing, kernel-failed."""
    assert spec.ranks is not None
    sent = [
        transfer(event.kind, event.dtype, event.nbytes, spec.ranks.size, event.sender)
        for graph in lowered.traced.values()
        for event in graph.events
        if isinstance(event, Exchange)
    ]
    memory = needed_memory(spec.ranks.size, sent)
    return ExchangeKernels(rank=spec.ranks.rank, memory=memory, image=collective_image(spec.chosen.target, memory))


def summary(lowered: LoweredPrograms) -> str:
    """A text: the number of kernels, and of configurations that each method chose."""
    chosen = [variant.selected_by for graph in lowered.traced.values() for variant in graph.variants]
    counts = {method: chosen.count(method) for method in ("table", "nearest", "heuristic") if method in chosen}
    phrases = [f"{count} by {method}" for method, count in counts.items()]
    if counts and (single := len(chosen) - sum(counts.values())):
        phrases.append(f"{single} without a choice")
    text = ", ".join(phrases)
    return f"{len(chosen)} kernels" + (f"; configurations: {text}" if text else "")


def configurations(compiled: Mapping[KernelVariant, CompiledKernel]) -> str:
    """The configuration of every kernel and how it was chosen, as JSON."""
    rows = {}
    for variant, kernel in compiled.items():
        sizes = {name: value for name, value in variant.constants if isinstance(value, int) and not isinstance(value, bool)}
        sizes |= {name: int(value) for name, value in BLOCKS.findall(variant.source)}
        words = [f"{name}={value}" for name, value in sorted(sizes.items()) if name.isupper() or "BLOCK" in name]
        words += [f"warps={variant.warps}", f"stages={variant.stages}"]
        rows[kernel.sha256, kernel.symbol] = " ".join(words), variant.selected_by
    listed = [
        {"image": image, "symbol": symbol, "configuration": words, "chosen": method}
        for (image, symbol), (words, method) in rows.items()
    ]
    return json.dumps(sorted(listed, key=lambda row: (row["symbol"], row["image"])), indent=0) + "\n"


def _programs(lowered: Mapping[RegionKey, LoweredGraph], split: SplitProgram | None) -> dict[IntKey, LoweredProgram]:
    """The lowered regions as one program per key."""
    if split is None:
        return {key: whole(traced) for (_, key), traced in lowered.items()}
    programs = {}
    for key, uploads in split.uploads.items():
        planned = split.partitions[key]
        regions = [
            LoweredRegion(name=region.name, inputs=region.inputs, outputs=region.outputs, lowered=lowered.get((region.name, key)))
            for region in planned.regions
        ]
        input_names = [*planned.inputs, *[value.name for value in uploads]]
        programs[key] = merge(key, regions, input_names, planned.outputs)
    return programs


def folded_tables(traced: Mapping[IntKey, LoweredGraph], end: int) -> tuple[dict[str, Table], int]:
    """Places every folded constant once, after the weights.  Returns the constants and the new end of memory `weights`."""
    tables: dict[str, Table] = {}
    for constant in [constant for graph in traced.values() for constant in graph.constants]:
        if constant.name not in tables:
            tables[constant.name] = Table(offset=end, contents=constant.contents)
            end = align(end + len(constant.contents))
    return tables, end


def _places(rows: Sequence[Weight], folded: Mapping[str, Table]) -> dict[str, Address]:
    """The addresses of weights and state on the GPU, by name."""
    memories = {name: MEMORIES.index(name) for name in ("weights", "state")}
    addresses = {row.name: Address(memory=memories[row.memory], offset=row.offset) for row in rows if row.memory != HOST}
    return addresses | {name: Address(memory=memories["weights"], offset=table.offset) for name, table in folded.items()}


def _assemble(
    programs: Mapping[IntKey, LoweredProgram],
    kept: Kept,
    compiled: Mapping[KernelVariant, CompiledKernel],
    places: Mapping[str, Address],
    calls: Mapping[IntKey, Sequence[torch.Tensor]],
    split: SplitProgram | None,
    written: Mapping[IntKey, Collection[int]],
    conditions: Function | None,
    exchanges: ExchangeKernels | None,
) -> tuple[dict[RegionKey, RecordedGraph], int]:
    """Returns the rows of every region and key, and the largest lower bound of their arenas.  `places`: the addresses of weights
    and state by name.  `written`: the positions of the inputs that a call changes.  `conditions`, `exchanges`: see `assemble`."""
    graphs, bound = {}, 0
    for key, program in programs.items():
        planned = plan(program.lowered, kept.offsets.get(key, {}), kept.start)
        check_plan(program.lowered, planned)
        starts = [*input_offsets(calls[key])[:-1], *[value.offset for value in (split.uploads[key] if split else ())]]
        kernels = [compiled[variant] for variant in program.lowered.variants]
        region_graphs = assemble(program, kernels, planned, places, starts, written[key], conditions, exchanges)
        graphs.update({(region.name, key): graph for region, graph in zip(program.regions, region_graphs, strict=True)})
        bound = max(bound, planned.bound)
    return graphs, bound
