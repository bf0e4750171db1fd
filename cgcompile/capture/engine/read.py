"""Reads the captured graphs of an engine in this process into an EngineTake.  It runs no graph and changes no tensor.

It uses public torch interfaces, available since 2.9: `CUDAGraph(keep_graph=True)`, `raw_cuda_graph`, `pool`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from cgbundle.format import limits
from cgbundle.validate.engine import Key, is_key

from ...errors import BuildError
from ...targets.cuda.elf import Cubin, read_cubin
from ...util.version import VERSION
from ..placement import LARGEST_TABLE
from ..take import Range, RawGraph, RawModuleState, RawValue, Take, Word
from ..worker.address_map import AddressMap
from .engine_take import EngineTake, process_name
from .memory import engine_memory, pointer_words

if TYPE_CHECKING:
    from ..worker.image_log import EngineImageLog


def read_engine(log: EngineImageLog, graphs: Mapping[Key, torch.cuda.CUDAGraph], tensors: Mapping[str, torch.Tensor]) -> EngineTake:
    """Reads the graphs and tensors of this process.  Raises graph-refused, tensor-refused, dtype-unsupported, and what `walk`,
    `EngineImageLog.modules` and `find_module_state` do."""
    from ..worker.driver import check, driver, inspect_pointer, read_device
    from ..worker.graph_nodes import walk
    from ..worker.module_state import find_module_state

    raw = {key: _raw_graph(key, graph) for key, graph in _checked(graphs).items()}
    torch.cuda.synchronize()
    memory = engine_memory(tensors, [graph.pool() for graph in graphs.values()])
    addresses = AddressMap(memory.ranges, memory.segments, inspect_pointer)
    modules, images = log.modules(), log.images

    @cache
    def cubin(image: str) -> Cubin:
        return read_cubin(images[image], f"image {image[:12]}")

    read: list[RawGraph] = []
    used: dict[str, int] = {}
    pooled = [
        RawValue(
            dtype=place.dtype, shape=place.shape, strides=place.strides,
            place=Word(at=0, readings=addresses.readings(place.address, None)),
        )
        for place in memory.pooled.values()
    ]  # fmt: skip
    for position, (key, handle) in enumerate(raw.items()):
        name = f"graph {key!r}"
        nodes, edges, graph_images = walk(handle, (), addresses, modules, lambda image: cubin(image).functions, name, log.lines)
        used |= graph_images
        outputs = () if position else tuple(pooled)
        read.append(RawGraph(key=(position,), nodes=nodes, edges=edges, inputs=(), outputs=outputs, name=name))
    states = find_module_state(used, {image: cubin(image) for image in used}, addresses)
    scanned = [number for number, memory_range in enumerate(memory.ranges) if memory_range.kind in ("inputs", "pool")]
    pointers = pointer_words(addresses, scanned, memory.segments)
    take = Take(
        ranges=_with_tables(addresses, states, read_device),
        graphs=tuple(read),
        states=states,
        self_tests=(),
        images={image: images[image] for image in used},
        mutated=(),
        arch="sm_{}{}".format(*torch.cuda.get_device_capability()),
        driver=int(check(driver.cuDriverGetVersion())),
    )
    return EngineTake(
        take=take,
        keys=tuple(raw),
        tensors=memory.tensors,
        pooled=tuple(memory.pooled),
        pointers=pointers,
        versions=(("cgcompile", VERSION), ("torch", str(torch.__version__)), ("gpu", torch.cuda.get_device_name())),
        process=process_name(),
    )


def _checked(graphs_by_key: Mapping[Key, Any]) -> Mapping[Key, torch.cuda.CUDAGraph]:
    if not graphs_by_key:
        raise BuildError("graph-refused", "save_graphs: no graph was given")
    for key, graph in graphs_by_key.items():
        if not is_key(key):
            raise BuildError("graph-refused", f"graph {key!r}: a key is a whole number, a text, or a tuple of these")
        if len(repr(key)) > limits.NAME:
            raise BuildError("graph-refused", f"graph {repr(key)[:40]}...: the key is longer than {limits.NAME} characters")
        if not isinstance(graph, torch.cuda.CUDAGraph):
            raise BuildError("graph-refused", f"graph {key!r}: expected a torch.cuda.CUDAGraph, got {type(graph).__name__}")
    return graphs_by_key


def _raw_graph(key: Key, graph: torch.cuda.CUDAGraph) -> int:
    """Returns the CUgraph handle.  Raises graph-refused if torch did not keep the graph."""
    try:
        return int(graph.raw_cuda_graph())
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise BuildError("graph-refused", f"graph {key!r}: torch does not give its nodes: {reason}") from None


def _with_tables(addresses: AddressMap, states: Sequence[RawModuleState], read: Any) -> tuple[Range, ...]:
    """Returns the ranges, with the contents of memory that module variables point to: libraries allocate such tables."""
    used = {target.range for state in states for word in state.block.words for target in word.readings}
    ranges = addresses.fill(used, read, LARGEST_TABLE)
    return tuple(
        [
            replace(memory_range, words=addresses.known_words(memory_range.contents)) if memory_range.contents else memory_range
            for memory_range in ranges
        ]
    )
