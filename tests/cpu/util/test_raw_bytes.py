"""What changed between two tensors, and how far two are apart, without a copy of all their elements."""

from __future__ import annotations

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
    found = compare(want, have)
    wide = [torch.view_as_real(each) if each.is_complex() else each for each in (want, have)]
    wide = [each.reshape(2, -1).double() for each in wide]
    assert found.error == float((wide[0] - wide[1]).abs().max() / wide[0].abs().max())
    assert found.text.startswith(f"{int((wide[0] != wide[1]).sum())} of {wide[0].numel()} ")
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
