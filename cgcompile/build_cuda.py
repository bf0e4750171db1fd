"""The cuda target's half of a build, on a machine with the GPU: capture, and lay the recordings out as files."""

from __future__ import annotations

import hashlib
import tempfile
from functools import partial
from pathlib import Path

import torch

from cgbundle import archive, safetensors, tables
from cgbundle.recording import Recording
from cgbundle.schema import CODE, Exam, Proof, Region, Target

from .cuda_files import program as row
from .cuda_files import write_kernels, write_tables, write_weights
from .errors import ProofFailed
from .fills import fill_image, has_memsets, without_memsets
from .job import Job, Parts
from .progress import Stages
from .record.capture import Call, Recorded, record
from .record.rows import Key
from .record.tensors import program_tensors
from .source import SEED, all_keys, sample
from .trace.toolkit import lowest_driver

STATES_FILE = "graphs/modules.bin"
FRESH = 1
"""Seed of the exam's inputs: others than those that the graphs were captured on."""


def build_parts(job: Job, stage: Path, stages: Stages) -> Parts:
    """Records every int_key, and writes tables, images, weights and the exam into `stage`.

    Raises the refusals of record/errors.py, and ProofFailed when a replay is further from eager PyTorch than the dtype allows.
    """
    program = job.exported.program
    keys = all_keys(job.sizes)
    calls = _calls(job, SEED)
    fresh = _calls(job, FRESH)
    # what the first process of max-autotune measured and chose, the second has to find in the cache
    parallel = job.lower != "max-autotune"
    with tempfile.TemporaryDirectory(prefix="cgcompile-") as scratch, stages("record") as tell:
        recorded = record(
            program,
            calls,
            folder=Path(scratch),
            level=job.lower,
            specialize=job.specialize,
            fresh=fresh,
            parallel=parallel,
            tell=tell,
        )
        nodes = sum(len(recording.nodes) for recording in recorded.recordings.values())
        tell(f"{nodes} nodes, {len(recorded.images)} kernel images")
    with stages("emit") as tell:
        for key, trial in recorded.trials.items():
            if not trial.error <= trial.tolerance:
                raise ProofFailed(
                    f"int_key {key}: the graph differs from eager PyTorch by {trial.error:.1e}, allowed {trial.tolerance:.1e}",
                    "try --lower eager; if that differs too, please report this model",
                )
        rows = write_weights(stage / archive.WEIGHTS, program_tensors(program), recorded.weights, recorded.tables)
        recordings, images, driver = _without_memsets(recorded)
        write_kernels(stage, images)
        files = write_tables(stage, recordings)
        if recorded.states:
            (stage / STATES_FILE).write_bytes(tables.encode_states(recorded.states))
        _write_exam(stage / archive.EXAM, recorded)
        tell(f"{sum(file.stat().st_size for file in stage.rglob('*') if file.is_file()) / 1e6:.1f} MB")
    exact = all(trial.deterministic for trial in recorded.trials.values())
    return Parts(
        target=Target(kind="cuda", arch=recorded.arch, features=(), torch="", driver=driver),
        weights=rows,
        memories=(
            ("weights", recorded.weights_bytes),
            ("inputs", max(recorded.static.values())),
            ("arena", max(recorded.arena.values())),
            (CODE, sum(len(image) for image in images.values())),
        ),
        regions=(Region(name="model", kind="graph", reason="", file="", constants=()),),
        programs=tuple(
            row(key, recorded.inputs[key], recorded.outputs[key], files[key], recorded.arena[key], recorded.static[key])
            for key in keys
        ),
        module_state=STATES_FILE if recorded.states else "",
        exam=Exam(
            compare="bits" if exact else "tolerance",
            proofs=tuple(_proof(recorded, key) for key in keys),
        ),
    )


def _calls(job: Job, seed: int) -> dict[Key, Call]:
    keys = all_keys(job.sizes)
    return {key: (sample(job.source, dict(zip(job.sizes, key, strict=True)), seed).tensors, {}) for key in keys}


def _proof(recorded: Recorded, key: Key) -> Proof:
    trial = recorded.trials[key]
    return Proof(key=key, method="none", error=trial.error, tolerance=trial.tolerance)


def _without_memsets(recorded: Recorded) -> tuple[dict[Key, Recording], dict[str, bytes], int]:
    """Recordings and images to write (see fills.py), and the lowest driver that they need."""
    driver = _lowest_driver(recorded)
    if not has_memsets(recorded.recordings.values()):
        return recorded.recordings, recorded.images, driver
    image = fill_image(recorded.arch)
    recordings = {key: without_memsets(recording, image) for key, recording in recorded.recordings.items()}
    images = {**recorded.images, hashlib.sha256(image).hexdigest(): image}
    return recordings, images, max(driver, lowest_driver(int(recorded.arch.removeprefix("sm_"))))


def _lowest_driver(recorded: Recorded) -> int:
    """The CUDA version that the kernels were compiled with, as drivers count (13000 = 13.0), and at most the recording
    machine's: a cubin runs on every driver of its major version (CUDA's minor version compatibility)."""
    toolkit = torch.version.cuda or "0"
    return min(int(toolkit.partition(".")[0]) * 1000, recorded.driver)


def _write_exam(path: Path, recorded: Recorded) -> None:
    entries: dict[str, safetensors.Tensor] = {}
    for key, trial in recorded.trials.items():
        for kind, values, data in (("input", recorded.inputs[key], trial.inputs), ("output", recorded.outputs[key], trial.outputs)):
            for index, (value, stored) in enumerate(zip(values, data, strict=True)):
                entries[archive.exam_entry(key, kind, index)] = (value.dtype, value.shape, partial(bytes, stored))
    with open(path, "wb") as file:
        safetensors.write(file, entries)
