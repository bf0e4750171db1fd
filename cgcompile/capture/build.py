"""The cuda target's half of a build, on a machine with the GPU: capture, and lay the recordings out as files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from cgbundle.format import archive, safetensors
from cgbundle.format.schema import CODE, Exam, IntKey, Program, Proof, Region, Target, Value, Weight
from cgbundle.tables import codec as tables
from cgbundle.tables.recording import Recording

from ..bundle import state_exam
from ..errors import BuildError
from ..model.flat_module import PREFIX
from ..model.source import SEED, all_keys, sample
from ..targets.cuda.files import program as row
from ..targets.cuda.files import write_kernels, write_tables, write_weights
from ..targets.cuda.fills import fill_image, has_memsets, without_memsets
from ..targets.cuda.host_regions import Hosts, Mixed, compile_hosts, plan_mixed, rows_of, weight_rows
from ..targets.cuda.ptxas import lowest_driver
from ..targets.cuda.tensors import program_tensors
from ..targets.job import Job, Parts
from ..transforms.inlining import code_of
from ..transforms.output_aliases import with_aliases
from ..transforms.prepared import Prepared
from ..util.progress import Stages
from ..util.scratch import scratch_folder
from .recorder import Call, Recorded, record

STATES_FILE = "graphs/modules.bin"
FRESH = 1
"""Seed of the exam's inputs: others than those that the graphs were captured on."""

