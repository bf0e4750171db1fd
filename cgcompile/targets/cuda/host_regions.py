"""Programs of several regions: what both recorders share.  The plan of a program's regions at every int_key, the host regions
compiled for the CPU, and the manifest's rows of it all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from cgbundle.errors import MachineError
from cgbundle.format.schema import IntKey, Program, Region, Value, Weight
from cgbundle.format.spans import HOST_ONLY

from ...errors import BuildError, ModelError
from ...model.flat_module import PREFIX
from ...model.user_code import first_line
from ...partition import Partition, partition
from ...partition.regions import Link, landings, links, run
from ...transforms.inlining import inlined
from ..cpu import layouts
from ..cpu.aoti import compile_cpu
from .memory_layout import Landing, align, dense_strides, lay_out, tensor_bytes
from .steps import Lowered
from .steps import program as program_row
from .tensors import dtype_name, program_tensors, shapes_of

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixed:
    """The regions of a program at every key, and every value as eager PyTorch made it on the CPU.  `elsewhere`: weights that host
    regions alone read, which stay off the GPU."""

    parts: Partition
    chains: dict[IntKey, tuple[Link, ...]] = field(repr=False)
    values: dict[IntKey, dict[str, torch.Tensor]] = field(repr=False)
    landing: dict[IntKey, tuple[Landing, ...]]
    elsewhere: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """Compiled host regions.  `rows` by (name of the part, key), the same row for keys that share one, and the processor
    `features` that the code of all uses."""

    rows: dict[tuple[str, IntKey], Region]
    features: tuple[str, ...]


def plan_mixed(program: ExportedProgram, placements: Mapping[str, str], calls: Mapping[IntKey, Sequence[torch.Tensor]]) -> Mixed:
    """`calls` are example inputs of every key, on the CPU.  Raises the errors of `partition`."""
    parts = partition(program, placements)
    chains, values, landing = {}, {}, {}
    for key, tensors in calls.items():
        given = [_dense(tensor) for tensor in tensors]
        chains[key] = links(program, parts, given)
        values[key] = run(chains[key], parts, given)
        landing[key] = _landing(parts, values[key], given)
    return Mixed(
        parts=parts, chains=chains, values=values, landing=landing, elsewhere=_elsewhere(program, next(iter(chains.values())))
    )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A copy as the static buffer of an input holds it."""
    shape = tuple(tensor.shape)
    return torch.empty_strided(shape, dense_strides(shape, tensor.stride()), dtype=tensor.dtype).copy_(tensor)


def _landing(parts: Partition, values: Mapping[str, torch.Tensor], given: Sequence[torch.Tensor]) -> tuple[Landing, ...]:
    rows: list[Landing] = []
    end = sum(align(tensor_bytes(dtype_name(tensor), tensor.shape)) for tensor in given)
    for name in landings(parts):
        dtype, shape = dtype_name(values[name]), tuple(values[name].shape)
        rows.append((name, end, dtype, shape, dense_strides(shape, values[name].stride())))
        end = align(end + tensor_bytes(dtype, shape))
    return tuple(rows)


def _elsewhere(program: ExportedProgram, chain: Sequence[Link]) -> frozenset[str]:
    """Weights that host regions read and no graph does, tied ones only together."""
    read: dict[str, set[str]] = {"graph": set(), "host": set()}
    for link in chain:
        held = {
            **dict(link.module.named_parameters(remove_duplicate=False)),
            **dict(link.module.named_buffers(remove_duplicate=False)),
        }
        read[link.part.kind] |= held.keys()
    tied: dict[str, set[str]] = {}
    for name, shape in shapes_of(program_tensors(program)).items():
        tied.setdefault(shape.same_as or name, set()).add(name)
    return frozenset(name for names in tied.values() if names & read["host"] and not names & read["graph"] for name in names)


def compile_hosts(mixed: Mixed, weights: Sequence[Weight], scratch: Path, stage: Path, tell: Tell) -> Hosts:
    """Compiles every host region that computes something, for every key, and writes host/<name>.so into `stage`; keys whose region
    has the same code and inputs share one.  `weights`: `weight_rows`.  Raises compiler-failed, constant-unknown, torch-unsupported."""
    made: dict[Any, Region] = {}
    rows: dict[tuple[str, IntKey], Region] = {}
    features: set[str] = set()
    names = [part.name for part in mixed.parts.regions if part.kind == "host" and part.operations]
    for name in names:
        for key, chain in mixed.chains.items():
            (link,) = [link for link in chain if link.part.name == name]
            given = [mixed.values[key][each] for each in link.part.inputs]
            code = "".join(module.code for module in link.module.modules() if isinstance(module, GraphModule))
            like = (name, code, tuple((t.dtype, t.shape, t.stride()) for t in given))
            if like not in made:
                tell(f"compiling {name} for int_key {key}")
                own = name if len(mixed.chains) == 1 else f"{name}-{'x'.join(map(str, key))}"
                made[like], used = _compile(
                    link, own, given, [mixed.values[key][each] for each in link.part.outputs], weights, scratch, stage
                )
                features |= set(used)
            rows[name, key] = made[like]
    return Hosts(rows=rows, features=tuple(sorted(features)))


