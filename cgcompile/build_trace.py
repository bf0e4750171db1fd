"""The cuda target's half of a build without that GPU: lower to Triton, compile, plan, lay out as files, interpret."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cgbundle import archive
from cgbundle.schema import CODE, Exam, Program, Proof, Region, Target, Weight

from .arch import Arch, arch
from .cuda_files import program as row
from .cuda_files import write_kernels, write_tables, write_weights
from .emit import KeyExam, eager_exam, write_exam
from .errors import ProofFailed
from .fills import fill_image, has_memsets, without_memsets
from .job import Job, Parts
from .progress import Stages
from .record.memory import PAD, Table, align, lay_out, tensor_bytes
from .record.tensors import dtype_bound, dtype_name, inputs_bytes, program_tensors, row_major, shapes_of
from .source import all_keys, sample
from .tolerance import largest_error
from .trace.assembling import Graph, assemble
from .trace.compiling import Compiled, compile_variants
from .trace.errors import CacheUnsafe
from .trace.interpreting import Outcome, Task, interpret
from .trace.lifetimes import check_plan
from .trace.lowering_jobs import lower_all
from .trace.planning import plan
from .trace.toolkit import lowest_driver
from .trace.traced import Key, Traced, Variant
from .trace.tuned import table_file

KERNELS = "kernels.json"
"""The file of a bundle that says which configuration each kernel has, and why; for people, the runtime never reads it."""

BLOCKS = re.compile(r"\b(BLOCK_[MNK]|GROUP_M)\b[^=\n]*= (\d+)$", re.MULTILINE)
"""Configuration in the text of a kernel that Inductor made of a template."""

BUDGET = 120.0
"""Seconds that interpreting may take: the keys that fit are proved, smallest first, at least one."""


def build_parts(job: Job, stage: Path, stages: Stages) -> Parts:
    """Traces every int_key, and writes tables, images, weights and the exam into `stage`.

    Raises the refusals of trace/errors.py, and ProofFailed when an interpreted key is further from eager PyTorch than the dtype
    allows.
    """
    target, program = arch(job.target), job.exported.program
    calls = {key: sample(job.source, dict(zip(job.sizes, key, strict=True))).tensors for key in all_keys(job.sizes)}
    with tempfile.TemporaryDirectory(prefix="cgcompile-") as scratch:
        with stages("lower") as tell:
            traced = lower_all(
                program, calls, target.name, Path(scratch), cache=cache_folder(), table=table_file(target.name), tell=tell
            )
            tell(_summary(traced))
        with stages("compile") as tell:
            compiled = _compile(traced, target, tell)
            tell(f"{len(set(kernel.sha256 for kernel in compiled.values()))} kernel images")
        placed, end = lay_out(shapes_of(program_tensors(program)))
        folded, end = folded_tables(traced, end)
        with stages("plan") as tell:
            graphs, bound = _assemble(traced, compiled, weight_offsets(placed, folded), calls)
            graphs, fills = _without_memsets(graphs, target)
            arena = max(graph.arena for graph in graphs.values())
            tell(f"arena {arena:,} bytes, {arena / max(bound, 1) - 1:.1%} above the least that the lifetimes allow")
        with stages("emit") as tell:
            images = {kernel.sha256: kernel.image for kernel in compiled.values()} | fills
            rows = write_weights(stage / archive.WEIGHTS, program_tensors(program), placed, tuple(folded.values()))
            write_kernels(stage, images)
            (stage / KERNELS).write_text(_choices(compiled))
            files = write_tables(stage, {key: graph.recording for key, graph in graphs.items()})
            exams = eager_exam(job.source, job.exported, job.sizes)
            write_exam(stage / archive.EXAM, exams)
            tell(f"{sum(file.stat().st_size for file in stage.rglob('*') if file.is_file()) / 1e6:.1f} MB")
        static = {key: inputs_bytes(tensors) + PAD for key, tensors in calls.items()}
        memories = (
            ("weights", end + PAD),
            ("inputs", max(static.values())),
            ("arena", arena),
            (CODE, sum(len(image) for image in images.values())),
        )
        proofs = tuple(Proof(key=exam.key, method="none", error=0.0, tolerance=dtype_bound(program)) for exam in exams)
        if job.prove == "interpret":
            sources = _sources(traced, compiled)
            with stages("interpret") as tell:
                tasks = [_task(graphs[e.key], sources, end + PAD, static[e.key], stage / archive.WEIGHTS, rows, e) for e in exams]
                done = interpret(tasks, Path(scratch, "interpret"), budget=BUDGET, cache=cache_folder(), tell=tell)
                proofs = _proved(proofs, exams, done)
                worst = max(proof.error for proof in proofs)
                tell(f"{len(done)} of {len(tasks)} int_keys over poisoned memory, largest error {worst:.1e}")
    return Parts(
        target=Target(kind="cuda", arch=target.name, features=(), torch="", driver=lowest_driver(target.capability)),
        weights=rows,
        memories=memories,
        regions=(Region(name="model", kind="graph", reason="", file="", constants=()),),
        programs=tuple(_program(key, graphs[key], files[key], static[key]) for key in calls),
        module_state="",
        exam=Exam(compare="tolerance", proofs=proofs),
    )


def _summary(traced: Mapping[Key, Traced]) -> str:
    chosen = [variant.chosen for each in traced.values() for variant in each.variants]
    counts = {how: chosen.count(how) for how in ("table", "nearest", "heuristic") if how in chosen}
    found = ", ".join(f"{count} by {how}" for how, count in counts.items())
    return f"{len(chosen)} kernels" + (f"; configurations: {found}" if found else "")


def _compile(traced: Mapping[Key, Traced], target: Arch, tell: object) -> dict[Variant, Compiled]:
    variants = list(dict.fromkeys(variant for each in traced.values() for variant in each.variants))
    made = compile_variants(variants, target.name, shared_limit=target.shared_optin, cache=cache_folder(), tell=tell)  # type: ignore[arg-type]
    return dict(zip(variants, made, strict=True))


def cache_folder() -> Path:
    """Where compiled kernels are kept by content, for the next build: CGCOMPILE_CACHE, else cgcompile in XDG_CACHE_HOME or
    ~/.cache.  Raises CacheUnsafe when it is not the user's own: what is in it becomes part of bundles."""
    named = os.environ.get("CGCOMPILE_CACHE")
    folder = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cgcompile"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise CacheUnsafe(f"{folder}: others can write to the folder of compiled kernels")
    return folder


