"""Runs in a recorder process: captures every key and collects the graphs as a Take.  It reads every graph, table and module
variable before any graph runs, because the self-test's replays change them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch.utils._pytree import tree_map_only

from cgbundle.format.schema import IntKey, Weight

from ...errors import ModelError
from ...targets.cuda.elf import Cubin, read_cubin
from ...targets.cuda.tensors import TensorPlace, place_inputs, tensors_of
from ...targets.weights import row_major
from ...transforms.near_ties.judge import Seen, judged
from ...util.progress import Tell
from ...util.raw_bytes import changes, same_bits
from ...util.tolerance import compare, is_float
from ..placement import LARGEST_TABLE
from ..request import Request
from ..take import (
    Range,
    RawGraph,
    RawKernel,
    RawMemcpy,
    RawMemset,
    RawModuleState,
    RawSelfTest,
    RawSetCondition,
    RawValue,
    Take,
    Word,
)
from .address_map import AddressMap
from .cupti import ImageLog
from .driver import check, driver, inspect_pointer, read_device
from .graph_nodes import walk_steps
from .loaded_program import Captured, LoadedProgram, capture, fill_cache, load_program, settle, wake
from .module_state import find_module_state
from .regions import capture_regions, eager_regions, open_regions, replay_regions, warm_up_regions
from .steps import graphs as graphs_of
from .steps import replay

__all__ = ["fill_compile_cache", "load_program", "record", "wake"]


def fill_compile_cache(request: Request, loaded: LoadedProgram, tell: Tell) -> None:
    """Lowers and runs every key of the request, which fills the compile cache for the recorders.  Raises lowering-failed."""
    for key in request.keys:
        if request.placements:
            warm_up_regions(loaded, key, tell)
        else:
            fill_cache(loaded, key, tell)


def record(request: Request, loaded: LoadedProgram, log: ImageLog, tell: Tell) -> Take:
    """Captures every key, reads the graphs, and replays the self-test.  Raises what `capture`, `walk`, `find_module_state` and
    `_examine` do."""
    captured_of = capture_regions if request.placements else lambda *arguments: (capture(*arguments),)
    captured: list[Captured] = []
    for key in request.keys:
        captured += captured_of(loaded, key, tell)
        settle()
    torch.cuda.synchronize()
    tell("reading the graphs")
    addresses = AddressMap(*_memory(loaded, captured), inspect_pointer)
    modules = log.modules()
    images = log.images

    @cache
    def cubin(image: str) -> Cubin:
        return read_cubin(images[image], f"image {image[:12]}")

    def functions_of(image: str) -> frozenset[str]:
        return cubin(image).functions

    graphs: list[RawGraph] = []
    used: dict[str, int] = {}
    for item in captured:
        nodes, edges, graph_images = walk_steps(item.steps, item.key, addresses, modules, functions_of)
        used |= graph_images
        sides = [tuple(_value(t, item, addresses) for t in tensors) for tensors in (item.inputs, item.outputs)]
        graphs.append(RawGraph(key=item.key, region=item.region, nodes=nodes, edges=edges, inputs=sides[0], outputs=sides[1]))
    states = find_module_state(used, {image: cubin(image) for image in used}, addresses)
    ranges = _filled(addresses, graphs, states)
    tell("replaying")
    mutated = loaded.mutated()
    self_tests = [_examine(loaded, key, [item for item in captured if item.key == key]) for key in request.keys]
    mutated = tuple(dict.fromkeys((*mutated, *loaded.mutated())))
    return Take(
        ranges=ranges,
        graphs=tuple(graphs),
        states=states,
        self_tests=tuple(self_tests),
        images={image: images[image] for image in used},
        mutated=mutated,
        arch="sm_{}{}".format(*torch.cuda.get_device_capability()),
        driver=int(check(driver.cuDriverGetVersion())),
    )


def _memory(loaded: LoadedProgram, captured: Sequence[Captured]) -> tuple[list[Range], list[tuple[int, int]]]:
    """Returns the ranges of this process, weights, inputs and state first, and all of torch's segments as (start, bytes)."""
    keys = {tuple(item.pool): item.key for item in captured}
    ranges = [
        Range(kind="weights", start=loaded.weights.data_ptr(), size=loaded.weights.numel()),
        Range(kind="inputs", start=loaded.inputs.data_ptr(), size=loaded.inputs.numel()),
        Range(kind="state", start=loaded.state.data_ptr(), size=loaded.state.numel()),
    ]
    buffer_starts = {memory_range.start for memory_range in ranges}
    segments = torch.cuda.memory_snapshot()
    for segment in segments:
        key = keys.get(tuple(segment["segment_pool_id"]))
        if key is not None:
            ranges.append(Range(kind="pool", start=segment["address"], size=segment["total_size"], key=key))
            continue
        start = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and start not in buffer_starts:
                ranges.append(Range(kind="torch", start=start, size=block["size"]))
            start += block["size"]
    return ranges, [(segment["address"], segment["total_size"]) for segment in segments]


def _value(spot: TensorPlace, item: Captured, addresses: AddressMap) -> RawValue:
    place = Word(at=0, readings=addresses.readings(spot.address, item.key) if 0 not in spot.shape else ())
    return RawValue(dtype=spot.dtype, shape=spot.shape, strides=spot.strides, place=place)


