"""A result that is reshaped across its axes is stored before: no loop computes the indices of two reshapes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from cgcompile.targets.cpu import loops  # noqa: E402

NO_HEADERS = {"aot_inductor.precompile_headers": False}
"""Otherwise Inductor compiles headers for ten seconds, though none of its code is compiled here."""

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(sizes=SIZES, cuts=st.sets(st.integers(1, 5)))
def test_merging_or_splitting_axes_is_not_across(sizes: list[int], cuts: set[int]) -> None:
    ends = [0, *sorted(cut for cut in cuts if cut < len(sizes)), len(sizes)]
    merged = [math.prod(sizes[begin:end]) for begin, end in itertools.pairwise(ends)]
    assert not loops.crosses_axes(sizes, merged) and not loops.crosses_axes(merged, sizes)


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ((2, 31, 16), (2, 16, 31), True),
        ((6, 4), (4, 6), True),
        ((16, 32), (32, 16), True),
        ((2, 6, 4, 3), (12, 2, 2, 3), False),
        ((2, 3, 1), (1, 6), False),
        ((), (1, 1), False),
    ],
)
def test_which_reshapes_cross_axes(old: Sequence[int], new: Sequence[int], wanted: bool) -> None:
    assert loops.crosses_axes(old, new) == wanted


def test_symbols_stand_for_axes() -> None:
    import sympy

    batch = sympy.Symbol("s0", positive=True, integer=True)
    assert loops.crosses_axes((batch, 4, 31, 16), (batch, 4, 16, 31))
    assert not loops.crosses_axes((batch, 4, 16, 32), (batch * 4, 16, 32))


class Shifted(torch.nn.Module):
    """Relative positions, shifted as in Funnel and Transformer-XL."""

    def forward(self, x: Any) -> Any:
        """`x` (batch, heads, 8, 16): shifts every row by one more position."""
        one = (x + 1).reshape(x.shape[0], 4, 16, 8)[:, :, 1:]
        return one.reshape(x.shape[0], 4, 8, 15)[..., :8].exp()


def lines(folder: Path, stored: AbstractContextManager[None]) -> list[str]:
    """Returns the lines of the loops of `Shifted`, without compiling them."""
    inputs = (torch.zeros(3, 4, 8, 16),)
    program = torch.export.export(Shifted(), inputs, dynamic_shapes=({0: torch.export.Dim("batch")},))
    options = {"aot_inductor.package": True, "aot_inductor.package_cpp_only": True, "cpp.vec_isa_ok": True, **NO_HEADERS}
    with pytest.MonkeyPatch.context() as patch, stored:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        files = torch._inductor.aot_compile(program.module(), inputs, options=options)
    assert isinstance(files, list)
    code = "\n".join([Path(file).read_text() for file in files if str(file).endswith(".cpp")])
    return [
        line
        for kernel in re.findall(r'extern "C"[^\n]* void [^\n]*cpp_fused.*?\n}', code, re.DOTALL)
        for line in kernel.split("\n")
    ]


def test_no_index_is_a_remainder(tmp_path: Path) -> None:
    plain, stored = lines(tmp_path / "plain", nullcontext()), lines(tmp_path / "stored", loops.materialized_before_reshapes())
    assert any("%" in line or "modular_indexing" in line for line in plain), "there are no such indices to avoid"
    assert not [line for line in stored if "%" in line or "modular_indexing" in line]


def test_a_torch_without_the_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(loops.ir, "StorageBox")
    with pytest.raises(loops.BuildError, match=r"Inductor has no View\.create") as caught, loops.materialized_before_reshapes():
        pass
    assert caught.value.code == "torch-unsupported"
