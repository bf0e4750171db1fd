"""emit: the parts of a build -> the files and the manifest of a bundle.  The only writer of the format."""

from __future__ import annotations

import copy
import datetime
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.export import ExportedProgram

from cgbundle.cpu.processor import processor_name
from cgbundle.format import archive, codec, safetensors, schema
from cgbundle.validate import bundle as verify

from ..export.weights import Weights, weight_tensors
from ..model.flat_module import PREFIX, run_eager
from ..model.pytree import dtype_name
from ..model.source import Source, all_keys, sample
from ..transforms.prepared import Prepared
from ..util.raw_bytes import raw
from ..util.version import VERSION
from . import state_exam

TRACES = ("stack_trace", "custom", "from_node")
"""What a node's metadata says of the source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyExam:
    """Inputs and expected outputs at one int_key; `written` is what inputs that the model writes to hold after the call, by their
    position, `state` what the call changes in buffers."""

    key: tuple[int, ...]
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    written: tuple[tuple[int, torch.Tensor], ...] = ()
    state: tuple[state_exam.Changed, ...] = ()


def eager_exam(
    source: Source, prepared: Prepared, sizes: Mapping[str, tuple[int, ...]], weights: Sequence[schema.Weight]
) -> list[KeyExam]:
    """What eager PyTorch gives at every int_key, on the inputs that the source draws, from the model's first state."""
    exams = []
    before = {name.removeprefix(PREFIX): value for name, value in weight_tensors(prepared.program).items()}
    rows = [row for row in weights if row.memory == "state"]
    for key in all_keys(sizes):
        inputs = sample(source, dict(zip(sizes, key, strict=True))).tensors
        ran = run_eager(prepared.reference, inputs, prepared.exam_calls)
        written = tuple([(index, ran.given[index]) for index in prepared.written])
        after = {row.name: state_exam.in_memory(ran.state[row.name], row) for row in rows}
        state = state_exam.changed(weights, before, after)
        exams.append(KeyExam(key=key, inputs=inputs, outputs=ran.outputs, written=written, state=state))
    return exams


def write_exam(path: Path, exams: Sequence[KeyExam]) -> None:
    """exam.safetensors: `8x128/input/0`, `8x128/output/0`, ..., `8x128/written/0`, `8x128/state/3`."""
    tensors: dict[str, safetensors.Tensor] = {}
    for exam in exams:
        for kind, values in (("input", enumerate(exam.inputs)), ("output", enumerate(exam.outputs)), ("written", exam.written)):
            for index, value in values:
                tensors[archive.exam_entry(exam.key, kind, index)] = _stored(value)
        for kind, index, entry in state_exam.entries(exam.state):
            tensors[archive.exam_entry(exam.key, kind, index)] = entry
    with open(path, "wb") as file:
        safetensors.write(file, tensors)


def write_program(path: Path, program: ExportedProgram) -> None:
    """program.pt2 without weights: every weight keeps its shape and dtype and is stored as a single zero, seen through strides
    of 0."""
    bare = copy.copy(program)
    bare._state_dict = {name: _hollow(value) for name, value in program.state_dict.items()}
    bare._constants = {
        name: _hollow(value) if isinstance(value, torch.Tensor) else value for name, value in program.constants.items()
    }
    bare._example_inputs = None
    with _without_traces(program):
        torch.export.save(bare, path)


@contextmanager
def _without_traces(program: ExportedProgram) -> Iterator[None]:
    """Nodes remember where in the user's files they come from: paths of the building machine, which a bundle does not carry."""
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes]
    kept = [{name: node.meta.pop(name) for name in TRACES if name in node.meta} for node in nodes]
    try:
        yield
    finally:
        for node, meta in zip(nodes, kept, strict=True):
            node.meta.update(meta)


def _hollow(value: torch.Tensor) -> torch.Tensor:
    hollow = (
        torch.zeros((), dtype=value.dtype).expand(value.shape) if value.numel() else torch.empty(value.shape, dtype=value.dtype)
    )
    return torch.nn.Parameter(hollow, value.requires_grad) if isinstance(value, torch.nn.Parameter) else hollow


def _stored(value: torch.Tensor) -> safetensors.Tensor:
    return dtype_name(value.dtype), tuple(value.shape), lambda: raw(value).numpy()


def cpu_programs(exams: Sequence[KeyExam], strides: Sequence[Sequence[tuple[int, ...]]]) -> tuple[schema.Program, ...]:
    """One host step per int_key; `strides` are those that the compiled code gives its outputs, per key and output."""
    programs = []
    for exam, found in zip(exams, strides, strict=True):
        given = [_value(tensor, tensor.stride()) for tensor in exam.inputs]
        made = [_value(tensor, stride) for tensor, stride in zip(exam.outputs, found, strict=True)]
        inputs, outputs = tuple(range(len(given))), tuple(range(len(given), len(given) + len(made)))
        step = schema.Step(kind="host", region=0, file="", inputs=inputs, outputs=outputs)
        values = (*given, *made)
        programs.append(
            schema.Program(key=exam.key, values=values, inputs=inputs, outputs=outputs, steps=(step,), arena=0, static=0)
        )
    return tuple(programs)


def _value(tensor: torch.Tensor, strides: Sequence[int]) -> schema.Value:
    return schema.Value(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), strides=tuple(strides), memory="host", offset=0)


def write_weights(path: Path, weights: Weights) -> None:
    """weights.safetensors, one tensor at a time."""
    with open(path, "wb") as file:
        safetensors.write(file, weights.tensors)


def seal(stage: Path, manifest: schema.Manifest) -> schema.Manifest:
    """Describes the files of the stage in the manifest, checks everything, and writes it."""
    sealed = replace(manifest, files=archive.describe_files(str(stage)))
    (stage / archive.MANIFEST).write_bytes(codec.encode(sealed))
    written = archive.read_manifest(str(stage))
    verify.check_bundle(str(stage), written)
    verify.check_exam(str(stage), written)
    return sealed


def provenance(label: str, options: Mapping[str, str]) -> schema.Provenance:
    """Where and when, and with what.  SOURCE_DATE_EPOCH, where set, is the time: two builds are then equal byte for byte."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    now = (
        datetime.datetime.fromtimestamp(int(epoch), datetime.UTC)
        if epoch and epoch.isdigit()
        else datetime.datetime.now(datetime.UTC)
    )
    versions = {"cgcompile": VERSION, "torch": str(torch.__version__), "python": platform.python_version()}
    if importlib.util.find_spec("triton") is not None:
        versions["triton"] = importlib.metadata.version("triton")
    return schema.Provenance(
        source=os.path.basename(label) if os.path.exists(label) else label,
        created=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        versions=tuple(sorted(versions.items())),
        machine=processor_name(),
        options=tuple(sorted(options.items())),
    )