Tables = dict[tuple[str, IntKey], Recording]
"""Recordings by region and key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hosted:
    """A program of several regions, and its host regions compiled."""

    mixed: Mixed
    hosts: Hosts


def build_parts(job: Job, stage: Path, stages: Stages) -> Parts:
    """Records every int_key, and writes tables, images, weights and the exam into `stage`.

    Raises the refusals of record/errors.py, those of `mixed`, and proof-failed when a replay is further from eager PyTorch than the
    dtype allows.
    """
    program = job.prepared.program
    calls = _calls(job, SEED)
    tensors = program_tensors(program)
    with scratch_folder() as scratch:
        hosted = _hosted(job, calls, scratch, stage, stages) if job.placements else None
        elsewhere = hosted.mixed.elsewhere if hosted else frozenset()
        with stages("record") as tell:
            recorded = record(
                program,
                calls,
                folder=scratch / "record",
                level=job.lower,
                specialize=job.specialize,
                fresh=_calls(job, FRESH),
                code=code_of(job.source, program),
                placements=job.placements,
                landing=hosted.mixed.landing if hosted else {},
                elsewhere=elsewhere,
                written=job.prepared.written,
                state=job.prepared.state,
                exam_calls=job.prepared.exam_calls,
                # what the first process of max-autotune measured and chose, the second has to find in the cache
                parallel=job.lower != "max-autotune",
                tell=tell,
            )
            nodes = sum(len(graph.recording.nodes) for graphs in recorded.graphs.values() for graph in graphs)
            tell(f"{nodes} nodes, {len(recorded.images)} kernel images")
    with stages("emit") as tell:
        for key, trial in recorded.trials.items():
            if not trial.error <= trial.tolerance:
                raise BuildError(
                    "proof-failed",
                    f"int_key {key}: the graph differs from eager PyTorch by {trial.error:.1e}, allowed {trial.tolerance:.1e}",
                    "try --lower eager; if that differs too, please report this model",
                )
        weights = write_weights(
            stage / archive.WEIGHTS, tensors, weight_rows(tensors, elsewhere, job.prepared.state), recorded.tables
        )
        found, images, driver = _without_memsets(_tables(recorded, hosted), recorded)
        write_kernels(stage, images)
        files = write_tables(stage, found)
        if recorded.states:
            (stage / STATES_FILE).write_bytes(tables.encode_states(recorded.states))
        regions, programs, pinned = _rows(job, recorded, hosted, files)
        programs = with_aliases(programs, job.prepared.aliases, job.prepared.signature.outputs, weights)
        _write_exam(stage / archive.EXAM, programs, recorded, job.prepared, weights)
        tell(f"{sum(file.stat().st_size for file in stage.rglob('*') if file.is_file()) / 1e6:.1f} MB")
    exact = hosted is None and all(trial.deterministic for trial in recorded.trials.values())
    return Parts(
        target=Target(
            kind="cuda",
            arch=recorded.arch,
            features=hosted.hosts.features if hosted else (),
            torch=job.torch_version if hosted and hosted.hosts.rows else "",
            driver=driver,
        ),
        weights=weights,
        memories=(
            ("weights", recorded.weights_bytes),
            *((("state", recorded.state_bytes),) if recorded.state_bytes else ()),
            ("inputs", max(recorded.static.values())),
            ("arena", max(graph.arena for graphs in recorded.graphs.values() for graph in graphs)),
            *((("host", pinned),) if pinned else ()),
            (CODE, sum(len(image) for image in images.values())),
        ),
        regions=regions,
        programs=programs,
        module_state=STATES_FILE if recorded.states else "",
        exam=Exam(
            compare="bits" if exact else "tolerance",
            calls=job.prepared.exam_calls,
            proofs=tuple(_proof(recorded, key) for key in all_keys(job.sizes)),
        ),
    )


def _hosted(job: Job, calls: Mapping[IntKey, Call], scratch: Path, stage: Path, stages: Stages) -> _Hosted:
    program = job.prepared.program
    with stages("partition") as tell:
        mixed = plan_mixed(program, job.placements, {key: calls[key][0] for key in all_keys(job.sizes)})
        tell(" -> ".join(part.name for part in mixed.parts.regions))
    with stages("host") as tell:
        hosts = compile_hosts(mixed, weight_rows(program_tensors(program), mixed.elsewhere), scratch, stage, tell)
        tell(", ".join(region.file for region in dict.fromkeys(hosts.rows.values())) or "copies only")
    return _Hosted(mixed=mixed, hosts=hosts)


def _tables(recorded: Recorded, hosted: _Hosted | None) -> Tables:
    names = [part.name for part in hosted.mixed.parts.regions if part.kind == "graph"] if hosted else ["model"]
    return {(name, key): g.recording for key, graphs in recorded.graphs.items() for name, g in zip(names, graphs, strict=True)}


def _rows(
    job: Job, recorded: Recorded, hosted: _Hosted | None, files: Mapping[tuple[str, IntKey], str]
) -> tuple[tuple[Region, ...], tuple[Program, ...], int]:
    """Regions and programs of the manifest, and the bytes of memory host."""
    if hosted is None:
        programs = []
        for key in all_keys(job.sizes):
            (graph,) = recorded.graphs[key]
            file = files["model", key]
            programs.append(row(key, graph.inputs, graph.outputs, file, graph.arena, recorded.static[key]))
        return (Region(name="model", kind="graph", reason="", file="", constants=()),), tuple(programs), 0
    names = [part.name for part in hosted.mixed.parts.regions if part.kind == "graph"]
    made: dict[IntKey, dict[str, tuple[tuple[Value, ...], tuple[Value, ...]]]] = {
        key: {name: (graph.inputs, graph.outputs) for name, graph in zip(names, graphs, strict=True)}
        for key, graphs in recorded.graphs.items()
    }
    arena = {key: max([graph.arena for graph in graphs], default=0) for key, graphs in recorded.graphs.items()}
    return rows_of(hosted.mixed, hosted.hosts, made, files, arena, recorded.static)


def _calls(job: Job, seed: int) -> dict[IntKey, Call]:
    keys = all_keys(job.sizes)
    return {key: (sample(job.source, dict(zip(job.sizes, key, strict=True)), seed).tensors, {}) for key in keys}


def _proof(recorded: Recorded, key: IntKey) -> Proof:
    trial = recorded.trials[key]
    return Proof(key=key, method="none", error=trial.error, tolerance=trial.tolerance)


def _without_memsets(found: Tables, recorded: Recorded) -> tuple[Tables, dict[str, bytes], int]:
    """Recordings and images to write (see fills.py), and the lowest driver that they need."""
    driver = _lowest_driver(recorded)
    if not has_memsets(found.values()):
        return found, recorded.images, driver
    image = fill_image(recorded.arch)
    images = {**recorded.images, hashlib.sha256(image).hexdigest(): image}
    changed = {name: without_memsets(recording, image) for name, recording in found.items()}
    return changed, images, max(driver, lowest_driver(int(recorded.arch.removeprefix("sm_"))))


def _lowest_driver(recorded: Recorded) -> int:
    """The CUDA version that the kernels were compiled with, as drivers count (13000 = 13.0), and at most the recording
    machine's: a cubin runs on every driver of its major version (CUDA's minor version compatibility)."""
    toolkit = torch.version.cuda or "0"
    return min(int(toolkit.partition(".")[0]) * 1000, recorded.driver)


def _write_exam(
    path: Path, programs: tuple[Program, ...], recorded: Recorded, prepared: Prepared, weights: tuple[Weight, ...]
) -> None:
    entries: dict[str, safetensors.Tensor] = {}
    before = {name.removeprefix(PREFIX): value for name, value in program_tensors(prepared.program).items()}
    for program in programs:
        trial = recorded.trials[program.key]
        parts = [("input", index, position, trial.inputs[index]) for index, position in enumerate(program.inputs)]
        parts += [("output", index, position, trial.outputs[index]) for index, position in enumerate(program.outputs)]
        parts += [
            ("written", index, program.inputs[index], data) for index, data in zip(prepared.written, trial.written, strict=True)
        ]
        for kind, index, position, data in parts:
            value = program.values[position]
            entries[archive.exam_entry(program.key, kind, index)] = (value.dtype, value.shape, partial(bytes, data))
        after = {name.removeprefix(PREFIX): data for name, data in trial.state}
        for kind, index, tensor in state_exam.entries(state_exam.changed(weights, before, after)):
            entries[archive.exam_entry(program.key, kind, index)] = tensor
    with open(path, "wb") as file:
        safetensors.write(file, entries)
