"""The bytes that a recording writes and reads: a live value directly beside them is accepted, a value that overlaps them by a byte
is refused."""

from __future__ import annotations

import pytest

from cgbundle.errors import BundleError
from cgbundle.format.schema import MEMORIES, Program, Step, Value
from cgbundle.format.table import Table
from cgbundle.validate.module_state import Address, Relocation
from cgbundle.validate.programs import check_overwrites
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import KernelNode, MemcpyNode, MemsetNode, Node, Recording
from tests.helpers.bundles.recordings import ARENA, FUNCTION, INPUTS, WEIGHTS

A_MEMSET = MemsetNode(target=Address(memory=ARENA, offset=0x100), value=0, element=2, width=5, height=3, pitch=16)
NODES: tuple[Node, ...] = (
    A_MEMSET,
    MemsetNode(target=Address(memory=ARENA, offset=0x200), value=0, element=4, width=3, height=1, pitch=0),
    MemsetNode(target=Address(memory=INPUTS, offset=0x300), value=0, element=1, width=7, height=2, pitch=7),
    MemcpyNode(
        source=Address(memory=ARENA, offset=0x400), target=Address(memory=ARENA, offset=0x500), width=6, height=3, depth=2,
        source_pitch=6, source_height=3, target_pitch=10, target_height=4,
    ),
    MemcpyNode(
        source=Address(memory=WEIGHTS, offset=0x600), target=Address(memory=ARENA, offset=0x700), width=9, height=1, depth=1,
        source_pitch=0, source_height=0, target_pitch=0, target_height=0,
    ),
    MemcpyNode(
        source=Address(memory=ARENA, offset=0x800), target=Address(memory=INPUTS, offset=0x900), width=4, height=1, depth=3,
        source_pitch=4, source_height=1, target_pitch=5, target_height=2,
    ),
    KernelNode(
        function=0, grid=(1, 1, 1), threads=(1, 1, 1), shared=0, block=bytes(20), undefined=(), attributes=(),
        relocations=(
            Relocation(at=0, target=Address(memory=ARENA, offset=0xA00)),
            Relocation(at=8, target=Address(memory=INPUTS, offset=0xB00)),
        ),
    ),
)  # fmt: skip

WRITES = [
    (ARENA, 0x100, 42), (ARENA, 0x200, 12), (INPUTS, 0x300, 14), (ARENA, 0x500, 66), (ARENA, 0x700, 9), (INPUTS, 0x900, 24),
]  # fmt: skip
"""Memory, first byte, and bytes to the end of the last row: (rows - 1) * pitch + width, over all slices."""

READS = [(ARENA, 0x400), (WEIGHTS, 0x600), (ARENA, 0x800), (ARENA, 0xA00), (INPUTS, 0xB00)]
"""Addresses that the recording reads or passes to a kernel."""

TABLE = Table(tables.encode(Recording(key=(), functions=(FUNCTION,), nodes=NODES, edges=())), "g.bin")


def beside(memory: int, offset: int, size: int, *, named: bool = False) -> Program:
    """Returns a program: step 0 writes a value of `size` bytes, step 1 is the recording (with the value as input if `named`), step
    2 reads the value."""
    kept = Value(dtype="uint8", shape=(size,), strides=(1,), memory=MEMORIES[memory], offset=offset)
    other = Value(dtype="uint8", shape=(1,), strides=(1,), memory="arena", offset=0xF000)
    rows = (((), (0,)), ((0,) if named else (), (1,)), ((0,), (2,)))
    steps = [Step(kind="graph", region=0, file="g", inputs=reads, outputs=writes) for reads, writes in rows]
    return Program(key=(), values=(kept, other, other), inputs=(), outputs=(2,), steps=tuple(steps), arena=0, static=0)


def refused(program: Program) -> str:
    try:
        check_overwrites(program, 1, TABLE)
    except BundleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("memory", "begin", "size"), WRITES)
def test_writes(memory: int, begin: int, size: int) -> None:
    for offset in (begin - 3, begin, begin + size // 2, begin + size - 1):
        for named in (False, True):
            assert "a node writes over value 0, which steps[2] reads" in refused(beside(memory, offset, 4, named=named))
    for offset in (begin - 4, begin + size):
        assert not refused(beside(memory, offset, 4))
    assert not refused(beside(4, begin, 4)), "the same place of another memory"


@pytest.mark.parametrize(("memory", "begin"), READS)
def test_reads(memory: int, begin: int) -> None:
    for offset in (begin - 3, begin):
        assert "a node uses value 0, which steps[2] reads, and the step does not name it" in refused(beside(memory, offset, 4))
        assert not refused(beside(memory, offset, 4, named=True))
    for offset in (begin - 4, begin + 1):
        assert not refused(beside(memory, offset, 4))


def test_unread_values_may_be_overwritten() -> None:
    program = beside(ARENA, 0x100, 4)
    first, second, last = program.steps
    for steps in ((first, second), (first, second, Step(kind="graph", region=0, file="g", inputs=(), outputs=(2,)))):
        dead = Program(key=(), values=program.values, inputs=(), outputs=(1,), steps=steps, arena=0, static=0)
        assert not refused(dead)
    given_out = Program(key=(), values=program.values, inputs=(), outputs=(0,), steps=(first, second), arena=0, static=0)
    assert "a node writes over value 0, which is an output of the call" in refused(given_out)
    consumer = Step(kind="graph", region=0, file="g", inputs=(0,), outputs=(1,))
    used_up = Program(key=(), values=program.values, inputs=(), outputs=(1,), steps=(first, consumer), arena=0, static=0)
    assert not refused(used_up), "the recording may write over what it is the last to read"
    not_yet = Program(key=(), values=program.values, inputs=(), outputs=(0,), steps=(last, second, first), arena=0, static=0)
    assert not refused(not_yet), "what a later step makes is not there yet"
