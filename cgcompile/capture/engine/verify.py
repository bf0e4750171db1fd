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

Steps = Sequence[tuple[Callable[[], None], Callable[[], None]]]
"""For every graph, the function that writes its inputs, and its replay."""

Changes = tuple[list[tuple[Place, int]], list[tuple[Place, str]]]
"""For one graph: the chunks that `prepare` writes before the replay, with the offsets of their bytes in the file; and the chunks
that the replay changes, with the SHA-256 of their bytes afterwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """Addresses in this process: of the engine's spans, and, by name, of its tensors in private pools."""

    spans: tuple[int, ...]
    pooled: Mapping[str, int]


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
    regions = _regions(engine, here)
    results = None if returns is None else [_returned(engine, here, returns[key]) for key in graphs]
    spans = [_handle(address, number, engine) for number, address in enumerate(here.spans)]
    steps = [(partial(prepare, key), graph.replay) for key, graph in graphs.items()]
    with scratch_folder() as scratch:
        contents, plan = scratch / "contents", scratch / "plan.json"
        before = _digests(regions)
        _save(regions, before, contents)
        try:
            after, poisoned = _replayed(steps, regions, before, contents, pools=returns is None)
            rows = _graph_changes(steps, regions, _changed(before, after), contents, results)
            unequal = [position for position in _changed(after, _digests(regions)) if returns is None or regions[position].span]
            if unequal:
                names = ", ".join(repr(regions[position].name) for position in unequal[:4])
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
                    _poison(regions)
                graph, place = answer["at"]
                differs += _differing_bytes(steps, regions, results, rows, graph, place, contents)
        except torch.OutOfMemoryError:
            raise BuildError("not-verifiable", "the GPU has too little free memory to compare what the graphs change") from None
        finally:
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


def _regions(engine: Engine, here: Here) -> list[Region]:
    """Returns the engine's spans as regions, then its tensors in private pools; those that overlap form one region."""
    first_tensors = {span_of_tensor(engine, row): row for row in reversed(engine.tensors) if row.memory == "inputs"}
    rows = [
        (first_tensors[number].name, span.offset - first_tensors[number].offset, address, span.bytes, True)
        for number, (span, address) in enumerate(zip(engine.spans, here.spans, strict=True))
    ]
    arena_rows = [row for row in engine.tensors if row.memory == "arena"]
    pooled = sorted((row.offset, row.offset + span_of(row.dtype, row.shape, row.strides), row.name) for row in arena_rows)
    merged: list[tuple[int, int, str]] = []
    for begin, end, name in pooled:
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


def _changed(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Returns {region index: indices of chunks whose digests differ}, without regions that are equal."""
    rows = {position: _differing(one, two) for position, (one, two) in enumerate(zip(before, after, strict=True))}
    return {position: numbers for position, numbers in rows.items() if numbers}


def _replayed(
    steps: Steps, regions: Sequence[Region], before: Sequence[Sequence[int]], contents: Path, *, pools: bool
) -> tuple[list[list[int]], bool]:
    """Replays all graphs from the original contents, then with POISON in the tensors of private pools.  Returns the digests after
    the first replay, and whether the second one leaves the same (without `pools`: in the engine's spans).  If so, the tensors of
    private pools hold POISON on return; all other memory has its original contents."""
    _run(steps)
    after = _digests(regions)
    _put_back(regions, before, contents)
    _poison(regions)
    _run(steps)
    poisoned = not any(pools or regions[position].span for position in _changed(after, _digests(regions)))
    _put_back(regions, before, contents)
    if poisoned:
        _poison(regions)
    return after, poisoned


def _run(steps: Steps) -> None:
    for prepare, replay in steps:
        prepare()
        replay()


def _poison(regions: Sequence[Region]) -> None:
    for region in regions:
        if not region.span:
            device_bytes(region.address, region.size).fill_(POISON)


def _graph_changes(
    steps: Steps,
    regions: Sequence[Region],
    changed: Mapping[int, Sequence[int]],
    contents: Path,
    returned: Sequence[Sequence[Region]] | None,
) -> list[Changes]:
    """Replays every graph, and returns which chunks `prepare` writes before it and which chunks it changes.  It watches the chunks
    `changed` of spans larger than a chunk, and all chunks of other regions, because a later graph may undo a change.  `returned`:
    by graph, the regions of private pools to compare after it; None: all."""
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
            inputs: list[tuple[Place, int]] = []
            for at in _differing(digests_now, ready):
                inputs.append((places[at], file.tell()))
                file.write(memoryview(views[at].cpu().numpy()))
            replay()
            digests_now = digests_of(views)
            differing = _differing(ready, digests_now)
            if returned is not None:
                differing = [at for at in differing if regions[watched[at][0]].span]
            results = [(places[at], _hash(views[at])) for at in differing]
            for region in () if returned is None else returned[step]:
                results += [(region.place(number), _hash(region.memory(number))) for number in range(region.chunks)]
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
