"""The cuda target's half of a build without that GPU: lower to Triton, compile, plan, lay out as files, interpret."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cgbundle.format import archive
from cgbundle.format.extents import ELSEWHERE
from cgbundle.format.schema import CODE, Exam, IntKey, Program, Proof, Region, Target, Value, Weight
from cgbundle.tables.recording import Recording

from ..bundle.emit import eager_exam, write_exam
from ..errors import BuildError
from ..model.source import all_keys, sample
from ..targets.architectures import Arch, arch
from ..targets.cuda.files import program as row
from ..targets.cuda.files import write_kernels, write_tables, write_weights
from ..targets.cuda.fills import fill_image, has_memsets, without_memsets
from ..targets.cuda.host_regions import Hosts, Mixed, compile_hosts, plan_mixed, rows_of, weight_rows
from ..targets.cuda.memory_layout import PAD, Table, align, tensor_bytes
from ..targets.cuda.ptxas import lowest_driver
from ..targets.cuda.tensors import dtype_bound, dtype_name, inputs_bytes, program_tensors
from ..targets.job import Job, Parts
from ..transforms.output_aliases import with_aliases
from ..util.progress import Stages
from ..util.scratch import scratch_folder
from .assemble.arena import plan
from .assemble.lifetimes import check_plan
from .assemble.merge import Piece, merge, whole
from .assemble.rows import Graph, assemble_chain
from .compile.kernels import Compiled, compile_variants
from .interpret.interpret import interpret
from .lower.jobs import Name, lower_all
from .proof import kernel_sources, make_task, make_trial, proved
from .regions import WHOLE, region_works, whole_works
from .traced import Chain, Traced, Variant
from .tuning.measured import table_file

KERNELS = "kernels.json"
"""The file of a bundle that says which configuration each kernel has, and why; for people, the runtime never reads it."""

BLOCKS = re.compile(r"\b(BLOCK_[MNK]|GROUP_M)\b[^=\n]*= (\d+)$", re.MULTILINE)
"""Configuration in the text of a kernel that Inductor made of a template."""

BUDGET = 120.0
"""Seconds that interpreting may take: the keys that fit are proved, smallest first, at least one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Where the program's tensors lie in memory `weights`, what lowering computed behind them, and where both end."""

    placed: tuple[Weight, ...]
    folded: dict[str, Table]
    end: int


def build_parts(job: Job, stage: Path, stages: Stages) -> Parts:
    """Traces every int_key, and writes tables, images, weights, host regions and the exam into `stage`.

    Raises the refusals of trace/errors.py, those of `mixed`, and proof-failed when an interpreted key is further from eager PyTorch
    than the dtype allows.
    """
    target, program = arch(job.target), job.prepared.program
    tensors = program_tensors(program)
    calls = {key: sample(job.source, dict(zip(job.sizes, key, strict=True))).tensors for key in all_keys(job.sizes)}
    with scratch_folder() as scratch:
        mixed = _mixed(job, calls, stages) if job.placements else None
        with stages("lower") as tell:
            works = region_works(mixed) if mixed else whole_works(program, calls)
            lowered = lower_all(works, target.name, scratch, cache=cache_folder(), table=table_file(target.name), tell=tell)
            chains = _chains(lowered, mixed)
            traced = {key: chain.traced for key, chain in chains.items()}
            tell(_summary(traced))
        with stages("compile") as tell:
            compiled = _compile(traced, target, tell)
            tell(f"{len(set(kernel.sha256 for kernel in compiled.values()))} kernel images")
        layout = _lay_out(tensors, mixed, traced)
        hosts = _hosts(mixed, layout, scratch, stage, stages) if mixed else None
        with stages("plan") as tell:
            graphs, bound = _assemble(chains, compiled, weight_offsets(layout.placed, layout.folded), calls, mixed)
            recordings, fills = _without_memsets(graphs, target)
            arena = {key: max([graph.arena for (_, other), graph in graphs.items() if other == key], default=PAD) for key in calls}
            largest = max(arena.values())
            above = f", {largest / bound - 1:.1%} above the least that the lifetimes allow" if bound else ""
            tell(f"arena {largest:,} bytes{above}")
        with stages("emit") as tell:
            images = {kernel.sha256: kernel.image for kernel in compiled.values()} | fills
            rows = write_weights(stage / archive.WEIGHTS, tensors, layout.placed, tuple(layout.folded.values()))
            write_kernels(stage, images)
            (stage / KERNELS).write_text(_choices(compiled))
            files = write_tables(stage, recordings)
            exams = eager_exam(job.source, job.prepared, job.sizes, layout.placed)
            write_exam(stage / archive.EXAM, exams)
            static = {key: _static(calls[key], mixed, key) for key in calls}
            regions, programs, pinned = _rows(graphs, files, arena, static, mixed, hosts)
            tell(f"{sum(file.stat().st_size for file in stage.rglob('*') if file.is_file()) / 1e6:.1f} MB")
        memories = (
            ("weights", layout.end + PAD),
            ("inputs", max(static.values())),
            ("arena", largest),
            *((("host", pinned),) if pinned else ()),
            (CODE, sum(len(image) for image in images.values())),
        )
        proofs = tuple(Proof(key=exam.key, method="none", error=0.0, tolerance=dtype_bound(program)) for exam in exams)
        if job.prove == "interpret":
            with stages("interpret") as tell:
                by_file = {files[name]: recording for name, recording in recordings.items()}
                trials = [make_trial(each, exam, by_file, mixed) for each, exam in zip(programs, exams, strict=True)]
                weights = stage / archive.WEIGHTS
                sources = kernel_sources(compiled)
                tasks = [make_task(t, p, sources, memories, weights, rows) for t, p in zip(trials, programs, strict=True)]
                done = interpret(tasks, scratch / "interpret", budget=BUDGET, cache=cache_folder(), tell=tell)
                proofs = tuple([proved(*each, done) for each in zip(proofs, trials, strict=True)])
                worst = max(proof.error for proof in proofs)
                tell(f"{len(done)} of {len(tasks)} int_keys over poisoned memory, largest error {worst:.1e}")
    return Parts(
        target=Target(
            kind="cuda",
            arch=target.name,
            features=hosts.features if hosts else (),
            torch=job.torch_version if hosts and hosts.rows else "",
            driver=lowest_driver(target.capability),
        ),
        weights=rows,
        memories=memories,
        regions=regions,
        programs=with_aliases(programs, job.prepared.aliases, job.prepared.signature.outputs, rows),
        module_state="",
        exam=Exam(compare="tolerance", calls=1, proofs=proofs),
    )


