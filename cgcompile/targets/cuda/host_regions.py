"""Programs of several regions: their partition per int_key, host regions compiled for the CPU, and rows of the manifest."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from cgbundle.errors import CallError
from cgbundle.format.schema import IntKey, Program, Region, Value, Weight

from ...errors import BuildError, ModelError
from ...export.programs import Programs
from ...export.weights import weight_placeholders
from ...model.flat_module import PREFIX
from ...model.user_code import first_line
from ...partition.isolated import RegionModule, eager_values, isolated_regions, uploaded_values
from ...partition.split import Partition, partition
from ...transforms.inlining import inlined
from ...transforms.prepared import Placements
from ...util.progress import Stages, Tell
from ..build_spec import entry_of, key_label, own_key
from ..cpu import layouts
from ..cpu.object_cache import compiled_and_kept, kept_at, recalled
from ..instruction_sets import Level
from ..memory_layout import UploadedValue, dense_strides
from ..program_contents import program_contents
from ..weights import shapes_of, stored_dtype
from .recorded import RecordedProgram
from .steps import LoweredRegions, program_row
from .tensors import input_offsets


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitProgram:
    """Programs of several regions, by int_key.  `values`: every value as eager PyTorch computed it.  `uploads`: the places of
    values that the host computes, in memory `inputs` after the call's inputs.  `host_only`: weights that only host regions read.
    `state`: the names of the buffers of `Partition.state`, by placeholder."""

    partitions: dict[IntKey, Partition] = field(repr=False)
    regions: dict[IntKey, tuple[RegionModule, ...]] = field(repr=False)
    values: dict[IntKey, dict[str, torch.Tensor]] = field(repr=False)
    uploads: dict[IntKey, tuple[UploadedValue, ...]]
    host_only: frozenset[str]
    state: dict[IntKey, dict[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRegions:
    """Compiled host regions.  `rows`: by (region, int_key); int_keys can share a row.  `features`: the processor features that the
    code of all regions uses.  `unbound`: as in `weights.unbound`."""

    rows: Mapping[tuple[str, IntKey], Region]
    features: tuple[str, ...]
    unbound: frozenset[str]


NO_HOST_REGIONS = HostRegions(rows={}, features=(), unbound=frozenset())


def split_stage(
    programs: Programs, placements: Placements, calls: Mapping[IntKey, Sequence[torch.Tensor]], stages: Stages
) -> SplitProgram | None:
    """Runs `split_program` as a stage of the build if an operation must run on the host, else returns None."""
    if not any(placements.values()):
        return None
    with stages("partition") as tell:
        split = split_program(programs, placements, calls)
        orders = [" -> ".join(region.name for region in partition.regions) for partition in split.partitions.values()]
        tell.result("; ".join(dict.fromkeys(orders)))
    return split


def host_stage(
    split: SplitProgram | None, weights: Sequence[Weight], scratch: Path, stage: Path, stages: Stages, level: Level | None = None
) -> HostRegions:
    """Runs `compile_host_regions` as a stage of the build."""
    if split is None:
        return NO_HOST_REGIONS
    with stages("host") as tell:
        hosts = compile_host_regions(split, weights, scratch, stage, tell, level)
        tell.result(", ".join(region.file for region in dict.fromkeys(hosts.rows.values())) or "copies only")
    return hosts


def off_gpu(split: SplitProgram | None, hosts: HostRegions, weights: Sequence[Weight]) -> frozenset[str]:
    """Returns the weights of `split.host_only` that compiled code reads as constants, with the weights tied to them.  It does not
    read small weights: Inductor writes up to eight elements into the code.  `weights`: the rows for the compilation."""
    constants = {weights[index].tensor for region in hosts.rows.values() for _, index in region.constants}
    return frozenset([row.name for row in weights if split and row.name in split.host_only and row.tensor in constants])


def split_program(programs: Programs, placements: Placements, calls: Mapping[IntKey, Sequence[torch.Tensor]]) -> SplitProgram:
    """Splits all programs.  `calls`: example inputs by int_key, on the programs' device.  Raises the errors of `partition`."""
    by_program = {id(program): partition(program, placements[key]) for key, program in programs.distinct}
    partitions, regions, values, uploads, state = {}, {}, {}, {}, {}
    for key, tensors in calls.items():
        inputs, planned = [_dense(tensor) for tensor in tensors], by_program[id(programs.at(key))]
        partitions[key] = planned
        regions[key] = isolated_regions(programs.at(key), planned, inputs)
        (values[key],) = eager_values(programs.at(key), regions[key], planned, inputs)
        uploads[key] = _uploads(planned, values[key], input_offsets(inputs)[-1])
        names = weight_placeholders(programs.at(key))
        state[key] = {name: names[name] for name in planned.state}
    host_only = _host_only(programs, [region for key_regions in regions.values() for region in key_regions])
    return SplitProgram(partitions=partitions, regions=regions, values=values, uploads=uploads, host_only=host_only, state=state)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the strides of the input's static buffer."""
    shape = tuple(tensor.shape)
    dense = dense_strides(shape, tensor.stride())
    return torch.empty_strided(shape, dense, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _uploads(planned: Partition, values: Mapping[str, torch.Tensor], end: int) -> tuple[UploadedValue, ...]:
    rows: list[UploadedValue] = []
    for name in uploaded_values(planned):
        dtype, shape = stored_dtype(values[name]), tuple(values[name].shape)
        strides = dense_strides(shape, values[name].stride())
        rows.append(UploadedValue(name=name, offset=end, dtype=dtype, shape=shape, strides=strides))
        end = rows[-1].end
    return tuple(rows)


def _host_only(programs: Programs, regions: Sequence[RegionModule]) -> frozenset[str]:
    """Returns the weights that host regions read and no graph reads.  Tied weights are treated as one weight."""
    read: dict[str, set[str]] = {"graph": set(), "host": set()}
    for region in regions:
        region_weights = {
            **dict(region.module.named_parameters(remove_duplicate=False)),
            **dict(region.module.named_buffers(remove_duplicate=False)),
        }
        read[region.planned.kind] |= region_weights.keys()
    tied: dict[str, set[str]] = {}
    for name, shape in shapes_of(programs.weights()).items():
        tied.setdefault(shape.same_as or name, set()).add(name)
    return frozenset(name for names in tied.values() if names & read["host"] and not names & read["graph"] for name in names)


def compile_host_regions(
    split: SplitProgram, weights: Sequence[Weight], scratch: Path, stage: Path, tell: Tell, level: Level | None = None
) -> HostRegions:
    """Compiles every host region that has operations, for every int_key, and writes host/<name>.so into `stage`.  int_keys whose
    region has the same code and inputs share a file.  `weights`: the rows of `lay_out`.  `level`: the target processors, None for
    the processor of this machine.  Raises compiler-failed, constant-unknown, operator-without-code, torch-unsupported."""
    compiled: dict[Any, Region] = {}
    rows: dict[tuple[str, IntKey], Region] = {}
    features: set[str] = set()
    unbound: set[str] = set()
    for key, regions in split.regions.items():
        for region in [region for region in regions if region.planned.kind == "host" and region.planned.operations]:
            name = region.planned.name
            example_inputs = [split.values[key][value_name].cpu() for value_name in region.planned.inputs]
            code = "".join(module.code for module in region.module.modules() if isinstance(module, GraphModule))
            signature = (name, entry_of(key), code, tuple((t.dtype, t.shape, t.stride()) for t in example_inputs))
            if signature not in compiled:
                tell(f"compiling {name} for int_key {key}")
                region_name = name if len(split.regions) == 1 else f"{name}-{key_label(key)}"
                expected = [split.values[key][value_name].cpu() for value_name in region.planned.module_outputs]
                compiled[signature], used, unbound_names = _compile(
                    region, region_name, example_inputs, expected, weights, scratch, stage, level
                )
                features |= set(used)
                unbound |= unbound_names
            rows[name, key] = compiled[signature]
    return HostRegions(rows=rows, features=tuple(sorted(features)), unbound=frozenset(unbound))


def _compile(
    region: RegionModule,
    region_name: str,
    example_inputs: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    weights: Sequence[Weight],
    scratch: Path,
    stage: Path,
    level: Level | None,
) -> tuple[Region, tuple[str, ...], frozenset[str]]:
    where = f"{region.planned.name} ({region.planned.reason})"
    try:
        with torch.no_grad():
            program = torch.export.export(region.module, tuple(example_inputs), strict=False)
    except Exception as error:
        raise BuildError("compiler-failed", f"{where}: torch.export cannot export this region: {first_line(error)}") from error
    program = inlined(program)
    work = scratch / region_name
    work.mkdir()
    arguments = program, program_contents([program])[id(program)], (), False, level, False
    compiled = recalled(kept_at(*arguments), work) or compiled_and_kept(*arguments, work, None, lambda text: None)
    file = f"host/{region_name}.so"
    bound = layouts.bind_constants(compiled.path, program, [replace(row, name=row.name.removeprefix(PREFIX)) for row in weights])
    try:
        strides = layouts.output_strides(bound, example_inputs, expected)
    except CallError as error:
        if error.code != "operation-refused":
            raise
        called = ", ".join(sorted({str(node.target) for node in program.graph.nodes if node.op == "call_function"}))
        raise ModelError(
            "operator-without-code",
            f"{where}: its compiled code cannot run without Python; it calls {called}: {error}",
        ) from error
    finally:
        bound.region.close()
    for actual, tensor in zip(strides, expected, strict=True):
        if actual != tensor.stride() and tensor.numel() > 1:
            raise BuildError(
                "compiler-failed",
                f"{region.planned.name}: the compiled code gives an output the strides {list(actual)}, not {list(tensor.stride())}",
            )
    (stage / file).parent.mkdir(exist_ok=True)
    shutil.copyfile(compiled.path, stage / file)
    row = Region(name=region_name, kind="host", reason=region.planned.reason, file=file, constants=bound.constants)
    return row, compiled.features, bound.unbound


def split_rows(
    split: SplitProgram,
    hosts: HostRegions,
    recorded: RecordedProgram,
    files: Mapping[tuple[str, IntKey], str],
    arena: Mapping[IntKey, int],
) -> tuple[tuple[Region, ...], tuple[Program, ...], int]:
    """Returns regions and programs for the manifest, and the bytes of memory host.  `files`: graph tables by (region, int_key)."""
    placed = {row.name: _place_of(row) for row in recorded.weights if row.memory == "state"}
    planned = [region for partition in split.partitions.values() for region in partition.regions if region.kind == "graph"]
    names = dict.fromkeys(region.name for region in planned)
    graph_rows = [Region(name=name, kind="graph", reason="", file="", constants=()) for name in names]
    rows = (*graph_rows, *dict.fromkeys(hosts.rows.values()))
    place = {row: index for index, row in enumerate(rows)}
    programs, host_bytes = [], 0
    for key, regions in split.regions.items():
        values = split.values[key]
        outputs = {name: graph.outputs for (name, other), graph in recorded.graphs.items() if other == key}
        for region in regions:
            if region.planned.kind == "host":
                outputs[region.planned.name] = tuple([_on_host(values[name]) for name in region.planned.outputs])
        lowered = LoweredRegions(
            outputs=outputs,
            files={name: file for (name, other), file in files.items() if other == key},
            inputs=_inputs([values[name] for name in split.partitions[key].inputs]),
            state={name: placed[target] for name, target in split.state[key].items()},
            uploads={
                value.name: Value(dtype=value.dtype, shape=value.shape, strides=value.strides, memory="inputs", offset=value.offset)
                for value in split.uploads[key]
            },
            passed_through={name: source for region in regions for name, source in region.passed_through.items()},
            regions={row.name: place[row] for row in graph_rows}
            | {name: place[row] for (name, other), row in hosts.rows.items() if other == key},
        )
        row, used = program_row(own_key(key), split.partitions[key], lowered, arena[key], recorded.static[key])
        programs.append(row)
        host_bytes = max(host_bytes, used)
    return rows, tuple(programs), host_bytes


def _inputs(tensors: Sequence[torch.Tensor]) -> tuple[Value, ...]:
    """Returns the call's inputs at the offsets of `place_inputs`."""
    rows = []
    for tensor, offset in zip(tensors, input_offsets(tensors), strict=False):
        shape = tuple(tensor.shape)
        strides = dense_strides(shape, tensor.stride())
        rows.append(Value(dtype=stored_dtype(tensor), shape=shape, strides=strides, memory="inputs", offset=offset))
    return tuple(rows)


def _place_of(row: Weight) -> Value:
    return Value(dtype=row.dtype, shape=row.shape, strides=row.strides, memory=row.memory, offset=row.offset)


def _on_host(tensor: torch.Tensor) -> Value:
    shape = tuple(tensor.shape)
    strides = dense_strides(shape, tuple(torch.empty(shape, device="meta").stride()))
    return Value(dtype=stored_dtype(tensor), shape=shape, strides=strides, memory="host", offset=0)
