"""The verification of an engine's bundle before it is published.

This process replays the engine's own graphs.  Then a fresh process replays the graphs of the bundle over the same memory, which it
opens at other addresses.  The memory must hold the same bits afterwards.  The contents of the engine's tensors are restored.

During the verification only the private pools of the graphs exist twice, so the engine's other tensors may fill the GPU.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cgbundle.format.schema import Engine
from cgbundle.gpu.engine_replay import POISON, Place, Plan
from cgbundle.self_test import run_fresh
from cgbundle.validate.engine import Key

from ...errors import BuildError
from ...targets.cuda.tensors import device_bytes
from ...util.scratch import scratch_folder
from .digests import CHUNK, digests_of
from .regions import (
    Chunk,
    Here,
    Region,
    as_regions,
    changed_chunks,
    compared_regions,
    differing_positions,
    poison,
    pool_contents,
    put_back,
    region_digests,
    returned_regions,
    save_contents,
    span_handle,
)

SPARE = 1 << 30
"""Bytes of GPU memory that a fresh process takes for its context and kernels, without the arena."""

PROBE = POISON ^ 0xFF
"""Fills an output to see whether a graph writes it."""

Steps = Sequence[tuple[Callable[[], None], Callable[[], None]]]
"""For every graph, the function that writes its inputs, and its replay."""

Changes = tuple[list[tuple[Place, int]], list[tuple[Place, str]]]
"""For one graph: the chunks that `prepare` writes before the replay, with the offsets of their bytes in the file; and the chunks
that the replay changes, with the SHA-256 of their bytes afterwards."""


def verify(
    stage: Path,
    engine: Engine,
    arena: int,
    graphs: Mapping[Key, torch.cuda.CUDAGraph],
    here: Here,
    prepare: Callable[[Key], None],
    returns: Mapping[Key, Collection[str]] | None = None,
) -> None:
    """Compares replays of the engine's graphs with a replay of the bundle in a fresh process.  `prepare` writes a graph's inputs.
    `returns`: of the private pools, only these tensors are compared after a graph; all other memory of the pools may hold any bits.

    Raises proof-failed if the fresh process gets different bits, and replays-differ if two replays of the engine's own graphs do.
    Raises not-verifiable if no other process can open the engine's memory, or the GPU has no room for a second arena.
    """
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < arena + SPARE:
        text = f"a replay in a fresh process needs {arena + SPARE:,} bytes of the GPU, which has {free:,} free"
        raise BuildError("not-verifiable", text)
    regions = compared_regions(engine, here, pooled=returns is None)
    pools = as_regions([("", 0, address, size, False) for address, size in here.pools])
    results = None if returns is None else [returned_regions(engine, here, returns[key]) for key in graphs]
    spans = [span_handle(address, number, engine) for number, address in enumerate(here.spans)]
    floats = {row.name for row in engine.tensors if row.dtype.startswith(("float", "bfloat"))}
    steps: Steps = [(partial(prepare, key), graph.replay) for key, graph in graphs.items()]
    with scratch_folder() as scratch:
        contents, kept_pools, plan = scratch / "contents", scratch / "pools", scratch / "plan.json"
        before, pools_before = region_digests(regions), region_digests(pools)
        save_contents(regions, before, contents)
        save_contents(pools, pools_before, kept_pools)
        try:
            undefined = [set[Chunk]() for _ in steps] if results is None else _undefined(steps, results, floats)
            steps, fills = _with_defined_outputs(steps, undefined, floats, contents)
            put_back(regions, before, contents)
            prepared = _prepared(steps, regions, before)
            put_back(regions, before, contents)
            first, poisoned = _replayed(steps, regions, pools, before, contents, prepared)
            rows = _graph_changes(steps, regions, changed_chunks(before, first), contents, results, undefined, fills)
            after = region_digests(regions)
            if unsteady := changed_chunks(first, after, prepared):
                names = ", ".join(repr(regions[position].name) for position in list(unsteady)[:4])
                text = f"two replays of the engine's own graphs from the same contents leave other bits in {names}"
                raise BuildError("replays-differ", text)
            put_back(regions, before, contents)
            replay_plan = Plan(
                device=torch.cuda.current_device(),
                spans=spans,
                file=str(contents),
                contents=[] if poisoned else list(pool_contents(regions)),
                graphs=rows,
            )
            plan.write_text(json.dumps(replay_plan._asdict()))
            torch.cuda.empty_cache()
            answer = run_fresh("cgbundle.gpu.engine_replay", [str(stage), str(plan)], str(stage))
            differs = _fresh_difference(answer) or _differs_here(regions, after)
            if "at" in answer:
                put_back(regions, before, contents)
                if poisoned:
                    poison(pools)
                graph, place = answer["at"]
                differs += _differing_bytes(steps, regions, results, rows, graph, place, contents)
        except torch.OutOfMemoryError:
            raise BuildError("not-verifiable", "the GPU has too little free memory to compare what the graphs change") from None
        finally:
            put_back(pools, pools_before, kept_pools)
            put_back(regions, before, contents)
    if differs:
        text = f"the fresh process that replays the graphs: {differs}"
        raise BuildError("proof-failed", text, "report the model and the kernels named above")


def _fresh_difference(answer: Mapping[str, Any]) -> str:
    """Returns the difference that the fresh process found, or "".  Raises proof-failed if it failed."""
    if "error" in answer:
        raise BuildError("proof-failed", f"the fresh process that replays the graphs: {answer['error']}", answer["hint"])
    if answer["torch_imported"]:
        return "it imported torch: it proves nothing about replays without it"
    return str(answer["differs"])


def _differing_bytes(
    steps: Steps,
    regions: Sequence[Region],
    results: Sequence[Sequence[Region]] | None,
    rows: Sequence[Changes],
    graph: int,
    place: int,
    contents: Path,
) -> str:
    """Replays the engine's graphs up to the one that differs.  Returns a text with the number of different bytes.  Raises
    replays-differ if the engine's graph leaves other bits than in its first replay."""
    starts = {region.name: region.address - region.at for region in (*regions, *(results[graph] if results else ()))}
    (name, at, size), digest = rows[graph][1][place]
    _run(steps[: graph + 1])
    torch.cuda.synchronize()
    expected = device_bytes(starts[name] + at, size).cpu()
    if _hash(expected) != digest:
        text = f"two replays of the engine's own graph {graph + 1} of {len(steps)} leave other bits in {name!r}"
        raise BuildError("replays-differ", text)
    seen = torch.frombuffer(bytearray(contents.with_name(f"{contents.name}.differs").read_bytes()), dtype=torch.uint8)
    differing = (expected != seen).nonzero()
    return f": {len(differing):,} of {size:,} bytes, the first {at + int(differing[0]):,} bytes behind the tensor's start"