def _compile(
    link: Link,
    own: str,
    given: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    weights: Sequence[Weight],
    scratch: Path,
    stage: Path,
) -> tuple[Region, tuple[str, ...]]:
    try:
        with torch.no_grad():
            program = torch.export.export(link.module, tuple(given), strict=False)
    except Exception as error:
        raise BuildError(
            "compiler-failed", f"{link.part.name} ({link.part.reason}): torch.export cannot take it alone: {first_line(error)}"
        ) from error
    program = inlined(program)
    work = scratch / own
    work.mkdir()
    compiled = compile_cpu(program, work, lambda text: None)
    file = f"host/{own}.so"
    bound = layouts.bind_constants(compiled.path, program, [replace(row, name=row.name.removeprefix(PREFIX)) for row in weights])
    try:
        strides = layouts.output_strides(bound, given, expected)
    except MachineError as error:
        if error.code != "library-refused":
            raise
        called = ", ".join(sorted({str(node.target) for node in program.graph.nodes if node.op == "call_function"}))
        raise ModelError(
            "operator-without-code",
            f"{link.part.name} ({link.part.reason}): its compiled code cannot run without Python; it calls {called}: {error}",
        ) from error
    finally:
        bound.region.close()
    for found, tensor in zip(strides, expected, strict=True):
        if found != tensor.stride() and tensor.numel() > 1:
            raise BuildError(
                "compiler-failed",
                f"{link.part.name}: the compiled code gives an output the strides {list(found)}, not {list(tensor.stride())}",
            )
    (stage / file).parent.mkdir(exist_ok=True)
    shutil.copyfile(compiled.path, stage / file)
    return Region(name=own, kind="host", reason=link.part.reason, file=file, constants=bound.constants), compiled.features


def weight_rows(tensors: Mapping[str, torch.Tensor], elsewhere: frozenset[str], state: Collection[str] = ()) -> tuple[Weight, ...]:
    """The rows of all weights under the program's names: first those with a place on the GPU, then those without."""
    shapes = shapes_of(tensors)
    placed, _ = lay_out({name: shape for name, shape in shapes.items() if name not in elsewhere}, state)
    rows = [
        Weight(
            name=name, tensor=s.same_as or name, dtype=s.dtype, shape=s.shape, strides=s.strides, memory="weights", offset=HOST_ONLY
        )
        for name, s in shapes.items()
        if name in elsewhere
    ]
    return (*placed, *rows)


def rows_of(
    mixed: Mixed,
    hosts: Hosts,
    graphs: Mapping[IntKey, Mapping[str, tuple[tuple[Value, ...], tuple[Value, ...]]]],
    files: Mapping[tuple[str, IntKey], str],
    arena: Mapping[IntKey, int],
    static: Mapping[IntKey, int],
) -> tuple[tuple[Region, ...], tuple[Program, ...], int]:
    """Regions and programs for the manifest, and the bytes of memory host.

    `graphs`: (inputs, outputs) of every graph region by name, by key; `files` their tables by (name, key).
    """
    graph_rows = [
        Region(name=part.name, kind="graph", reason="", file="", constants=())
        for part in mixed.parts.regions
        if part.kind == "graph"
    ]
    regions = (*graph_rows, *dict.fromkeys(hosts.rows.values()))
    place = {region: index for index, region in enumerate(regions)}
    programs, most = [], 0
    for key, chain in mixed.chains.items():
        numbers = {region.name: place[region] for region in graph_rows}
        numbers |= {name: place[region] for (name, other), region in hosts.rows.items() if other == key}
        values = mixed.values[key]
        lowered = Lowered(
            graphs=graphs[key],
            files={name: file for (name, other), file in files.items() if other == key},
            given=_given(mixed.parts, values),
            landing={
                name: Value(dtype=dtype, shape=shape, strides=strides, memory="inputs", offset=offset)
                for name, offset, dtype, shape, strides in mixed.landing[key]
            },
            hosts={
                link.part.name: tuple([_on_host(values[name]) for name in link.part.outputs])
                for link in chain
                if link.part.kind == "host"
            },
            handed={name: source for link in chain for name, source in link.handed.items()},
            regions=numbers,
        )
        row, used = program_row(key, mixed.parts, lowered, arena[key], static[key])
        programs.append(row)
        most = max(most, used)
    return regions, tuple(programs), most


def _given(parts: Partition, values: Mapping[str, torch.Tensor]) -> tuple[Value, ...]:
    """The call's inputs, one behind the other in memory inputs (`record.tensors.place_inputs`)."""
    rows, end = [], 0
    for name in parts.inputs:
        dtype, shape = dtype_name(values[name]), tuple(values[name].shape)
        strides = dense_strides(shape, values[name].stride())
        rows.append(Value(dtype=dtype, shape=shape, strides=strides, memory="inputs", offset=end))
        end = align(end + tensor_bytes(dtype, shape))
    return tuple(rows)


def _on_host(tensor: torch.Tensor) -> Value:
    shape = tuple(tensor.shape)
    return Value(dtype=dtype_name(tensor), shape=shape, strides=_contiguous(shape), memory="host", offset=0)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return dense_strides(shape, tuple(torch.empty(shape, device="meta").stride()))
