"""Large outputs of the host are returned without a copy. Later calls do not change them, no other caller gets the same memory, and
they share no byte with another tensor of the call."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle.call import outputs as call_outputs
from cgbundle.call.outputs import Extents
from cgbundle.program import Program
from cgbundle.tensors import tensor
from cgbundle.tensors.tensor import Tensor
from tests.helpers.bundles.fabricate import FakeBackend, FakeResults, Numbers, dimension, signature, spec

TWO = signature(
    [dimension("batch", 2, 8)],
    [spec("x", "batch", 3)],
    [spec("y", "batch", 3), spec("first", "batch"), spec("turned", 3, "batch")],
    output_orders=[(0, 1), (0,), (1, 0)],
)


def compute(key: tuple[int, ...], inputs: list[Numbers]) -> list[Numbers]:
    """Returns 2x, the first column of x, and x transposed in the memory order of x."""
    (x,), (size,) = inputs, key
    return [[2 * value for value in x], x[::3], [x[3 * row + column] for column in range(3) for row in range(size)]]


def numbers(size: int, first: int = 1) -> Tensor:
    return tensor.from_bytes((ctypes.c_float * (3 * size))(*range(first, first + 3 * size)), "float32", (size, 3))


def expected(size: int, first: int = 1) -> list[Any]:
    x = [[float(first + 3 * row + column) for column in range(3)] for row in range(size)]
    return [[[2 * value for value in row] for row in x], [row[0] for row in x], [[row[column] for row in x] for column in range(3)]]


class Watched(FakeBackend):
    """Records the results of every replay."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.replays: list[tuple[Sequence[int], list[int]]] = []
        self.owners: list[weakref.ref[object]] = []

    def run(self, *arguments: Any) -> FakeResults:
        results = super().run(*arguments)
        taken: list[int] = []
        owner_of = results.transfer_ownership

        def noted(index: int) -> object:
            taken.append(index)
            self.owners.append(weakref.ref(owner := owner_of(index)))
            return owner

        results.transfer_ownership = noted  # type: ignore[method-assign]
        self.replays.append((list(results.addresses), taken))
        return results


def served(monkeypatch: pytest.MonkeyPatch, large: int, outputs: str = "copy", *, static: bool = False) -> tuple[Program, Watched]:
    monkeypatch.setattr(call_outputs, "LARGE", large)
    backend = Watched(TWO, compute, static=static)
    return Program(TWO, backend, "pad", outputs), backend


def test_large_outputs_are_not_copied_and_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """With eight rows, y has 96 bytes and the column 32. The output in another memory order is copied."""
    run, backend = served(monkeypatch, 64)
    results = [run(numbers(8, first)) for first in (1, 50, 100)]
    for (y, first, turned), (addresses, taken), begin in zip(results, backend.replays, (1, 50, 100), strict=True):
        assert taken == [0] and y.address == addresses[0]
        assert first.address != addresses[1] and turned.address != addresses[2] and turned.contiguous
        assert [y.tolist(), first.tolist(), turned.tolist()] == expected(8, begin)
    backend.replays.clear()
    run.close()
    del run, backend
    gc.collect()
    for row, begin in zip(results, (1, 50, 100), strict=True):
        assert [output.tolist() for output in row] == expected(8, begin)


def test_one_that_is_kept_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    run, backend = served(monkeypatch, 16)
    (y, first, _) = run(numbers(8))
    assert backend.replays[0][1] == [0, 1] and all(owner() is not None for owner in backend.owners)
    del y
    gc.collect()
    assert [owner() is None for owner in backend.owners] == [True, False]
    assert first.tolist() == expected(8)[1]


@pytest.mark.parametrize(
    ("size", "outputs", "static"), [(2, "copy", False), (5, "copy", False), (8, "copy", True), (8, "view", False)]
)
def test_other_outputs_are_copied(monkeypatch: pytest.MonkeyPatch, size: int, outputs: str, static: bool) -> None:
    """Small outputs, outputs of a padded call, and outputs in memory that the next replay writes to are copied."""
    run, backend = served(monkeypatch, 64, outputs, static=static)
    results = run(numbers(size))
    assert backend.replays[0][1] == []
    tensors = [output.tensor if outputs == "view" else output for output in results]
    assert [value.tolist() for value in tensors] == [value[:size] if i < 2 else value for i, value in enumerate(expected(size))]


@given(begin=st.integers(0, 40), other=st.integers(0, 40), source=st.integers(0, 40), sizes=st.tuples(*[st.integers(1, 20)] * 3))
def test_what_shares_a_byte_is_not_apart(begin: int, other: int, source: int, sizes: tuple[int, int, int]) -> None:
    spans = Extents(outputs=sizes[:2], inputs=sizes[2:], large=(0, 1))
    one, two, read = [set(range(at, at + size)) for at, size in zip((begin, other, source), sizes, strict=True)]
    wanted = [place for place, span, rest in ((0, one, two | read), (1, two, one | read)) if not span & rest]
    assert sorted(spans.apart((begin, other), (source,))) == wanted


def test_an_output_inside_another_output_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that a compiler placed inside another one is copied, since a caller may write to each."""
    run, backend = served(monkeypatch, 16)
    replay = backend.run

    def overlaid(*arguments: Any) -> FakeResults:
        results = replay(*arguments)
        results.addresses[1] = results.addresses[0] + 8
        return results

    monkeypatch.setattr(backend, "run", overlaid)
    (y, first, _) = run(numbers(8))
    assert backend.replays[0][1] == []
    held = [value for row in y.tolist() for value in row]
    assert first.tolist() == held[2:10]
    ctypes.memset(first.address, 0, 32)
    assert y.tolist() == expected(8)[0]
