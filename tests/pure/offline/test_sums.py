"""The interpreter keeps blocks of addresses as sums: loads give the same elements as with computed addresses."""

from __future__ import annotations

import numpy as np
import pytest

from cgcompile.offline.interpret.memory import Memory
from cgcompile.offline.interpret.sums import Sum, compact, lines, summed
from cgcompile.offline.interpret.values import Array

INSTANCES, ROWS, COLUMNS = 4, 8, 16
SHAPE = (INSTANCES, ROWS, COLUMNS)


def pointers(memory: Memory, row: int, column: int, start: int = 0) -> Sum:
    """Returns the addresses of the block of every program instance, with these byte distances between rows and columns."""
    instance = np.arange(INSTANCES).reshape(-1, 1, 1) * (row * ROWS if row > column else column * COLUMNS)
    rows, columns = np.arange(ROWS).reshape(1, -1, 1) * row, np.arange(COLUMNS).reshape(1, 1, -1) * column
    addresses = summed([instance + memory.address(3, start), rows, columns, np.full((1, 1, 1), 0)], SHAPE, None)
    assert addresses is not None
    return addresses


@pytest.fixture
def memory() -> Memory:
    filled_memory = Memory([("weights", 64), ("arena", 4 * INSTANCES * ROWS * COLUMNS + 64)])
    filled_memory.span(3, 0, 4 * INSTANCES * ROWS * COLUMNS, "writes").view(np.float32)[:] = np.arange(INSTANCES * ROWS * COLUMNS)
    return filled_memory


def of_load(memory: Memory, block: Sum) -> Array:
    return memory.load(block.data, None, None, np.dtype(np.float32))


@pytest.mark.parametrize(("row", "column"), [(4 * COLUMNS, 4), (4, 4 * ROWS)])
def test_lines_are_what_elements_are(memory: Memory, row: int, column: int) -> None:
    block = pointers(memory, row, column)
    lines = memory.load_lines(block, np.dtype(np.float32))
    assert lines is not None
    assert lines.shape == SHAPE
    assert (lines == of_load(memory, block)).all()


@pytest.mark.parametrize(
    ("row", "column", "start"),
    [(4 * COLUMNS, 4, 68), (4 * COLUMNS, 4, 2), (8, 8, 0)],
    ids=["beyond the memory", "not aligned", "with gaps"],
)
def test_no_lines_where_a_load_has_to_look(memory: Memory, row: int, column: int, start: int) -> None:
    assert memory.load_lines(pointers(memory, row, column, start), np.dtype(np.float32)) is None


def test_terms_that_others_include_are_added_to_them() -> None:
    column, row = np.arange(64).reshape(1, 64, 1), np.arange(64).reshape(1, 1, 64)
    total = summed([np.full((1, 1, 1), 7), column, row, column], (1, 64, 64), None)
    assert total is not None
    assert len(total.terms) == 2
    assert (total.data == 7 + 2 * column + row).all()
    assert total.bounds() == (7, 7 + 63 * 3)


def test_a_small_block_is_computed_at_once() -> None:
    assert summed([np.arange(8).reshape(1, 8)], (1, 8), None) is None


def test_elements_that_wrap_are_not_known_by_the_terms() -> None:
    large = np.full((1, 64, 1), 2**31 - 1, np.int32)
    total = summed([large, np.ones((1, 1, 64), np.int32)], (1, 64, 64), None)
    assert total is not None
    assert total.scaled(4) is None
    assert (total.data == -(2**31)).all()


def test_an_axis_that_two_terms_share_has_no_lines() -> None:
    block = Sum((np.arange(64).reshape(1, 1, 64) * 4, np.zeros((1, 64, 64), np.int64)), (1, 64, 64), None)
    assert lines(block, 4) is None


def test_compact_drops_what_broadcasting_repeats() -> None:
    assert compact(np.broadcast_to(np.arange(4).reshape(1, 4, 1), (8, 4, 16))).shape == (1, 4, 1)
