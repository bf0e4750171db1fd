"""The verification of an engine's bundle before it is published.

This process replays the engine's own graphs.  Then a fresh process replays the graphs of the bundle over the same memory, which it
opens at other addresses.  The memory must hold the same bits afterwards.  The contents of the engine's tensors are restored.

During the verification only the private pools of the graphs exist twice, so the engine's other tensors may fill the GPU.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cgbundle.format.schema import Engine
from cgbundle.format.spans import span_of
from cgbundle.gpu.engine_replay import POISON, Place, Plan
from cgbundle.self_test import run_fresh
from cgbundle.validate.engine import Key, span_of_tensor

from ...errors import BuildError
from ...targets.cuda.tensors import device_bytes
from ...util.scratch import scratch_folder
from .digests import CHUNK, digests, digests_of

SPARE = 1 << 30
"""Bytes of GPU memory that a fresh process takes for its context and kernels, without the arena."""

PROBE = POISON ^ 0xFF
"""Fills an output to see whether a graph writes it."""

Chunk = tuple["Region", int]
"""A region and the number of one of its chunks."""

Steps = Sequence[tuple[Callable[[], None], Callable[[], None]]]
"""For every graph, the function that writes its inputs, and its replay."""

Changes = tuple[list[tuple[Place, int]], list[tuple[Place, str]]]
"""For one graph: the chunks that `prepare` writes before the replay, with the offsets of their bytes in the file; and the chunks
that the replay changes, with the SHA-256 of their bytes afterwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """Addresses in this process: of the engine's spans, and, by name, of its tensors in private pools.  `pools`: address and bytes
    of all memory of these pools."""

    spans: tuple[int, ...]
    pooled: Mapping[str, int]
    pools: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Memory to compare: `size` bytes at `address`, which is `at` bytes after the start of tensor `name`.  Both are multiples of 8.
    `begin`: offset of these bytes in the file of contents.  `span`: a span of the engine, not part of a private pool."""

    name: str
    at: int
    address: int
    size: int
    begin: int
    span: bool

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-self.size // CHUNK)

    def chunk(self, number: int) -> tuple[int, int]:
        """Returns (offset in the region, bytes) of a chunk."""
        return CHUNK * number, min(CHUNK, self.size - CHUNK * number)

    def place(self, number: int) -> Place:
        """Returns a chunk as (tensor name, offset from the tensor's start, bytes), by which the fresh process finds it."""
        begin, size = self.chunk(number)
        return self.name, self.at + begin, size

    def memory(self, number: int) -> torch.Tensor:
        """Returns a chunk's memory as a uint8 tensor."""
        begin, size = self.chunk(number)
        return device_bytes(self.address + begin, size)


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
    `returns`: of the private pools, only these tensors are compared after a graph; the rest may hold any bits.

    Raises proof-failed if the fresh process gets different bits, and replays-differ if two replays of the engine's own graphs do.
    Raises not-verifiable if no other process can open the engine's memory, or the GPU has no room for a second arena.
    """
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < arena + SPARE:
        text = f"a replay in a fresh process needs {arena + SPARE:,} bytes of the GPU, which has {free:,} free"
        raise BuildError("not-verifiable", text)
    regions = _regions(engine, here, pooled=returns is None)
    pools = _as_regions([("", 0, address, size, False) for address, size in here.pools])
    results = None if returns is None else [_returned(engine, here, returns[key]) for key in graphs]
    spans = [_handle(address, number, engine) for number, address in enumerate(here.spans)]
    steps: Steps = [(partial(prepare, key), graph.replay) for key, graph in graphs.items()]
    with scratch_folder() as scratch:
        contents, pool_contents, plan = scratch / "contents", scratch / "pools", scratch / "plan.json"
        before, pools_before = _digests(regions), _digests(pools)
        _save(regions, before, contents)
        _save(pools, pools_before, pool_contents)
        try:
            undefined = [set[Chunk]() for _ in steps] if results is None else _undefined(steps, results)
            steps, fills = _with_defined_outputs(steps, undefined, engine, contents)
            _put_back(regions, before, contents)
            prepared = _prepared(steps, regions, before)
            _put_back(regions, before, contents)
            first, poisoned = _replayed(steps, regions, pools, before, contents, prepared)
            rows = _graph_changes(steps, regions, _changed(before, first), contents, results, undefined, fills)
            after = _digests(regions)
            if unsteady := _changed(first, after, prepared):
                names = ", ".join(repr(regions[position].name) for position in list(unsteady)[:4])
                text = f"two replays of the engine's own graphs from the same contents leave other bits in {names}"
                raise BuildError("replays-differ", text)
            _put_back(regions, before, contents)
            replay_plan = Plan(
                device=torch.cuda.current_device(),
                spans=spans,
                file=str(contents),
                contents=[] if poisoned else list(_pool_contents(regions)),
                graphs=rows,
            )
            plan.write_text(json.dumps(replay_plan._asdict()))
            torch.cuda.empty_cache()
            answer = run_fresh("cgbundle.gpu.engine_replay", [str(stage), str(plan)], str(stage))
            differs = _fresh_difference(answer) or _differs_here(regions, after)
            if "at" in answer:
                _put_back(regions, before, contents)
                if poisoned:
                    _poison(pools)
                graph, place = answer["at"]
                differs += _differing_bytes(steps, regions, results, rows, graph, place, contents)
        except torch.OutOfMemoryError:
            raise BuildError("not-verifiable", "the GPU has too little free memory to compare what the graphs change") from None
        finally:
            _put_back(pools, pools_before, pool_contents)
            _put_back(regions, before, contents)
    if differs:
        raise BuildError("proof-failed", f"the fresh process that replays the graphs: {differs}", "please report the kernels")


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
    for region, expected, now in zip(regions, after, _digests(regions), strict=True):
        if region.span and now != expected:
            return f"tensor {region.name!r} holds other bits than the engine's own graphs leave in it"
    return ""


def _regions(engine: Engine, here: Here, *, pooled: bool) -> list[Region]:
    """Returns the engine's spans as regions.  With `pooled`, also those in private pools; overlapping ones form one region."""
    first_tensors = {span_of_tensor(engine, row): row for row in reversed(engine.tensors) if row.memory == "inputs"}
    rows = [
        (first_tensors[number].name, span.offset - first_tensors[number].offset, address, span.bytes, True)
        for number, (span, address) in enumerate(zip(engine.spans, here.spans, strict=True))
    ]
    arena_rows = [row for row in engine.tensors if pooled and row.memory == "arena"]
    merged: list[tuple[int, int, str]] = []
    for begin, end, name in sorted(
        (row.offset, row.offset + span_of(row.dtype, row.shape, row.strides), row.name) for row in arena_rows
    ):
        if merged and begin < merged[-1][1]:
            first_begin, last_end, first_name = merged.pop()
            begin, end, name = first_begin, max(end, last_end), first_name
        merged.append((begin, end, name))
    rows += [(name, 0, here.pooled[name], end - begin, False) for begin, end, name in merged]
    return _as_regions(rows)


def _returned(engine: Engine, here: Here, names: Collection[str]) -> list[Region]:
    """Returns the tensors of these names that lie in private pools, one region for a tensor."""
    rows = [row for row in engine.tensors if row.memory == "arena" and row.name in names]
    sizes = [(row.name, span_of(row.dtype, row.shape, row.strides)) for row in rows]
    return _as_regions([(name, 0, here.pooled[name], size, False) for name, size in sizes if size])


def _as_regions(rows: Sequence[tuple[str, int, int, int, bool]]) -> list[Region]:
    """Returns a region for every (name, at, address, size, span), with 8-byte alignment."""
    regions: list[Region] = []
    total = 0
    for name, at, address, size, span in rows:
        misalignment = address % 8  # the bytes around it belong to the same allocation
        size = -(-(size + misalignment) // 8) * 8
        regions.append(Region(name=name, at=at - misalignment, address=address - misalignment, size=size, begin=total, span=span))
        total += size
    return regions


def _handle(address: int, number: int, engine: Engine) -> tuple[str, int, int]:
    """Returns (IPC handle of the span's allocation as hex, offset in it, address).  Raises not-verifiable."""
    from ..worker.driver import allocation, driver, succeeded

    block = allocation(address)
    result = driver.cuIpcGetMemHandle(driver.CUdeviceptr(block[0])) if block is not None else None
    if block is None or result is None or not succeeded(result):
        row = next(row for row in engine.tensors if row.memory == "inputs" and span_of_tensor(engine, row) == number)
        text = f"tensor {row.name!r} lies in memory that no other process can open"
        raise BuildError(
            "not-verifiable", text, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, and tensors of torch's on the GPU"
        )
    return bytes(result[1].reserved).hex(), address - block[0], address


def _save(regions: Sequence[Region], before: Sequence[Sequence[int]], contents: Path) -> None:
    """Writes the regions' contents to a file.  Chunks of zeros (digest 0) become holes in the file."""
    with open(contents, "wb") as file:
        for region, row in zip(regions, before, strict=True):
            for number, digest in enumerate(row):
                if digest:
                    file.seek(region.begin + CHUNK * number)
                    file.write(memoryview(region.memory(number).cpu().numpy()))
        file.truncate(sum(region.size for region in regions))


def _digests(regions: Sequence[Region]) -> list[list[int]]:
    """Returns the digests of every chunk, by region."""
    torch.cuda.synchronize()
    return [digests(region.address, region.size).tolist() for region in regions]


def _changed(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], without: Collection[tuple[int, int]] = ()
) -> dict[int, list[int]]:
    """Returns {region index: indices of chunks whose digests differ}, without regions that are equal.  `without`: (region index,
    index of a chunk) that are left out."""
    rows = {
        position: [number for number in _differing(one, two) if (position, number) not in without]
        for position, (one, two) in enumerate(zip(before, after, strict=True))
    }
    return {position: numbers for position, numbers in rows.items() if numbers}


def _prepared(steps: Steps, regions: Sequence[Region], before: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """Returns (region index, index of a chunk) of what `prepare` writes.  These bytes may differ every time: the unused end of
    FlashAttention 3's schedule is memory that nobody wrote.  The fresh process gets the bytes of one replay."""
    for prepare, _ in steps:
        prepare()
    return {(position, number) for position, numbers in _changed(before, _digests(regions)).items() for number in numbers}


def _replayed(
    steps: Steps,
    regions: Sequence[Region],
    pools: Sequence[Region],
    before: Sequence[Sequence[int]],
    contents: Path,
    prepared: Collection[tuple[int, int]],
) -> tuple[list[list[int]], bool]:
    """Replays all graphs from the original contents, then with POISON in the private pools.  Returns the regions' digests, and
    whether both replays gave the same, except the chunks `prepared`.  If so, the pools hold POISON on return, as in the fresh
    process.  Everything else has its original contents."""
    _run(steps)
    after = _digests(regions)
    _put_back(regions, before, contents)
    _poison(pools)
    _run(steps)
    poisoned = not _changed(after, _digests(regions), prepared)
    _put_back(regions, before, contents)
    if poisoned:
        _poison(pools)
    return after, poisoned


def _undefined(steps: Steps, results: Sequence[Sequence[Region]]) -> list[set[Chunk]]:
    """Returns the chunks that a graph returns and does not write, by graph.  The engine writes them between two graphs, as vLLM's
    attention does.  Until then they hold other graphs' scratch, whose place in a pool differs from process to process."""
    rows: list[set[Chunk]] = []
    for (prepare, replay), regions in zip(steps, results, strict=True):
        chunks = [(region, number) for region in regions for number in range(region.chunks)]
        views = [region.memory(number) for region, number in chunks]
        prepare()
        before = digests_of(views)
        replay()
        changed = set(_differing(before, digests_of(views)))
        unchanged = [at for at in range(len(chunks)) if at not in changed]
        for at in unchanged:
            views[at].fill_(PROBE)
        if unchanged:
            replay()  # writes the same bytes again, or nothing
        rows.append({chunks[at] for at in unchanged if bool((views[at] == PROBE).all())})
    return rows


def _with_defined_outputs(
    steps: Steps, undefined: Sequence[Collection[Chunk]], engine: Engine, contents: Path
) -> tuple[Steps, list[list[tuple[Place, int]]]]:
    """Returns the steps; before its graph, a step also writes the chunks that the previous graph left undefined.  Floats get random
    numbers, other dtypes zeros, because they may be indices.  Also returns these chunks for every step, with the offsets of their
    new bytes in the file."""
    floats = {row.name for row in engine.tensors if row.dtype.startswith(("float", "bfloat"))}
    numbers = torch.randn(CHUNK // 2, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)  # moderate as any float type
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


def _poison(pools: Sequence[Region]) -> None:
    for pool in pools:
        device_bytes(pool.address, pool.size).fill_(POISON)


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
            for at in _differing(digests_now, ready):
                inputs.append((places[at], file.tell()))
                file.write(memoryview(views[at].cpu().numpy()))
            replay()
            digests_now = digests_of(views)
            results = [(places[at], _hash(views[at])) for at in _differing(ready, digests_now)]
            for region in () if returned is None else returned[step]:
                written = [number for number in range(region.chunks) if (region, number) not in undefined[step]]
                results += [(region.place(number), _hash(region.memory(number))) for number in written]
            rows.append((inputs, results))
    return rows


def _differing(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [at for at, (x, y) in enumerate(zip(one, other, strict=True)) if x != y]


def _hash(memory: torch.Tensor) -> str:
    return hashlib.sha256(memoryview(memory.cpu().numpy())).hexdigest()


def _put_back(regions: Sequence[Region], before: Sequence[Sequence[int]], contents: Path) -> None:
    """Restores every chunk whose contents have changed."""
    with open(contents, "rb") as file:
        for position, numbers in _changed(before, _digests(regions)).items():
            region = regions[position]
            for number in numbers:
                begin, size = region.chunk(number)
                file.seek(region.begin + begin)
                region.memory(number).copy_(torch.frombuffer(bytearray(file.read(size)), dtype=torch.uint8))
    torch.cuda.synchronize()


def _pool_contents(regions: Sequence[Region]) -> Iterator[tuple[Place, int]]:
    for region in regions:
        for number in range(0 if region.span else region.chunks):
            yield region.place(number), region.begin + region.chunk(number)[0]