def _differs_here(regions: Sequence[Region], after: Sequence[Sequence[int]]) -> str:
    """Returns a text if the fresh process left other bits in the engine's spans than the engine's own graphs did, else ""."""
    for region, expected, now in zip(regions, after, region_digests(regions), strict=True):
        if region.span and now != expected:
            return f"tensor {region.name!r} holds other bits than the engine's own graphs leave in it"
    return ""


def _prepared(steps: Steps, regions: Sequence[Region], before: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """Returns (region index, index of a chunk) of what `prepare` writes.  These bytes may differ every time: the unused end of
    FlashAttention 3's schedule is memory that nobody wrote.  The fresh process gets the bytes of one replay."""
    for prepare, _ in steps:
        prepare()
    return {
        (position, number) for position, numbers in changed_chunks(before, region_digests(regions)).items() for number in numbers
    }


def _replayed(
    steps: Steps,
    regions: Sequence[Region],
    pools: Sequence[Region],
    before: Sequence[Sequence[int]],
    contents: Path,
    prepared: Collection[tuple[int, int]],
) -> tuple[list[list[int]], bool]:
    """Replays all graphs from the original contents, then with POISON in the private pools.  Returns the regions' digests, and
    whether both replays gave the same bits, except in the chunks `prepared`.  If so, the pools hold POISON on return, as in the
    fresh process.  All other memory has its original contents."""
    _run(steps)
    after = region_digests(regions)
    put_back(regions, before, contents)
    poison(pools)
    _run(steps)
    poisoned = not changed_chunks(after, region_digests(regions), prepared)
    put_back(regions, before, contents)
    if poisoned:
        poison(pools)
    return after, poisoned


def _undefined(steps: Steps, results: Sequence[Sequence[Region]], floats: Collection[str]) -> list[set[Chunk]]:
    """Returns the chunks that a graph returns and does not write, by graph.  The engine writes them between two graphs, as vLLM's
    attention does.  Until then they hold other graphs' scratch, whose place in a pool differs from process to process.

    A chunk that a replay does not change is filled with other bytes; if the next replay does not write it, the graph does not.
    Dtypes other than `floats` get zeros, because they may be indices.
    """
    rows: list[set[Chunk]] = []
    for (prepare, replay), regions in zip(steps, results, strict=True):
        chunks = [(region, number) for region in regions for number in range(region.chunks)]
        views = [region.memory(number) for region, number in chunks]
        prepare()
        before = digests_of(views)
        replay()
        changed = set(differing_positions(before, digests_of(views)))
        fills = {at: PROBE * (region.name in floats) for at, (region, _) in enumerate(chunks) if at not in changed}
        fills = {at: fill for at, fill in fills.items() if not bool((views[at] == fill).all())}
        for at, fill in fills.items():
            views[at].fill_(fill)
        if fills:
            replay()
        rows.append({chunks[at] for at, fill in fills.items() if bool((views[at] == fill).all())})
    return rows


def _with_defined_outputs(
    steps: Steps, undefined: Sequence[Collection[Chunk]], floats: Collection[str], contents: Path
) -> tuple[Steps, list[list[tuple[Place, int]]]]:
    """Returns the steps, which also write the chunks that the previous graph left undefined: random numbers for floats, zeros for
    other dtypes.  Also returns these chunks for every step, with the offsets of their new bytes in the file."""
    numbers = torch.randn(CHUNK // 2, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)  # moderate in all float types
    values = (torch.zeros(CHUNK, dtype=torch.uint8), numbers.view(torch.uint8))
    with open(contents, "ab") as file:
        begin = file.tell()
        for value in values:
            file.write(memoryview(value.numpy()))

    def write(prepare: Callable[[], None], chunks: Collection[Chunk]) -> None:
        for region, number in chunks:
            memory = region.memory(number)
            memory.copy_(values[region.name in floats][: len(memory)])
        prepare()

    previous: list[Collection[Chunk]] = [(), *undefined[:-1]]
    fills = [[(region.place(number), begin + CHUNK * (region.name in floats)) for region, number in chunks] for chunks in previous]
    return [(partial(write, prepare, chunks), replay) for (prepare, replay), chunks in zip(steps, previous, strict=True)], fills


def _run(steps: Steps) -> None:
    for prepare, replay in steps:
        prepare()
        replay()


def _graph_changes(
    steps: Steps,
    regions: Sequence[Region],
    changed: Mapping[int, Sequence[int]],
    contents: Path,
    returned: Sequence[Sequence[Region]] | None,
    undefined: Sequence[Collection[Chunk]],
    fills: Sequence[Sequence[tuple[Place, int]]],
) -> list[Changes]:
    """Replays every graph, and returns which chunks are written before it, `fills` among them, and which chunks it changes.  It
    watches the chunks `changed` of spans larger than a chunk, and all chunks of other regions, because a later graph may undo a
    change.  `returned`: further regions that are compared after each graph, except the chunks `undefined`; None: there are none."""
    watched = [
        (position, number)
        for position, region in enumerate(regions)
        for number in (changed.get(position, ()) if region.span and region.size > CHUNK else range(region.chunks))
    ]
    views = [regions[position].memory(number) for position, number in watched]
    places = [regions[position].place(number) for position, number in watched]
    digests_now = digests_of(views)
    rows: list[Changes] = []
    with open(contents, "ab") as file:
        for step, (prepare, replay) in enumerate(steps):
            prepare()
            ready = digests_of(views)
            inputs = list(fills[step])
            for at in differing_positions(digests_now, ready):
                inputs.append((places[at], file.tell()))
                file.write(memoryview(views[at].cpu().numpy()))
            replay()
            digests_now = digests_of(views)
            results = [(places[at], _hash(views[at])) for at in differing_positions(ready, digests_now)]
            for region in () if returned is None else returned[step]:
                written = [number for number in range(region.chunks) if (region, number) not in undefined[step]]
                results += [(region.place(number), _hash(region.memory(number))) for number in written]
            rows.append((inputs, results))
    return rows


def _hash(memory: torch.Tensor) -> str:
    return hashlib.sha256(memoryview(memory.cpu().numpy())).hexdigest()
