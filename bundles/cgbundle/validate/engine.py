"""Invariants of a bundle of an engine's graphs: keys, tensors, recordings."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Set
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..errors import BundleError
from ..format.archive import Archive
from ..format.file_names import kernel_images
from ..format.limits import INTEGER, TABLE_ROWS, invalid
from ..format.schema import MEMORIES, Engine, EngineTensor, Manifest
from ..format.shapes import graph_memories, span_of
from . import require

if TYPE_CHECKING:
    from ..format.table import Table

LARGEST_ALIGNMENT = 256  # torch's allocator aligns to 512; no kernel is known to need more than this
USED = tuple([MEMORIES.index(name) for name in ("weights", "inputs", "arena")])
"""Memories that these recordings use: tables of libraries, the engine's tensors, temporaries of the graphs."""


def check_engine(manifest: Manifest) -> None:
    """Raises manifest-invalid unless the engine's graphs and tensors are valid, and the bundle has nothing else."""
    engine = manifest.engine
    assert engine is not None  # the caller has checked
    require(manifest.target.kind == "cuda", "target.kind", "an engine's graphs are for a GPU")
    for field in ("entries", "regions", "random", "frozen", "state_dimensions", "donations", "donated", "allowed", "world"):
        require(getattr(manifest, field) in ((), None), field, "must be empty in a bundle of an engine's graphs")
    require(all(row.computed for row in manifest.weights), "weights", "must all be computed in a bundle of an engine's graphs")
    require(1 <= len(engine.graphs) <= TABLE_ROWS, "engine.graphs", f"{len(engine.graphs)} of them")
    for index, graph in enumerate(engine.graphs):
        decode_key(graph.key, f"engine.graphs[{index}].key")
    for field, values in (("key", [g.key for g in engine.graphs]), ("file", [g.file for g in engine.graphs])):
        require(len(set(values)) == len(values), "engine.graphs", f"a {field} occurs twice")
    memories = dict(manifest.memories)
    require({"inputs", "arena"} <= memories.keys(), "memories", "of an engine's graphs have inputs and an arena")
    for index, row in enumerate(engine.spans):
        where, power = f"engine.spans[{index}]", row.alignment & (row.alignment - 1) == 0
        require(power and 1 <= row.alignment <= LARGEST_ALIGNMENT, f"{where}.alignment", f"{row.alignment}")
        require(row.bytes > 0 and not row.offset % LARGEST_ALIGNMENT, where, "is empty, or not aligned")
        inside = row.offset + row.bytes < memories["inputs"]
        require(inside, where, f"ends outside memory inputs, which has {memories['inputs']} bytes")
    for index, (row, after) in enumerate(pairwise(engine.spans)):
        require(row.offset + row.bytes < after.offset, f"engine.spans[{index + 1}]", "does not begin behind the one before it")
    require(len({row.name for row in engine.tensors}) == len(engine.tensors), "engine.tensors", "a name occurs twice")
    for index, tensor in enumerate(engine.tensors):
        where, shape, strides = f"engine.tensors[{index}]", tensor.shape, tensor.strides
        valid = len(shape) == len(strides) and min((*shape, *strides), default=0) >= 0
        require(valid, where, f"shape {list(shape)}, strides {list(strides)}")
        size = span_of(tensor.dtype, shape, strides)
        inside = tensor.offset + size <= memories["arena"]
        if tensor.memory == "inputs":
            inside = span_of_tensor(engine, tensor) is not None
        text = f"{size} bytes at {tensor.offset} of memory {tensor.memory} lie outside of it"
        require(size > 0 and inside, where, text)


def span_of_tensor(engine: Engine, tensor: EngineTensor) -> int | None:
    """The position of the span that contains a tensor of memory inputs."""
    position = bisect_right(engine.spans, tensor.offset, key=lambda row: row.offset) - 1
    if position < 0:
        return None
    row, end = engine.spans[position], tensor.offset + span_of(tensor.dtype, tensor.shape, tensor.strides)
    return position if end <= row.offset + row.bytes else None


def check_engine_tables(bundle: Archive) -> None:
    assert bundle.manifest.engine is not None
    images = kernel_images(bundle.manifest)
    for position in range(len(bundle.manifest.engine.graphs)):
        checked_table(bundle, position, images)
    check_engine_states(bundle)


def checked_table(bundle: Archive, position: int, images: Set[str]) -> Table:
    """The checked recording of graph `position`; `images`: kernel images. Raises table-invalid or relocation-invalid."""
    from ..format.table import Table
    from .recordings import check_recording

    manifest = bundle.manifest
    assert manifest.engine is not None
    file = manifest.engine.graphs[position].file
    table = Table(bundle.data(file), file)
    check_recording(table, graph_memories(manifest.memories), images)
    if tuple(table.key) != (position,):
        raise BundleError("table-invalid", f"{file}: key: {tuple(table.key)}, the manifest uses it for {(position,)}")
    used = {*table.relocation_memory.tolist(), *table.memset_memory.tolist(), *table.memcpy_memory.tolist()}
    for memory in sorted(used.difference(USED)):
        raise BundleError("table-invalid", f"{file}: memory: {MEMORIES[memory]}, which an engine's graphs do not use")
    return table


def check_engine_states(bundle: Archive) -> None:
    from .module_state import states, targets

    for memory in sorted(targets(states(bundle)) - {"weights"}):
        text = f"{bundle.manifest.module_state}: a variable points at memory {memory}, which moves with the engine's tensors"
        raise BundleError("table-invalid", text)


# --- the keys of graphs, as text in a manifest: JSON of a number, a text, or a list of these for a tuple ---------------

Key = int | str | tuple[int | str, ...]


def is_key(value: Any) -> bool:
    if type(value) is tuple:
        return all(type(part) in (int, str) and is_key(part) for part in value)
    return type(value) is str or (type(value) is int and abs(value) < INTEGER)


def encode_key(key: Key) -> str:
    return json.dumps(list(key) if isinstance(key, tuple) else key, separators=(",", ":"))


def decode_key(text: str, where: str) -> Key:
    """The key of a text. Raises manifest-invalid for text that `encode_key` does not produce."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise invalid(where, f"{text[:40]!r} is no key") from None
    key = tuple(value) if type(value) is list else value
    if not is_key(key) or encode_key(key) != text:
        raise invalid(where, f"{text[:40]!r} is no key")
    return key
