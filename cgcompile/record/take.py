"""Inside a recorder process: everything that one process has to say about its captured graphs, as plain data.

The order is fixed by what replays change: first every graph is walked and every table and module variable read, as they
are before any graph runs; then each graph is replayed on fresh inputs for the exam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from cgcompile.record.addresses import AddressMap
from cgcompile.record.cupti import ImageLog
from cgcompile.record.driver import check, driver, inspect_pointer, read_device
from cgcompile.record.elf import Cubin, read_cubin
from cgcompile.record.errors import InputMutated, RandomnessRefused
from cgcompile.record.memory import LARGEST_TABLE
from cgcompile.record.request import Request
from cgcompile.record.rows import Range, RawExam, RawGraph, RawKernel, RawMemcpy, RawMemset, RawState, RawValue, Take, Word
from cgcompile.record.session import Captured, Session, Tell, capture, open_session, warm_up
from cgcompile.record.state import changed_variables
from cgcompile.record.tensors import dtype_name, row_major, tensor_at
from cgcompile.record.walk import walk
from cgcompile.tolerance import largest_error


def prime(request: Request, tell: Tell) -> None:
    """Lower and run the keys once, so that the compile cache holds what the recorders need.  Raises LoweringFailed."""
    session = open_session(request)
    for key in request.keys:
        warm_up(session, key, tell)


def record(request: Request, log: ImageLog, tell: Tell) -> Take:
    """Capture every key and say everything about it.  Raises the refusals of errors.py."""
    session = open_session(request)
    captured = [capture(session, key, tell) for key in request.keys]
    torch.cuda.synchronize()
    tell("reading the graphs")
    addresses = AddressMap(*_memory(session, captured), inspect_pointer)
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
        nodes, edges, theirs = walk(item.graph.raw_cuda_graph(), item.key, addresses, modules, functions_of)
        used |= theirs
        sides = [tuple(_value(t, item, addresses) for t in tensors) for tensors in (item.inputs, item.outputs)]
        graphs.append(RawGraph(key=item.key, nodes=nodes, edges=edges, inputs=sides[0], outputs=sides[1]))
    states, notes = changed_variables(used, {image: cubin(image) for image in used}, addresses)
    ranges = _filled(addresses, graphs, states)
    tell("replaying")
    mutated = _mutated(session)
    exams = [_examine(session, item, mutated) for item in captured]
    mutated = tuple(dict.fromkeys((*mutated, *_mutated(session))))
    return Take(
        ranges=ranges,
        graphs=tuple(graphs),
        states=states,
        exams=tuple(exams),
        images={image: images[image] for image in used},
        mutated=mutated,
        versions=_versions(),
        machine=torch.cuda.get_device_name(),
        arch="sm_{}{}".format(*torch.cuda.get_device_capability()),
        driver=int(check(driver.cuDriverGetVersion())),
        notes=notes,
    )


def _memory(session: Session, captured: Sequence[Captured]) -> tuple[list[Range], list[tuple[int, int]]]:
    """The known ranges, weights and inputs first, and all segments that torch holds, as (start, bytes)."""
    keys = {tuple(item.graph.pool()): item.key for item in captured}
    ranges = [
        Range(kind="weights", start=session.weights.data_ptr(), size=session.weights.numel()),
        Range(kind="inputs", start=session.inputs.data_ptr(), size=session.inputs.numel()),
    ]
    ours = {piece.start for piece in ranges}
    segments = torch.cuda.memory_snapshot()
    for segment in segments:
        key = keys.get(tuple(segment["segment_pool_id"]))
        if key is not None:
            ranges.append(Range(kind="pool", start=segment["address"], size=segment["total_size"], key=key))
            continue
        start = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and start not in ours:
                ranges.append(Range(kind="torch", start=start, size=block["size"]))
            start += block["size"]
    return ranges, [(segment["address"], segment["total_size"]) for segment in segments]


def _value(tensor: torch.Tensor, item: Captured, addresses: AddressMap) -> RawValue:
    place = Word(at=0, targets=addresses.readings(tensor.data_ptr(), item.key) if tensor.numel() else ())
    return RawValue(dtype=dtype_name(tensor), shape=tuple(tensor.shape), strides=tensor.stride(), place=place)


def _filled(addresses: AddressMap, graphs: Sequence[RawGraph], states: Sequence[RawState]) -> tuple[Range, ...]:
    """The ranges, with contents and the addresses in them where a graph or a variable refers to one outside the
    program's memory."""
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
    used = {target.range for word in words for target in word.targets}
    ranges = addresses.fill(used, read_device, LARGEST_TABLE)
    return tuple(replace(r, words=addresses.known_words(r.contents)) if r.contents else r for r in ranges)


def _mutated(session: Session) -> tuple[str, ...]:
    """Names of the weights that no longer hold their original bytes; they are put back."""
    changed = []
    for row in session.request.weights:
        if row.tensor != row.name:
            continue
        now = tensor_at(session.weights, row.offset, row.dtype, row.shape, row.strides)
        original = session.originals[row.name].to(now.device)
        if not torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (now, original))):
            changed.append(row.name)
            now.copy_(original)
    return tuple(changed)


def _restore(session: Session, names: Sequence[str]) -> None:
    for row in session.request.weights:
        if row.name in names:
            tensor_at(session.weights, row.offset, row.dtype, row.shape, row.strides).copy_(session.originals[row.name])


def _examine(session: Session, item: Captured, mutated: Sequence[str]) -> RawExam:
    """Replay a graph on the fresh call, from the original weights, and compare with eager PyTorch.

    Raises RandomnessRefused when the replay advanced torch's generator, InputMutated when it changed a static input.
    """
    fresh = session.calls[item.key][1]
    values = [leaf for leaf in tree_leaves(fresh) if isinstance(leaf, torch.Tensor)]
    for static, value in zip(item.inputs, values, strict=True):
        static.copy_(value)
    _restore(session, mutated)
    item.graph.instantiate()
    torch.cuda.synchronize()
    before = torch.cuda.get_rng_state()
    item.graph.replay()
    torch.cuda.synchronize()
    if not torch.equal(before, torch.cuda.get_rng_state()):
        raise RandomnessRefused(f"int_key {item.key}: replaying the graph draws random numbers")
    for i, (static, value) in enumerate(zip(item.inputs, values, strict=True)):
        if row_major(static) != row_major(value):
            raise InputMutated(f"int_key {item.key}: the program changes tensor {i} of its inputs")
    outputs = tuple(row_major(t) for t in item.outputs)
    _restore(session, mutated)
    args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to("cuda", copy=True), fresh)
    with torch.no_grad():
        eager = [t for t in tree_leaves(session.module(*args, **kwargs)) if isinstance(t, torch.Tensor)]
    error = max((largest_error(want, got) for got, want in zip(item.outputs, eager, strict=True)), default=0.0)
    _restore(session, mutated)
    return RawExam(key=item.key, outputs=outputs, error=error)


def _versions() -> tuple[tuple[str, str], ...]:
    found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "cuda-bindings": version("cuda-bindings")}
    found["cudnn"] = str(torch.backends.cudnn.version() or "")
    found["triton"] = version("triton")
    return tuple(sorted(found.items()))
