"""Changed elements between two tensors, and the largest difference, are found without a copy of all elements."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cgcompile.util import raw_bytes
from cgcompile.util.tolerance import compare

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


@given(st.lists(st.booleans(), max_size=40), st.sampled_from(DTYPES), st.integers(1, 50))
def test_runs_name_every_changed_element_once(mask: list[bool], dtype: torch.dtype, at_once: int) -> None:
    before = torch.zeros(len(mask), dtype=dtype)
    after = torch.tensor(mask, dtype=torch.float32).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw_bytes, "AT_ONCE", at_once)
        runs, elements = raw_bytes.changes(before, after)
    named = [begin + i for begin, count in runs.tolist() for i in range(count)]
    assert named == [place for place, changed in enumerate(mask) if changed]
    assert raw_bytes.raw(elements).tolist() == raw_bytes.raw(after[torch.tensor(mask, dtype=torch.bool)]).tolist()
    assert all(begin + count < later for (begin, count), (later, _) in zip(runs.tolist(), runs.tolist()[1:], strict=False))


def test_a_change_is_one_of_bits() -> None:
    runs, elements = raw_bytes.changes(torch.tensor([0.0, float("nan")]), torch.tensor([-0.0, float("nan")]))
    assert runs.tolist() == [[0, 1]] and str(elements.tolist()) == "[-0.0]"
    assert not raw_bytes.is_zero(elements) and raw_bytes.is_zero(torch.zeros(3)) and raw_bytes.is_zero(torch.empty(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_distances_are_those_of_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    want, have = torch.randn(2, 500).to(dtype), torch.randn(2, 500).to(dtype)
    have[1] = want[1]
    difference = compare(want, have)
    wide = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in (want, have)]
    wide = [tensor.reshape(2, -1).double() for tensor in wide]
    assert difference.error == float((wide[0] - wide[1]).abs().max() / wide[0].abs().max())
    assert difference.text.startswith(f"{int((wide[0] != wide[1]).sum())} of {wide[0].numel()} ")
    assert compare(want, want).error == 0


def test_conjugates_and_negatives_that_torch_has_not_computed_are_what_it_reads() -> None:
    z = torch.randn(3, 2, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    for lazy, computed in (
        (z.conj(), z.conj().resolve_conj()),
        (z.conj().imag, z.conj().imag.resolve_neg()),
        (z.conj().T, z.mH.resolve_conj()),
    ):
        assert lazy.is_conj() or lazy.is_neg()
        assert bytes(raw_bytes.raw(lazy).numpy()) == computed.numpy().tobytes()
        assert compare(lazy, computed).error == compare(computed, lazy).error == 0
        assert compare(lazy, -lazy).error > 1


@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, float("nan")]), min_size=1, max_size=300), st.sampled_from(DTYPES), st.integers(1, 64)
)
def test_a_copy_and_what_is_put_back_are_alike_in_every_bit(values: list[float], dtype: torch.dtype, block: int) -> None:
    first = torch.tensor(values).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw_bytes, "LARGE", 1)
        patch.setattr(raw_bytes, "BLOCK", block)
        patch.setattr(raw_bytes, "WIDE", 3 * block)
        copy = raw_bytes.copied(first)
        assert copy.dtype == dtype and copy.shape == first.shape and raw_bytes.same_bits(copy, first)
        copy[::3] = 1
        raw_bytes.put_back(copy, first)
    assert raw_bytes.raw(copy).tolist() == raw_bytes.raw(first).tolist()


@given(st.binary(min_size=1, max_size=40), st.integers(0, 40), st.integers(1, 255), st.integers(0, 9))
def test_one_other_bit_is_seen_wherever_it_is(data: bytes, place: int, bits: int, offset: int) -> None:
    one, other = [torch.frombuffer(bytearray(bytes(offset) + data), dtype=torch.uint8)[offset:] for _ in range(2)]
    assert raw_bytes.same_bits(one, other)
    other[place % len(data)] ^= bits
    assert not raw_bytes.same_bits(one, other)


@pytest.mark.parametrize(
    "first", [torch.arange(12.0).reshape(3, 4).t(), torch.ones(3).expand(2, 3), torch.randn(3, dtype=torch.cfloat).conj()]
)
def test_what_lies_otherwise_is_put_back_too_and_left_alone_where_it_is_alike(first: torch.Tensor) -> None:
    copy = raw_bytes.copied(first)
    version = copy._version
    raw_bytes.put_back(copy, first)
    assert copy._version == version
    copy[1] = 0
    raw_bytes.put_back(copy, first)
    assert torch.equal(copy, first) and copy._version > version


@pytest.mark.parametrize("size", [12, 1 << 12])
def test_what_is_alike_is_not_written_to(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_bytes, "LARGE", 1 << 12)
    first = torch.arange(size)
    copy = raw_bytes.copied(first)
    raw_bytes.put_back(copy, first)
    assert copy._version == raw_bytes.copied(first)._version and torch.equal(copy, first)


def test_a_sparse_tensor_is_copied_as_torch_does() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(raw_bytes.copied(sparse).to_dense(), torch.eye(3))


def test_zeros_of_a_large_copy_take_no_memory() -> None:
    size = 512 << 20
    cache = torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    cache[5] = 1
    before = resident()
    copy = raw_bytes.copied(cache)
    cache[300 << 20 :][:9] = 7
    raw_bytes.put_back(cache, copy)
    assert raw_bytes.same_bits(cache, copy) and int(cache.sum()) == 1 and resident() - before < size // 8


def resident() -> int:
    """Returns the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
