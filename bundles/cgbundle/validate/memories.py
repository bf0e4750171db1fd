"""Every invariant of a manifest's memories and weights: sizes, places, and which weights are one tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from ..format.safetensors import ALIGNMENT
from ..format.schema import HOST, KERNEL_CODE, MEMORIES, STATE, Manifest, Weight
from ..format.spans import span
from . import require
from .programs import checked_span

WORLDS = range(2, 9)
"""How many ranks there may be: as many GPUs as hosts with NVLink have."""

CONSTANT, FOLDED, BAKED = "constant", "folded", "baked"
"""Reasons for which a weight is frozen."""

GRANULARITY = 2 << 20
"""Bytes in which the driver gives memory that several GPUs may write to."""


def check_memories(manifest: Manifest) -> None:
    """Raises manifest-invalid unless each memory stands once.  On a CPU they are as large as what lies in them."""
    seen = [name for name, _ in manifest.memories]
    require(len(set(seen)) == len(seen) and set(seen) <= {*MEMORIES, KERNEL_CODE}, "memories", f"unknown or double name in {seen}")


def check_world(manifest: Manifest) -> None:
    """Raises manifest-invalid unless a bundle over several devices is one of graphs for GPUs, and its memory peer holds a part for
    each rank; other bundles have no such memory."""
    peer = dict(manifest.memories).get("peer")
    world = manifest.world
    if world is None:
        require(peer is None, "memories.peer", "a bundle for one device has none")
        return
    require(manifest.target.kind == "cuda", "world", "the ranks of a model are GPUs")
    require(world.size in WORLDS, "world.size", f"{world.size}, expected {WORLDS[0]} to {WORLDS[-1]}")
    require(0 <= world.rank < world.size, "world.rank", f"{world.rank} of {world.size}")
    require(world.stride > 0 and not world.stride % GRANULARITY, "world.stride", f"no multiple of {GRANULARITY}")
    for name, at, size in (("status", world.status, 4), ("limit", world.limit, 8)):
        inside = 0 <= at <= world.stride - size and not at % size
        require(inside, f"world.{name}", f"{at} is no place of {size} bytes in {world.stride}")
    require(peer == world.size * world.stride, "memories.peer", f"{peer}, {world.size} parts of {world.stride} bytes are expected")
    hosted = next((index for index, region in enumerate(manifest.regions) if region.kind == "host"), None)
    require(hosted is None, f"regions[{hosted}]", "a bundle over several GPUs has no operations on the host")
    require(not manifest.donations and not manifest.module_state, "world", "with donations, or variables of kernels")


def check_weight_rows(manifest: Manifest) -> None:
    """Raises manifest-invalid unless every weight has a layout without gaps and a place of its own; tied ones share theirs."""
    require(len({weight.name for weight in manifest.weights}) == len(manifest.weights), "weights", "a name stands twice")
    positions = {weight for region in manifest.regions for _, weight in region.constants if region.kind == "host"}
    used = {weight.tensor for index, weight in enumerate(manifest.weights) if index in positions}
    for index, weight in enumerate(manifest.weights):
        where = f"weights[{index}]"
        checked_span(where, weight)
        require(_is_packed(weight.shape, weight.strides), f"{where}.strides", "leave gaps or overlap")
        require(not weight.zeros or weight.memory == STATE, f"{where}.zeros", "of a weight that is no state")
        if weight.memory == STATE:
            continue  # check_state does
        if manifest.target.kind == "cpu":
            require(weight.memory == "weights", f"{where}.memory", "a weight of the cpu target beside its memory")
            require(weight.offset == 0, f"{where}.offset", "a weight of the cpu target lies where the file has it")
        elif weight.memory == HOST:
            require(weight.tensor in used, f"{where}.memory", "is not on the GPU, and no host region uses it")
            require(weight.offset == 0, f"{where}.offset", "a weight of the host lies where the file has it")
        else:
            require(weight.offset % ALIGNMENT == 0, f"{where}.offset", "is not aligned")
    _check_ties(manifest.weights)
    _check_places(manifest)


def check_computed(manifest: Manifest) -> None:
    """Raises manifest-invalid unless what the build `computed` are weights on a GPU, not tied, that nothing changes and no host
    region reads."""
    read = {weight for region in manifest.regions for _, weight in region.constants}
    computed = [(index, weight) for index, weight in enumerate(manifest.weights) if weight.computed]
    users = Counter([weight.tensor for weight in manifest.weights]) if computed else {}
    for index, row in computed:
        where = f"weights[{index}].computed"
        there = manifest.target.kind == "cuda" and row.memory == "weights"
        require(there and index not in read, where, f"{row.name!r} is not read by a GPU alone")
        require(users[row.tensor] == 1, where, f"{row.tensor!r} is another weight's, too")


def check_frozen(manifest: Manifest) -> None:
    """Raises manifest-invalid unless `frozen` are ascending weights, with reasons that their memories allow."""
    positions = [row.weight for row in manifest.frozen]
    for place, row in enumerate(manifest.frozen):
        where = f"frozen[{place}]"
        ascends = row.weight > (positions[place - 1] if place else -1)
        require(ascends and row.weight < len(manifest.weights), f"{where}.weight", "is no weight, or not ascending")
        kept = manifest.weights[row.weight].memory == STATE
        fits = (row.reason == STATE) == kept
        require(fits, f"{where}.reason", f"{row.reason!r} of a weight of memory {manifest.weights[row.weight].memory}")
        require(bool(row.where) == (row.reason == BAKED), f"{where}.where", f"{row.where!r} of a weight that is {row.reason}")


def _check_ties(weights: Sequence[Weight]) -> None:
    """A tensor has the name of one of its weights: no weight can be given another one's contents, but with another layout."""
    owners = {weight.name: weight for weight in weights}
    for index, weight in enumerate(weights):
        owner = owners.get(weight.tensor)
        if owner is weight:
            continue
        where = f"weights[{index}]"
        known = owner is not None and owner.tensor == weight.tensor
        require(known, f"{where}.tensor", f"{weight.tensor[:80]!r} is the name of no weight that lies there")
        assert owner is not None
        layout, other = [(row.dtype, row.shape, row.strides, row.memory == STATE) for row in (weight, owner)]
        require(layout == other, where, f"is laid out otherwise than {owner.name!r}, the same tensor")
        apart = HOST in (weight.memory, owner.memory)
        require(apart or weight.offset == owner.offset, f"{where}.offset", f"lies elsewhere than {owner.name!r}, the same tensor")


def _check_places(manifest: Manifest) -> None:
    """Tensors lie in their memory, and beside each other."""
    memories = dict(manifest.memories)
    rows = {row.tensor: (index, row) for index, row in enumerate(manifest.weights) if row.memory != HOST}.values()
    if manifest.target.kind == "cpu":
        sizes = {"weights": sum(span(row) for _, row in rows if row.memory == "weights")}
        ends = [row.offset + span(row) for _, row in rows if row.memory == STATE]
        sizes |= {STATE: max(ends)} if ends else {}
        require(
            {name: size for name, size in memories.items() if size or name in sizes} == sizes,
            "memories",
            f"{memories}, the weights make {sizes}",
        )
        return
    places = sorted([(row.offset, row.offset + span(row), index) for index, row in rows if row.memory == "weights"])
    for _, end, index in places:
        require(end <= memories.get("weights", 0), f"weights[{index}].offset", "outside memory weights")
    for (_, end, _), (begin, _, index) in pairwise(places):
        require(end <= begin, f"weights[{index}].offset", "overlaps another weight")


def _is_packed(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements lie without gaps or overlaps, in whatever order of the axes."""
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != step and 0 not in shape:
            return False
        step *= size
    return True