def _mixed(job: Job, calls: Mapping[IntKey, Sequence[torch.Tensor]], stages: Stages) -> Mixed:
    with stages("partition") as tell:
        mixed = plan_mixed(job.prepared.program, job.placements, calls)
        tell(" -> ".join(part.name for part in mixed.parts.regions))
    return mixed


def _hosts(mixed: Mixed, layout: _Layout, scratch: Path, stage: Path, stages: Stages) -> Hosts:
    with stages("host") as tell:
        hosts = compile_hosts(mixed, layout.placed, scratch, stage, tell)
        tell(", ".join(region.file for region in dict.fromkeys(hosts.rows.values())) or "copies only")
    return hosts


def _chains(lowered: Mapping[Name, Traced], mixed: Mixed | None) -> dict[IntKey, Chain]:
    """What was lowered, as one program per key."""
    if mixed is None:
        return {key: whole(traced) for (_, key), traced in lowered.items()}
    chains = {}
    for key, landing in mixed.landing.items():
        pieces = [
            Piece(name=part.name, inputs=part.inputs, outputs=part.outputs, traced=lowered.get((part.name, key)))
            for part in mixed.parts.regions
        ]
        given = [*mixed.parts.inputs, *[row[0] for row in landing]]
        chains[key] = merge(key, pieces, given, mixed.parts.outputs)
    return chains


def _lay_out(tensors: Mapping[str, torch.Tensor], mixed: Mixed | None, traced: Mapping[IntKey, Traced]) -> _Layout:
    placed = weight_rows(tensors, mixed.elsewhere if mixed else frozenset())
    ends = [align(row.offset + tensor_bytes(row.dtype, row.shape)) for row in placed if row.offset != ELSEWHERE]
    folded, end = folded_tables(traced, max(ends, default=0))
    return _Layout(placed=placed, folded=folded, end=end)


def _summary(traced: Mapping[IntKey, Traced]) -> str:
    chosen = [variant.chosen for each in traced.values() for variant in each.variants]
    counts = {how: chosen.count(how) for how in ("table", "nearest", "heuristic") if how in chosen}
    found = ", ".join(f"{count} by {how}" for how, count in counts.items())
    return f"{len(chosen)} kernels" + (f"; configurations: {found}" if found else "")


def _compile(traced: Mapping[IntKey, Traced], target: Arch, tell: object) -> dict[Variant, Compiled]:
    variants = list(dict.fromkeys(variant for each in traced.values() for variant in each.variants))
    made = compile_variants(variants, target.name, shared_limit=target.shared_optin, cache=cache_folder(), tell=tell)  # type: ignore[arg-type]
    return dict(zip(variants, made, strict=True))


def cache_folder() -> Path:
    """Where compiled kernels are kept by content, for the next build: CGCOMPILE_CACHE, else cgcompile in XDG_CACHE_HOME or
    ~/.cache.  Raises cache-unsafe when it is not the user's own: what is in it becomes part of bundles."""
    named = os.environ.get("CGCOMPILE_CACHE")
    folder = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cgcompile"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise BuildError("cache-unsafe", f"{folder}: others can write to the folder of compiled kernels")
    return folder


