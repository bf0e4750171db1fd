"""The cuda target's half of a build, on a machine with the GPU: capture, and lay the recordings out as files."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from cgbundle import archive, safetensors, tables
from cgbundle.schema import CODE, Exam, Program, Proof, Region, Step, Target, Weight
from cgbundle.tensor import memory_order

from .errors import ProofFailed
from .export import PREFIX
from .job import Job, Parts
from .progress import Stages
from .record.capture import Call, Recorded, record
from .record.rows import Key
from .record.tensors import contents, program_tensors
from .source import SEED, all_keys, sample

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
        recorded = record(program, calls, folder=Path(scratch), level=job.lower, fresh=fresh, tell=tell, parallel=parallel)
        nodes = sum(len(recording.nodes) for recording in recorded.recordings.values())
        tell(f"{nodes} nodes, {len(recorded.images)} kernel images")
    with stages("emit") as tell:
        for key, trial in recorded.trials.items():
            if not trial.error <= trial.tolerance:
                raise ProofFailed(
                    f"int_key {key}: the graph differs from eager PyTorch by {trial.error:.1e}, allowed {trial.tolerance:.1e}",
                    "try --lower eager; if that differs too, please report this model",
                )
        rows = _write_weights(stage / archive.WEIGHTS, program_tensors(program), recorded)
        _write_kernels(stage, recorded)
        files = _write_tables(stage, recorded)
        _write_exam(stage / archive.EXAM, recorded)
        tell(f"{sum(file.stat().st_size for file in stage.rglob('*') if file.is_file()) / 1e6:.1f} MB")
    exact = all(trial.deterministic for trial in recorded.trials.values())
    return Parts(
        target=Target(kind="cuda", arch=recorded.arch, features=(), torch="", driver=_lowest_driver(recorded)),
        weights=rows,
        memories=(
            ("weights", recorded.weights_bytes),
            ("inputs", max(recorded.static.values())),
            ("arena", max(recorded.arena.values())),
            (CODE, sum(len(image) for image in recorded.images.values())),
        ),
        regions=(Region(name="model", kind="graph", reason="", file="", constants=()),),
        programs=tuple(_program(recorded, key, files[key]) for key in keys),
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


def _program(recorded: Recorded, key: Key, file: str) -> Program:
    given, made = recorded.inputs[key], recorded.outputs[key]
    inputs, outputs = tuple(range(len(given))), tuple(range(len(given), len(given) + len(made)))
    step = Step(kind="graph", region=0, file=file, inputs=inputs, outputs=outputs)
    return Program(
        key=key,
        values=(*given, *made),
        inputs=inputs,
        outputs=outputs,
        steps=(step,),
        arena=recorded.arena[key],
        static=recorded.static[key],
    )


def _lowest_driver(recorded: Recorded) -> int:
    """The CUDA version that the kernels were compiled with, as drivers count (13000 = 13.0), and at most the recording
    machine's: a cubin runs on every driver of its major version (CUDA's minor version compatibility)."""
    toolkit = torch.version.cuda or "0"
    return min(int(toolkit.partition(".")[0]) * 1000, recorded.driver)


def _write_weights(path: Path, tensors: dict[str, torch.Tensor], recorded: Recorded) -> tuple[Weight, ...]:
    """weights.safetensors: the program's tensors, and the tables behind them as `cgcompile.table.N`."""
    rows: list[Weight] = []
    stored: dict[str, safetensors.Tensor] = {}
    for row in recorded.weights:
        order = memory_order(row.shape, row.strides)
        tensor = row.tensor.removeprefix(PREFIX)
        stored[tensor] = (row.dtype, tuple(row.shape[axis] for axis in order), _reader(tensors[row.tensor], row.strides))
        rows.append(
            Weight(
                name=row.name.removeprefix(PREFIX),
                tensor=tensor,
                dtype=row.dtype,
                shape=row.shape,
                strides=row.strides,
                offset=row.offset,
            )
        )
    for index, table in enumerate(recorded.tables):
        name, size = f"cgcompile.table.{index}", len(table.contents)
        stored[name] = ("uint8", (size,), partial(bytes, table.contents))
        rows.append(Weight(name=name, tensor=name, dtype="uint8", shape=(size,), strides=(1,), offset=table.offset))
    with open(path, "wb") as file:
        safetensors.write(file, stored)
    return tuple(rows)


def _reader(tensor: torch.Tensor, strides: tuple[int, ...]) -> Callable[[], bytes]:
    return partial(contents, tensor, strides)


def _write_kernels(stage: Path, recorded: Recorded) -> None:
    (stage / "kernels").mkdir()
    for name, image in recorded.images.items():
        assert hashlib.sha256(image).hexdigest() == name, name
        (stage / "kernels" / name).write_bytes(image)


def _write_tables(stage: Path, recorded: Recorded) -> dict[Key, str]:
    (stage / "graphs").mkdir()
    files = {}
    for key, recording in recorded.recordings.items():
        files[key] = f"graphs/model-{'x'.join(map(str, key)) or 'fixed'}.bin"
        (stage / files[key]).write_bytes(tables.encode(recording))
    if recorded.states:
        (stage / STATES_FILE).write_bytes(tables.encode_states(recorded.states))
    return files


def _write_exam(path: Path, recorded: Recorded) -> None:
    entries: dict[str, safetensors.Tensor] = {}
    for key, trial in recorded.trials.items():
        for kind, values, data in (("input", recorded.inputs[key], trial.inputs), ("output", recorded.outputs[key], trial.outputs)):
            for index, (value, stored) in enumerate(zip(values, data, strict=True)):
                entries[archive.exam_entry(key, kind, index)] = (value.dtype, value.shape, partial(bytes, stored))
    with open(path, "wb") as file:
        safetensors.write(file, entries)
