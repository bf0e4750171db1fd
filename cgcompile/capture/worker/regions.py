"""Runs in a recorder process: captures and replays a program of several regions, for one key.  Graph regions share one private
pool, so that torch's allocator plans their arena; a value that a later region reads keeps its memory.  Host regions, which are
compiled code in the bundle, run here in eager PyTorch on the CPU.  The inputs of a region hold the values that eager PyTorch
computes, because kernels may use them as indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cgbundle.format.schema import IntKey

from ...export.weights import weight_placeholders
from ...partition.blocks import has_conditionals
from ...partition.isolated import RegionModule, isolated_regions
from ...partition.split import Partition, partition
from ...targets.cuda.lowering import lower, repair
from ...targets.cuda.tensors import TensorPlace, place_inputs, tensor_at, tensor_place, tensors_of
from ...targets.memory_layout import dense_strides
from ...util.progress import Tell
from .loaded_program import Captured, LoadedProgram, capture_call, capture_conditionals, lower_conditionals, run_warm
from .steps import replay as replay_steps

Values = dict[str, torch.Tensor]
RunGraph = Callable[[RegionModule, list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedRegions:
    """The regions of a key: graphs on the GPU, host regions on the CPU.  `static`: the call's inputs.  `uploads`: by name, GPU
    tensors for the results of host regions.  `state`: the buffers in memory `state`, by the names of their placeholders."""

    partition: Partition
    regions: tuple[RegionModule, ...]
    static: tuple[torch.Tensor, ...]
    uploads: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]

    def written(self, region: RegionModule) -> list[torch.Tensor]:
        """Returns the call's inputs and state buffers that a region writes to."""
        tensors = {**dict(zip(self.partition.inputs, self.static, strict=True)), **self.state}
        return [tensors[name] for name in region.planned.written]


def open_regions(loaded: LoadedProgram, key: IntKey) -> OpenedRegions:
    """Splits the program of a key into regions that use the placed weights and inputs."""
    program = loaded.split[key]
    planned = partition(program, loaded.request.placements[key])
    static = tuple(place_inputs(tensors_of(loaded.calls[key][0]), loaded.inputs))
    regions = isolated_regions(program, planned, static)
    for region in regions:
        if region.planned.kind == "graph":
            repair(region.module)
    uploads = {
        upload.name: tensor_at(loaded.inputs, upload.offset, upload.dtype, upload.shape, upload.strides)
        for upload in loaded.request.uploads[key]
    }
    rows = {row.name: row for row in loaded.request.weights if row.memory == "state"}
    state = {name: loaded.tensor_of(rows[target]) for name, target in weight_placeholders(program).items() if target in rows}
    return OpenedRegions(partition=planned, regions=regions, static=static, uploads=uploads, state=state)