def folded_tables(traced: Mapping[Key, Traced], end: int) -> tuple[dict[str, Table], int]:
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
    traced: Mapping[Key, Traced],
    compiled: Mapping[Variant, Compiled],
    offsets: Mapping[str, int],
    calls: Mapping[Key, Sequence[torch.Tensor]],
) -> tuple[dict[Key, Graph], int]:
    """The rows of every key, and the largest lower bound of their arenas."""
    graphs, bound = {}, 0
    for key, each in traced.items():
        planned = plan(each)
        check_plan(each, planned)
        starts, end = [], 0
        for tensor in calls[key]:
            starts.append(end)
            end = align(end + tensor_bytes(dtype_name(tensor), tensor.shape))
        graphs[key] = assemble(each, [compiled[variant] for variant in each.variants], planned, offsets, starts)
        bound = max(bound, planned.bound)
    return graphs, bound


def _without_memsets(graphs: dict[Key, Graph], target: Arch) -> tuple[dict[Key, Graph], dict[str, bytes]]:
    """The graphs as they are written (see fills.py), and the images that come with that."""
    if not has_memsets(graph.recording for graph in graphs.values()):
        return graphs, {}
    image = fill_image(target.name)
    changed = {key: replace(graph, recording=without_memsets(graph.recording, image)) for key, graph in graphs.items()}
    return changed, {hashlib.sha256(image).hexdigest(): image}


def _sources(traced: Mapping[Key, Traced], compiled: Mapping[Variant, Compiled]) -> tuple[tuple[tuple[str, str], Variant], ...]:
    variants = dict.fromkeys(variant for each in traced.values() for variant in each.variants)
    return tuple({(compiled[variant].sha256, compiled[variant].symbol): variant for variant in variants}.items())


def _task(
    graph: Graph,
    sources: tuple[tuple[tuple[str, str], Variant], ...],
    weights_bytes: int,
    static: int,
    weights: Path,
    placed: tuple[Weight, ...],
    exam: KeyExam,
) -> Task:
    used = {(function.image, function.symbol) for function in graph.recording.functions}
    return Task(
        key=exam.key,
        recording=graph.recording,
        variants=tuple([pair for pair in sources if pair[0] in used]),
        sizes=(("weights", weights_bytes), ("inputs", static), ("arena", graph.arena)),
        weights=weights,
        placed=placed,
        inputs=tuple(zip(graph.inputs, [row_major(tensor) for tensor in exam.inputs], strict=True)),
        outputs=graph.outputs,
    )


def _proved(proofs: Sequence[Proof], exams: Sequence[KeyExam], done: Sequence[Outcome]) -> tuple[Proof, ...]:
    outcomes = {outcome.key: outcome for outcome in done}
    found = []
    for proof, exam in zip(proofs, exams, strict=True):
        outcome = outcomes.get(exam.key)
        if outcome is None:
            found.append(proof)
            continue
        error = max((_error(want, got) for want, got in zip(exam.outputs, outcome.outputs, strict=True)), default=0.0)
        if not error <= proof.tolerance:
            raise ProofFailed(
                f"int_key {exam.key}: the interpreted kernels differ from eager PyTorch by {error:.1e}, "
                f"allowed {proof.tolerance:.1e}",
                "nothing was published; please report this model",
            )
        found.append(Proof(key=proof.key, method="interpret", error=error, tolerance=proof.tolerance))
    return tuple(found)


def _error(expected: torch.Tensor, got: bytes) -> float:
    if not expected.numel():
        return 0.0
    return largest_error(expected, torch.frombuffer(bytearray(got), dtype=expected.dtype).reshape(expected.shape))


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


def _program(key: Key, graph: Graph, file: str, static: int) -> Program:
    return row(key, graph.inputs, graph.outputs, file, graph.arena, static)