def _filled(addresses: AddressMap, graphs: Sequence[RawGraph], states: Sequence[RawModuleState]) -> tuple[Range, ...]:
    """Returns the ranges.  Those outside the program's memory that a graph or variable refers to have `contents` and `words`."""
    words: list[Word] = [word for state in states for word in state.block.words]
    for graph in graphs:
        words += [value.place for value in (*graph.inputs, *graph.outputs)]
        for node in graph.nodes:
            if isinstance(node, RawKernel):
                words += node.block.words
            elif isinstance(node, RawMemset):
                words.append(node.target)
            elif isinstance(node, RawMemcpy):
                words += (node.source, node.target)
            elif isinstance(node, RawSetCondition):
                words.append(node.byte)
    used = {target.range for word in words for target in word.readings}
    ranges = addresses.fill(used, read_device, LARGEST_TABLE)
    return tuple(replace(r, words=addresses.known_words(r.contents)) if r.contents else r for r in ranges)


AGAIN = 3
"""Further replays of the self-test: one is too few, since a few atomic additions often run in the same order (SchNet, 4 atoms)."""


def _examine(loaded: LoadedProgram, key: IntKey, items: Sequence[Captured]) -> RawSelfTest:
    """Replays the graphs of a key on the self-test's call, from the initial state, and compares with eager PyTorch.  Raises
    random-operation if torch's CUDA generator advanced, and input-mutated if an input not in `Request.written` changed."""
    fresh = loaded.calls[key][1]
    values = tensors_of(fresh)
    opened = open_regions(loaded, key) if loaded.split else None
    examples = tensors_of(loaded.calls[key][0])
    inputs = [static.copy_(value) for static, value in zip(place_inputs(examples, loaded.inputs), values, strict=True)]
    loaded.restore()
    for graph in [graph for item in items for graph in graphs_of(item.steps)]:
        graph.instantiate()
    torch.cuda.synchronize()
    before = torch.cuda.get_rng_state()
    calls = []

    def replayed() -> tuple[torch.Tensor, ...]:
        for static, value in zip(inputs, values, strict=True):
            static.copy_(value)
        return replay_regions(opened, items) if opened else _replay(items[0])

    for _ in range(loaded.request.self_test_calls[key]):
        replay_outputs = replayed()
        calls.append(tuple([torch.empty(0) if is_float(t.dtype) else t.clone() for t in replay_outputs]))
    if not torch.equal(before, torch.cuda.get_rng_state()):
        raise ModelError("random-operation", f"int_key {key}: replaying the graph draws random numbers")
    for i, (static, value) in enumerate(zip(inputs, values, strict=True)):
        if i not in loaded.request.written[key] and row_major(static) != row_major(value):
            raise ModelError("input-mutated", f"int_key {key}: the program changes tensor {i} of its inputs")
    mutated_inputs = [inputs[i] for i in loaded.request.written[key]]
    outputs, mutated = tuple(row_major(t) for t in replay_outputs), tuple(row_major(t) for t in mutated_inputs)
    rows = [row for row in loaded.request.weights if row.memory == "state"]
    state = tuple([(row.name, *_changed(loaded, row)) for row in rows])
    results = [t.clone() for t in (*replay_outputs, *mutated_inputs, *map(loaded.tensor_of, rows))]  # outputs may alias state
    steady = True
    for _ in range(AGAIN):
        loaded.restore()
        outputs_again = [replayed() for _ in calls][-1]
        repeated = (*outputs_again, *mutated_inputs, *map(loaded.tensor_of, rows))
        steady = steady and all(same_bits(one, two) for one, two in zip(results, repeated, strict=True))
    run = partial(_eager, loaded, key, rows)
    eager = run().compared
    differences = tuple([compare(expected.to(actual.device), actual) for actual, expected in zip(results, eager, strict=True)])
    bounds = loaded.request.bounds.get(key, ())
    indices: tuple[tuple[int, int], ...] = ()
    if any(difference.error > bound.bound for difference, bound in zip(differences, bounds, strict=False)):
        del eager
        seen = Seen(calls=(*calls[:-1], tuple(results[: len(replay_outputs)])), compared=tuple(results))
        verdict = judged(run, seen, bounds, loaded.request.floors[key])
        if verdict:
            differences, indices = verdict.differences, verdict.indices
    loaded.restore()
    return RawSelfTest(
        key=key, outputs=outputs, differences=differences, mutated=mutated, state=state, indices=indices, steady=steady
    )


def _changed(loaded: LoadedProgram, row: Weight) -> tuple[bytes, bytes]:
    """Returns the changes of a state buffer since the start, as in ReplayedBytes.  Compares on the GPU: state may be large."""
    first, now = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in (loaded.first[row.name], loaded.tensor_of(row))]
    runs, elements = changes(first, now)
    return row_major(runs), row_major(elements)


def _replay(item: Captured) -> tuple[torch.Tensor, ...]:
    replay(item.steps)
    torch.cuda.synchronize()
    return item.kept


def _eager(loaded: LoadedProgram, key: IntKey, rows: Sequence[Weight]) -> Seen:
    """Runs the self-test's call in eager PyTorch from the initial state.  Returns outputs, mutated inputs, and the state of `rows`,
    on the GPU; outputs of host regions are on the CPU."""
    loaded.restore()
    opened = open_regions(loaded, key) if loaded.split else None
    calls = []
    for _ in range(loaded.request.self_test_calls[key]):
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to(loaded.inputs.device, copy=True), loaded.calls[key][1])
        tensors = tensors_of((args, kwargs))
        with torch.no_grad():
            outputs = list(eager_regions(opened, tensors)) if opened else tensors_of(loaded.modules[key](*args, **kwargs))
        calls.append(tuple([t.clone() for t in outputs]))  # outputs may alias state
    written = [tensors[i] for i in loaded.request.written[key]]
    return Seen(calls=tuple(calls), compared=(*calls[-1], *written, *[loaded.tensor_of(row).clone() for row in rows]))
