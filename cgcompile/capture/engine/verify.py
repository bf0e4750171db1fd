"""The verification of a staged bundle of an engine's graphs: the engine's own graphs are replayed here, and the bundle's in a fresh
process over the same contents, where the tensors must then hold the same bits.  The engine's tensors are put back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from cgbundle.format.schema import Engine
from cgbundle.format.spans import span_of
from cgbundle.gpu.engine_replay import CHUNK, POISON, Plan
from cgbundle.self_test import run_fresh
from cgbundle.validate.engine import Key

from ...errors import BuildError
from ...targets.cuda.tensors import TensorPlace, device_bytes
from ...util.raw_bytes import raw
from ...util.scratch import scratch_folder
from ..worker.weights import digest

SPARE = 1 << 30
"""Bytes that a fresh process takes on the GPU beside memory of ours: its context and the kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """The memory of this process: address and bytes of every span of the engine, and its tensors in the graphs' own memory."""

    spans: tuple[tuple[int, int], ...]
    pooled: Mapping[str, TensorPlace]


def verify(stage: Path, engine: Engine, arena: int, graphs: Mapping[Key, torch.cuda.CUDAGraph], here: Here) -> None:
    """Raises proof-failed where the fresh process gets other bits, or the engine's own graphs do when they are replayed again;
    not-verifiable where the GPU's free memory does not hold the tensors and the arena again."""
    _check_memory(sum(size for _, size in here.spans) + arena)
    with scratch_folder() as scratch:
        contents, plan = scratch / "contents", scratch / "plan.json"
        with open(contents, "wb") as file:
            for address, size in here.spans:
                for begin in range(0, size, CHUNK):
                    file.write(_part(address + begin, min(CHUNK, size - begin)))
            for place in here.pooled.values():
                file.write(_row_major(place))
        try:
            rows, poisoned = _replayed(graphs, here, contents)
        finally:
            _put_back(here, contents)
        asked = Plan(device=torch.cuda.current_device(), contents=str(contents), graphs=rows, poisoned=poisoned)
        plan.write_text(json.dumps(asked._asdict()))
        torch.cuda.empty_cache()
        answer = run_fresh("cgbundle.gpu.engine_replay", [str(stage), str(plan)], str(stage))
    if "error" in answer:
        raise BuildError("proof-failed", f"the fresh process that replays the graphs: {answer['error']}", answer["hint"])
    if answer["differs"] or answer["torch_imported"]:
        reason = answer["differs"] or "it imported torch: it proves nothing about replays without it"
        raise BuildError("proof-failed", f"the fresh process that replays the graphs: {reason}", "please report the kernels")


def _check_memory(need: int) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < need + SPARE:
        text = f"a replay in a fresh process needs {need + SPARE:,} bytes of the GPU, which has {free:,} free"
        raise BuildError("not-verifiable", text)


def _replayed(
    graphs: Mapping[Key, torch.cuda.CUDAGraph], here: Here, contents: Path
) -> tuple[list[dict[str, dict[str, str]]], bool]:
    """What tensors hold after each graph; and whether those in the graphs' own memory may begin as POISON: they are what graphs
    write, where that changes nothing in the end.  Raises proof-failed where two replays give other bits."""
    first = _run(graphs, here)
    _put_back(here, contents)
    again = _run(graphs, here)
    if first != again:
        differs = next(key for key, one, two in zip(graphs, first, again, strict=True) if one != two)
        text = f"graph {differs!r}: two replays of the engine's own graph from the same contents give other bits"
        raise BuildError("proof-failed", text, "leave out what is not deterministic, or save with verify=False")
    _put_back(here, contents)
    for place in here.pooled.values():
        if span_of(place.dtype, place.shape, place.strides) != raw_bytes(place):
            return first, False
        device_bytes(place.address, raw_bytes(place)).fill_(POISON)
    poisoned = _run(graphs, here)
    return (poisoned, True) if _last(poisoned) == _last(first) else (first, False)


def _run(graphs: Mapping[Key, torch.cuda.CUDAGraph], here: Here) -> list[dict[str, dict[str, str]]]:
    known = [_digest(address, size) for address, size in here.spans]
    rows: list[dict[str, dict[str, str]]] = []
    for graph in graphs.values():
        graph.replay()
        torch.cuda.synchronize()
        spans: dict[str, str] = {}
        for number, (address, size) in enumerate(here.spans):
            now = _digest(address, size)
            if now is None or now != known[number]:
                known[number] = now
                spans[str(number)] = _hash(address, size)
        tensors = {name: hashlib.sha256(_row_major(place)).hexdigest() for name, place in here.pooled.items()}
        rows.append({"spans": spans, "tensors": tensors})
    return rows


def _last(rows: Sequence[Mapping[str, Mapping[str, str]]]) -> dict[str, dict[str, str]]:
    """What tensors hold in the end."""
    last: dict[str, dict[str, str]] = {"spans": {}, "tensors": {}}
    for row in rows:
        last["spans"].update(row["spans"])
        last["tensors"].update(row["tensors"])
    return last


def _put_back(here: Here, contents: Path) -> None:
    with open(contents, "rb") as file:
        for address, size in here.spans:
            for begin in range(0, size, CHUNK):
                _upload(file, address + begin, min(CHUNK, size - begin))
        for place in here.pooled.values():
            flat = torch.frombuffer(bytearray(file.read(raw_bytes(place))), dtype=getattr(torch, place.dtype))
            _strided(place).copy_(flat.view(place.shape))
    torch.cuda.synchronize()


def _upload(file: BinaryIO, address: int, size: int) -> None:
    device_bytes(address, size).copy_(torch.frombuffer(bytearray(file.read(size)), dtype=torch.uint8))


def _part(address: int, size: int) -> memoryview:
    return memoryview(device_bytes(address, size).cpu().numpy())


def _hash(address: int, size: int) -> str:
    sha256 = hashlib.sha256()
    for begin in range(0, size, CHUNK):
        sha256.update(_part(address + begin, min(CHUNK, size - begin)))
    return sha256.hexdigest()


def _digest(address: int, size: int) -> int | None:
    """64 bits of memory's contents, computed on the GPU; None where it lies at no multiple of 8."""
    return int(digest(device_bytes(address, size)).item()) if address % 8 == 0 else None


def raw_bytes(place: TensorPlace) -> int:
    """Bytes of a tensor's elements."""
    return int(torch.Size(place.shape).numel()) * getattr(torch, place.dtype).itemsize


def _strided(place: TensorPlace) -> torch.Tensor:
    """The tensor again, whatever its strides."""
    flat = device_bytes(place.address, span_of(place.dtype, place.shape, place.strides))
    return flat.view(getattr(torch, place.dtype)).as_strided(place.shape, place.strides)


def _row_major(place: TensorPlace) -> memoryview:
    return memoryview(raw(_strided(place)).cpu().numpy())
