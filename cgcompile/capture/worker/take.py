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

from cgbundle.format.schema import IntKey

from ...errors import ModelError
from ...targets.cuda.elf import Cubin, read_cubin
from ...targets.cuda.tensors import Spot, contents, place_inputs, row_major
from ...util.raw_bytes import raw
from ...util.tolerance import largest_error
from ..placement import LARGEST_TABLE
from ..request import Request
from ..rows import Range, RawExam, RawGraph, RawKernel, RawMemcpy, RawMemset, RawState, RawValue, Take, Word
from .addresses import AddressMap
from .chain import capture_chain, open_chain, replay_chain, warm_up_chain
from .cupti import ImageLog
from .driver import check, driver, inspect_pointer, read_device
from .module_state import changed_variables
from .session import Call, Captured, Session, Tell, capture, open_session, warm_up
from .walk import walk


def prime(request: Request, tell: Tell) -> None:
    """Lower and run the keys once, so that the compile cache holds what the recorders need.  Raises lowering-failed."""
    session = open_session(request)
    for key in request.keys:
        if request.placements:
            warm_up_chain(session, key, tell)
        else:
            warm_up(session, key, tell)


def record(request: Request, log: ImageLog, tell: Tell) -> Take:
    """Capture every key and say everything about it.  Raises the refusals of errors.py."""
    session = open_session(request)
    chained = capture_chain if request.placements else lambda *given: (capture(*given),)
    captured = [item for key in request.keys for item in chained(session, key, tell)]
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
        graphs.append(RawGraph(key=item.key, region=item.region, nodes=nodes, edges=edges, inputs=sides[0], outputs=sides[1]))
    states, notes = changed_variables(used, {image: cubin(image) for image in used}, addresses)
    ranges = _filled(addresses, graphs, states)
    tell("replaying")
    mutated = _mutated(session)
    exams = [_examine(session, key, [item for item in captured if item.key == key], mutated) for key in request.keys]
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
        Range(kind="state", start=session.state.data_ptr(), size=session.state.numel()),
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


def _value(spot: Spot, item: Captured, addresses: AddressMap) -> RawValue:
    place = Word(at=0, targets=addresses.readings(spot.address, item.key) if 0 not in spot.shape else ())
    return RawValue(dtype=spot.dtype, shape=spot.shape, strides=spot.strides, place=place)


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
        now = session.tensor_of(row)
        original = session.originals[row.name].to(now.device)
        if not torch.equal(raw(now), raw(original)):
            changed.append(row.name)
            now.copy_(original)
    return tuple(changed)


def _restore(session: Session, names: Sequence[str]) -> None:
    for row in session.request.weights:
        if row.name in names:
            session.tensor_of(row).copy_(session.originals[row.name])


def _examine(session: Session, key: IntKey, items: Sequence[Captured], mutated: Sequence[str]) -> RawExam:
    """Replay the graphs of a key on the fresh call, from the original weights, and compare with eager PyTorch.

    Raises randomness-refused when the replay advanced torch's generator, input-mutated when it changed a static input that the
    program is not known to write to.
    """
    fresh = session.calls[key][1]
    values = [leaf for leaf in tree_leaves(fresh) if isinstance(leaf, torch.Tensor)]
    chain = open_chain(session, key) if session.sides else None
    examples = [leaf for leaf in tree_leaves(session.calls[key][0]) if isinstance(leaf, torch.Tensor)]
    inputs = [static.copy_(value) for static, value in zip(place_inputs(examples, session.inputs), values, strict=True)]
    _restore(session, mutated)
    session.restore_state()
    for item in items:
        item.graph.instantiate()
    torch.cuda.synchronize()
    before = torch.cuda.get_rng_state()
    for call in range(session.request.exam_calls):
        for static, value in zip(inputs, values, strict=True) if call else ():
            static.copy_(value)
        made = replay_chain(session, chain, items) if chain else _replay(items[0])
    if not torch.equal(before, torch.cuda.get_rng_state()):
        raise ModelError("randomness-refused", f"int_key {key}: replaying the graph draws random numbers")
    for i, (static, value) in enumerate(zip(inputs, values, strict=True)):
        if i not in session.request.written and row_major(static) != row_major(value):
            raise ModelError("input-mutated", f"int_key {key}: the program changes tensor {i} of its inputs")
    changed = [inputs[i] for i in session.request.written]
    outputs, written = tuple(row_major(t) for t in made), tuple(row_major(t) for t in changed)
    rows = [row for row in session.request.weights if row.memory == "state"]
    state = tuple([(row.name, contents(session.tensor_of(row), row.strides)) for row in rows])
    kept = [t.clone() for t in (*made, *changed, *map(session.tensor_of, rows))]  # an output may be state itself
    _restore(session, mutated)
    session.restore_state()
    eager = [t.clone() for t in (*_eager(session, fresh), *map(session.tensor_of, rows))]
    error = max((largest_error(want.to(got.device), got) for got, want in zip(kept, eager, strict=True)), default=0.0)
    _restore(session, mutated)
    session.restore_state()
    return RawExam(key=key, outputs=outputs, error=error, written=written, state=state)


def _replay(item: Captured) -> tuple[torch.Tensor, ...]:
    item.graph.replay()
    torch.cuda.synchronize()
    return item.kept


def _eager(session: Session, call: Call) -> list[torch.Tensor]:
    """The outputs of eager PyTorch, and then what the inputs that the program writes to hold: on the GPU, or on the CPU for a
    program of which a part can only be there."""
    device, module = session.inputs.device, session.module
    if session.sides:
        device, module = torch.device("cpu"), session.sides[0].module(check_guards=False)
    for _ in range(session.request.exam_calls):
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to(device, copy=True), call)
        with torch.no_grad():
            made = [t for t in tree_leaves(module(*args, **kwargs)) if isinstance(t, torch.Tensor)]
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return [*made, *[given[i] for i in session.request.written]]


def _versions() -> tuple[tuple[str, str], ...]:
    found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "cuda-bindings": version("cuda-bindings")}
    found["cudnn"] = str(torch.backends.cudnn.version() or "")
    found["triton"] = version("triton")
    return tuple(sorted(found.items()))