def warm_up_regions(loaded: LoadedProgram, key: IntKey, tell: Tell) -> None:
    """Lowers and runs the graph regions of a key, which fills the compile cache, and resets state.  Raises lowering-failed."""
    opened = open_regions(loaded, key)

    def run(region: RegionModule, region_inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if has_conditionals(region.module):
            tell(f"lowering {key}, {region.planned.name}")
            return lower_conditionals(loaded, region.module, region_inputs, f"int_key {key}, {region.planned.name}")[1]
        call = _lowered(loaded, key, region, region_inputs, opened.written(region), tell)
        with torch.no_grad():
            return tuple(call())

    _run_all(opened, run)
    loaded.restore()


def capture_regions(loaded: LoadedProgram, key: IntKey, tell: Tell) -> tuple[Captured, ...]:
    """Captures the graph regions of a key, in order, and resets state.  Raises lowering-failed, not-capturable."""
    opened = open_regions(loaded, key)
    last_use = {name: position for position, region in enumerate(opened.regions) for name in region.planned.inputs}
    values: Values = {}
    captured: list[Captured] = []

    def capture(region: RegionModule, region_inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        where, pool = f"int_key {key}, {region.planned.name}", captured[0].pool if captured else None
        if has_conditionals(region.module):
            tell(f"lowering and capturing {key}, {region.planned.name}")
            steps, graph_outputs, pool = capture_conditionals(loaded, region.module, region_inputs, where, pool)
        else:
            call = _lowered(loaded, key, region, region_inputs, opened.written(region), tell)
            tell(f"capturing {key}, {region.planned.name}")
            graph, result = capture_call(call, where, pool)
            steps, graph_outputs, pool = (graph,), list(result), graph.pool()
            with torch.no_grad():
                for target, value in zip(graph_outputs, region.module(*region_inputs), strict=True):
                    target.copy_(value)
        kept = tuple([t for name, t in zip(region.planned.outputs, graph_outputs, strict=True) if name in opened.partition.outputs])
        spots = tuple(map(tensor_place, region_inputs)), tuple(map(tensor_place, graph_outputs))
        captured.append(
            Captured(key=key, region=len(captured), steps=steps, pool=pool, inputs=spots[0], outputs=spots[1], kept=kept)
        )
        return graph_outputs

    def forget(done: int) -> None:
        for name in [name for name, position in last_use.items() if position == done and name not in opened.partition.outputs]:
            values.pop(name, None)

    _run_all(opened, capture, values, forget)
    loaded.restore()
    return tuple(captured)


def replay_regions(opened: OpenedRegions, captured: Sequence[Captured]) -> tuple[torch.Tensor, ...]:
    """Replays the instantiated graphs of a key, and runs the host regions between them.  Returns the outputs of the call."""
    graphs = iter(captured)
    call_outputs: Values = {}

    def replay(region: RegionModule, region_inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        item = next(graphs)
        replay_steps(item.steps)
        torch.cuda.synchronize()
        names = [name for name in region.planned.outputs if name in opened.partition.outputs]
        call_outputs.update(zip(names, item.kept, strict=True))
        return [
            call_outputs[name] if name in call_outputs else _host_view(spot)
            for name, spot in zip(region.planned.outputs, item.outputs, strict=True)
        ]

    values = _run_all(opened, replay)
    return tuple([values[name] for name in opened.partition.outputs])


def eager_regions(opened: OpenedRegions, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Runs all regions in eager PyTorch on `inputs`: graph regions on the GPU, host regions on the CPU.  Returns the outputs."""

    def run(region: RegionModule, region_inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            region_outputs: Sequence[torch.Tensor] = region.module(*[tensor.cuda() for tensor in region_inputs])
        return region_outputs

    values = _run_all(replace(opened, static=tuple(inputs), uploads={}), run)
    return tuple([values[name] for name in opened.partition.outputs])


def _host_view(spot: TensorPlace) -> torch.Tensor:
    """Returns a graph's output for a host region.  Host regions read only dense tensors; other outputs become an empty tensor."""
    dense = spot.strides == dense_strides(spot.shape, spot.strides)
    return spot.tensor() if dense else torch.empty(0, device="cuda")


def _run_all(
    opened: OpenedRegions, run_graph: RunGraph, values: Values | None = None, forget: Callable[[int], None] = lambda done: None
) -> Values:
    """Runs all regions in order, graphs with `run_graph`.  After each region, calls `forget` with its position.  Returns values by
    name."""
    values = {} if values is None else values
    values.update(zip(opened.partition.inputs, opened.static, strict=True))
    values.update({name: opened.state[name] for name in opened.partition.state})
    for position, region in enumerate(opened.regions):
        region_inputs = [values[name] for name in region.planned.inputs]
        if region.planned.kind == "graph":
            values.update(zip(region.planned.outputs, run_graph(region, region_inputs), strict=True))
        else:
            with torch.no_grad():
                region_outputs = region.module(*[tensor.cpu() for tensor in region_inputs])
            count = len(region.planned.outputs)
            for target, tensor in zip(opened.written(region), region_outputs[count:], strict=True):
                target.copy_(tensor)
            for name, tensor in zip(region.planned.outputs, region_outputs[:count], strict=True):
                if name in opened.uploads:
                    opened.uploads[name].copy_(tensor)
                values[name] = opened.uploads.get(name, tensor)
        del region_inputs
        forget(position)
    return values


def _lowered(
    loaded: LoadedProgram,
    key: IntKey,
    region: RegionModule,
    region_inputs: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
    tell: Tell,
) -> Callable[[], Any]:
    """Lowers and warms up a region, and returns a function that calls it.  The tensors `written` are reset after every run."""
    tell(f"lowering {key}, {region.planned.name}")
    lowered = lower(region.module, loaded.request.level, loaded.request.specialize)

    def call() -> Any:
        return lowered(*region_inputs)

    before = [tensor.clone() for tensor in written]

    def restore() -> None:
        for tensor, value in zip(written, before, strict=True):
            tensor.copy_(value)

    level = loaded.request.level
    run_warm(call, f"int_key {key}, {region.planned.name}, {level}", level, restore)
    return call
