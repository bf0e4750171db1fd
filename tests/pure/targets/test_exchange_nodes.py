"""Collectives become launches, and are recognized in recordings; several ranks are interpreted at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle.format.schema import DTYPES, MEMORIES
from cgbundle.format.table import Table
from cgbundle.validate.module_state import Address
from cgbundle.validate.special_kernels import exchanges
from cgcompile.bundle import recordings as codec
from cgcompile.bundle.recordings import Edge, EmptyNode, KernelNode, Recording
from cgcompile.offline.interpret.exchanges import exchange, run_ranks
from cgcompile.offline.interpret.memory import Memory
from cgcompile.targets.collectives.exchange_memory import WORLDS, ExchangeMemory
from cgcompile.targets.collectives.exchange_nodes import (
    KINDS,
    SUMS,
    ExchangeKernels,
    Transfer,
    exchange_node,
    needed_memory,
    transfer,
    transfer_of,
)
from tests.helpers.raising import raises

ARENA = MEMORIES.index("arena")
SOURCE, TARGET, SPACE = 0, 8192, 32768


@st.composite
def transfers(draw: st.DrawFn, world: int) -> tuple[str, str, int, Transfer]:
    kind = draw(st.sampled_from(KINDS))
    dtype = draw(st.sampled_from(SUMS if kind in ("all_reduce", "reduce_scatter") else sorted(DTYPES)))
    item = DTYPES[dtype]
    step = 16 * world if kind in ("reduce_scatter", "all_to_all") else item
    nbytes = step * draw(st.integers(1, 1024 // step))
    sender = draw(st.integers(0, world - 1)) if kind == "broadcast" else -1
    return kind, dtype, nbytes, transfer(kind, dtype, nbytes, world, sender)


def kernels(memory: ExchangeMemory, rank: int) -> ExchangeKernels:
    return ExchangeKernels(rank=rank, memory=memory, image=b"image")


def nodes(memory: ExchangeMemory, sent: Sequence[Transfer], rank: int) -> Recording:
    module = kernels(memory, rank)
    functions = tuple(dict.fromkeys([module.function(transfer) for transfer in sent]))
    places = Address(memory=ARENA, offset=SOURCE), Address(memory=ARENA, offset=TARGET)
    chain = tuple([exchange_node(functions.index(module.function(transfer)), transfer, memory, rank, *places) for transfer in sent])
    edges = tuple([Edge(source=at, target=at + 1, from_port=0, to_port=0, type=0) for at in range(len(chain) - 1)])
    return Recording(key=(1,), functions=functions, nodes=chain, edges=edges)


@given(data=st.data(), world=st.sampled_from(WORLDS))
def test_what_is_read_back_is_what_was_launched(data: st.DataObject, world: int) -> None:
    sent = [transfer for _, _, _, transfer in data.draw(st.lists(transfers(world), min_size=1, max_size=4))]
    memory = needed_memory(world, sent)
    read_back = []
    for rank in range(world):
        recording = nodes(memory, sent, rank)
        for node, wanted in zip(recording.nodes, sent, strict=True):
            assert isinstance(node, KernelNode)
            assert transfer_of(recording.functions[node.function], node) == wanted
            packets = "packets" in recording.functions[node.function].symbol
            assert wanted.size <= (memory.packets if packets else memory.buffers)
        read_back.append(exchanges(Table(codec.encode(recording)), kernels(memory, rank).world))
    assert read_back == [read_back[0]] * world and len(read_back[0]) == len(sent), "the same on all ranks"


@given(data=st.data(), world=st.sampled_from((2, 3, 4)))
def test_ranks_side_by_side(data: st.DataObject, world: int) -> None:
    """The result is PyTorch's for the collective, in the order of the ranks."""
    kind, dtype, nbytes, sent = data.draw(transfers(world))
    random = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    kinds = {"float32": np.float32, "float16": np.float16}
    inputs = [random.standard_normal(nbytes // DTYPES[dtype]).astype(kinds.get(dtype, np.float32)) for _ in range(world)]
    raw = [array.tobytes()[:nbytes] if dtype in kinds else random.bytes(nbytes) for array in inputs]
    memory, memories, steps = needed_memory(world, [sent]), [], []
    for rank in range(world):
        memories.append(Memory([("arena", SPACE)]))
        memories[-1].span(ARENA, SOURCE, nbytes, "writes")[...] = np.frombuffer(raw[rank], np.uint8)
        (node,) = nodes(memory, [sent], rank).nodes
        assert isinstance(node, KernelNode)
        steps.append(exchange(memories[-1], sent, node))
    run_ranks(steps, (1,))
    for rank in range(world):
        part = nbytes // world if sent.scattered else nbytes
        parts = [payload[rank * part : (rank + 1) * part] if sent.scattered else payload for payload in raw]
        got = memories[rank].span(ARENA, TARGET, sent.output(world)).tobytes()
        if kind == "broadcast":
            assert got[:nbytes] == raw[sent.sender]
        elif sent.combine == "side by side":
            assert [got[at * sent.size :][:part] for at in range(world)] == parts
        elif dtype in kinds:
            numbers = [np.frombuffer(piece, kinds[dtype]).astype(np.float32) for piece in parts]
            total = numbers[0]
            for number in numbers[1:]:
                total = total + number
            assert got[:part] == total.astype(kinds[dtype]).tobytes()
    assert (memories[0].span(ARENA, TARGET + sent.output(world), 64) == 0xFF).all(), "and nothing behind it"


def test_ranks_that_send_different_sizes_raise() -> None:
    small, large = [transfer("all_reduce", "float32", size, 2) for size in (64, 128)]
    memory = needed_memory(2, [small, large])
    steps = []
    for rank, sent in enumerate((small, large)):
        (node,) = nodes(memory, [sent], rank).nodes
        assert isinstance(node, KernelNode)
        steps.append(exchange(Memory([("arena", SPACE)]), sent, node))
    with raises("collectives-unlike", match=r"one rank sends 64 bytes \(float32\)"):
        run_ranks(steps, (1,))


@pytest.mark.parametrize(
    ("kind", "dtype", "nbytes", "reason"),
    [("all_reduce", "int64", 64, "int64: expected"), ("reduce_scatter", "float32", 40, "a multiple of 16 for each of 2 ranks")],
)
def test_what_the_kernels_do_not_do(kind: str, dtype: str, nbytes: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        transfer(kind, dtype, nbytes, 2)


def test_other_launches_are_none() -> None:
    sent = transfer("all_gather", "int64", 64, 2)
    memory = needed_memory(2, [sent])
    recording = nodes(memory, [sent], 0)
    (node,) = recording.nodes
    assert isinstance(node, KernelNode)
    assert transfer_of(replace(recording.functions[0], symbol="triton_mm"), node) is None


def test_tables_that_are_refused() -> None:
    """Each table has one error."""
    sent = transfer("all_reduce", "float32", 64, 2)
    memory = needed_memory(2, [sent])
    base, world = nodes(memory, [sent], 1), kernels(memory, 1).world
    (node,) = base.nodes
    assert isinstance(node, KernelNode)

    def refused(recording: Recording, match: str, bundle_world: object = world) -> None:
        with raises("table-invalid", match=match):
            exchanges(Table(codec.encode(recording)), bundle_world)  # type: ignore[arg-type]

    refused(base, "for one device", None)
    refused(base, "of rank 1, the bundle is rank 0's", replace(world, rank=0))
    swapped = (
        *node.relocations[:2],
        *[replace(relocation, at=48 - relocation.at) for relocation in reversed(node.relocations[2:])],
    )
    moved = (*node.relocations[:3], replace(node.relocations[3], target=Address(memory=5, offset=0)))
    for relocations in (
        node.relocations[:3],
        moved,
        (replace(node.relocations[0], target=Address(memory=5, offset=0)), *swapped[1:]),
    ):
        refused(replace(base, nodes=(replace(node, relocations=relocations),)), "not those of an exchange")
    refused(replace(base, nodes=(node, EmptyNode())), "one after the other")