def folded_tables(traced: Mapping[IntKey, Traced], end: int) -> tuple[dict[str, Table], int]:
    """What was computed when lowering, behind the program's own tensors, each once; and the new end of memory `weights`."""
    found: dict[str, Table] = {}
    for constant in [constant for each in traced.values() for constant in each.constants]:
        if constant.name not in found:
            found[constant.name] = Table(offset=end, contents=constant.contents)
            end = align(end + len(constant.contents))
    return found, end


def weight_offsets(placed: Sequence[Weight], folded: Mapping[str, Table]) -> dict[str, int]:
    """Where each weight lies in memory `weights`."""
    return {weight.name: weight.offset for weight in placed} | {name: table.offset for name, table in folded.items()}


def _assemble(
    chains: Mapping[IntKey, Chain],
    compiled: Mapping[Variant, Compiled],
    offsets: Mapping[str, int],
    calls: Mapping[IntKey, Sequence[torch.Tensor]],
    mixed: Mixed | None,
) -> tuple[dict[Name, Graph], int]:
    """The rows of every region and key, and the largest lower bound of their arenas."""
    graphs, bound = {}, 0
    for key, chain in chains.items():
        planned = plan(chain.traced)
        check_plan(chain.traced, planned)
        starts, end = [], 0
        for tensor in calls[key]:
            starts.append(end)
            end = align(end + tensor_bytes(dtype_name(tensor), tensor.shape))
        starts += [row[1] for row in mixed.landing[key]] if mixed else []
        made = assemble_chain(chain, [compiled[variant] for variant in chain.traced.variants], planned, offsets, starts)
        graphs.update({(section.name, key): graph for section, graph in zip(chain.sections, made, strict=True)})
        bound = max(bound, planned.bound)
    return graphs, bound


def _static(tensors: Sequence[torch.Tensor], mixed: Mixed | None, key: IntKey) -> int:
    """Bytes that a key needs of memory `inputs`."""
    landing = mixed.landing[key] if mixed else ()
    return (
        max([inputs_bytes(tensors), *[align(offset + tensor_bytes(dtype, shape)) for _, offset, dtype, shape, _ in landing]]) + PAD
    )


def _rows(
    graphs: Mapping[Name, Graph],
    files: Mapping[Name, str],
    arena: Mapping[IntKey, int],
    static: Mapping[IntKey, int],
    mixed: Mixed | None,
    hosts: Hosts | None,
) -> tuple[tuple[Region, ...], tuple[Program, ...], int]:
    """Regions and programs of the manifest, and the bytes of memory host."""
    if mixed is None or hosts is None:
        region = Region(name=WHOLE, kind="graph", reason="", file="", constants=())
        programs = [row(key, g.inputs, g.outputs, files[name, key], g.arena, static[key]) for (name, key), g in graphs.items()]
        return (region,), tuple(programs), 0
    made: dict[IntKey, dict[str, tuple[tuple[Value, ...], tuple[Value, ...]]]] = {key: {} for key in static}
    for (name, key), graph in graphs.items():
        made[key][name] = graph.inputs, graph.outputs
    return rows_of(mixed, hosts, made, files, arena, static)


def _without_memsets(graphs: Mapping[Name, Graph], target: Arch) -> tuple[dict[Name, Recording], dict[str, bytes]]:
    """The recordings as they are written (see fills.py), and the images that come with that."""
    recordings = {name: graph.recording for name, graph in graphs.items()}
    if not has_memsets(recordings.values()):
        return recordings, {}
    image = fill_image(target.name)
    changed = {name: without_memsets(recording, image) for name, recording in recordings.items()}
    return changed, {hashlib.sha256(image).hexdigest(): image}


def _choices(compiled: Mapping[Variant, Compiled]) -> str:
    """The configuration of every kernel and what chose it, as JSON."""
    rows = {}
    for variant, kernel in compiled.items():
        sizes = {name: value for name, value in variant.constants if isinstance(value, int) and not isinstance(value, bool)}
        sizes |= {name: int(value) for name, value in BLOCKS.findall(variant.source)}
        words = [f"{name}={value}" for name, value in sorted(sizes.items()) if name.isupper() or "BLOCK" in name]
        words += [f"warps={variant.warps}", f"stages={variant.stages}"]
        rows[kernel.sha256, kernel.symbol] = " ".join(words), variant.chosen
    listed = [
        {"image": image, "symbol": symbol, "configuration": words, "chosen": how} for (image, symbol), (words, how) in rows.items()
    ]
    return json.dumps(sorted(listed, key=lambda row: (row["symbol"], row["image"])), indent=0) + "\n"
