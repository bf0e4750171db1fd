"""Operators with cgcompile's own C++ code for the CPU equal their PyTorch definitions, alone and in a bundle."""

from __future__ import annotations

import os
from ctypes import byref, c_double, c_int64, c_void_p
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgbundle.cpu.machine import processor_flags  # noqa: E402
from cgcompile.language_models.kernels.processor import int8_linear, paged_attention  # noqa: E402
from cgcompile.targets.kernels import operators  # noqa: E402
from cgcompile.transforms.inlining import OURS  # noqa: E402
from tests.helpers.own_functions import Code, own_functions  # noqa: E402

LEVELS = ["native", *(["x86-64-v3"] if "avx2" in processor_flags() else [])] if os.uname().machine == "x86_64" else ["native"]


@pytest.fixture(scope="module", params=LEVELS)
def code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Code:
    return own_functions(tmp_path_factory.mktemp("operators") / f"{request.param}.so", request.param, [operators.SOURCE])


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.sampled_from([1, 15, 64, 577, 800]), st.integers(0, 7))
def test_products_with_weights_of_eight_bits(code: Code, rows: int, count: int, depth: int, gaps: int) -> None:
    x, weight, scale = (
        torch.randn(rows, depth + gaps)[:, :depth],
        torch.randint(-127, 128, (count, depth)).to(torch.int8),
        torch.rand(count),
    )
    output_handle, wanted = c_void_p(), int8_linear(x, weight, scale)
    assert code("int8_linear", x, weight, scale, byref(output_handle)) == 0
    torch.testing.assert_close(code.taken(output_handle, wanted), wanted, atol=1e-3 * depth**0.5, rtol=1e-5)


def test_products_that_are_refused(code: Code) -> None:
    x, weight, scale = torch.randn(2, 32), torch.ones(8, 32, dtype=torch.int8), torch.rand(8)
    for wrong in ((x.double(), weight, scale), (x, weight.float(), scale), (x, weight, scale[:7]), (x[:, :31], weight, scale)):
        assert code("int8_linear", *wrong, byref(c_void_p())) != 0


@st.composite
def cases(draw: st.DrawFn) -> tuple[object, ...]:
    """Draws arguments of `paged_attention`."""
    torch.manual_seed(draw(st.integers(0, 1 << 20)))
    batch, seq, key_heads = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 3, 17, 40])), draw(st.integers(1, 3))
    heads, dim, page = (
        key_heads * draw(st.sampled_from([1, 3, 7])),
        draw(st.sampled_from([4, 16, 64, 80])),
        draw(st.sampled_from([4, 16, 32])),
    )
    blocks = -(-seq // page) + draw(st.integers(1, 5))
    query = torch.randn(batch, heads, seq, dim).transpose(1, 2) if draw(st.booleans()) else torch.randn(batch, seq, heads, dim)
    keys, values = torch.randn(2, batch * blocks + 1, key_heads, page, dim)
    pages = 1 + torch.randperm(batch * blocks).view(batch, blocks)
    count = torch.tensor([draw(st.integers(0, seq)) for _ in range(batch)])
    start = torch.tensor([draw(st.integers(0, blocks * page - number)) for number in count.tolist()])
    sinks = torch.randn(heads) if draw(st.booleans()) else None
    window, chunk = draw(st.sampled_from([(0, 0), (0, 0), (5, 0), (21, 0), (0, 8), (0, 20)]))
    return query, keys, values, pages, start, count, sinks, 0.3, window, chunk, draw(st.sampled_from([0.0, 3.0]))


@settings(max_examples=80, deadline=None)
@given(cases())
def test_attention_reads_live_tokens_alone(code: Code, case: tuple[object, ...]) -> None:
    """In these cases, tokens after a lane's end are NaN."""
    query, keys, values, pages, start, count, sinks, *numbers = case
    wanted = paged_attention(*case)
    for lane, table in enumerate(pages.tolist()):
        for token in range(int(start[lane] + count[lane]), len(table) * keys.shape[2]):
            for cache in (keys, values):
                cache[table[token // keys.shape[2]], :, token % keys.shape[2]] = float("nan")
    assert_same(code, (query, keys, values, pages, start, count, sinks, *numbers), wanted)


def assert_same(code: Code, case: tuple[object, ...], wanted: Tensor, *, checked: int = 0) -> None:
    *tensors, sinks, scale, window, chunk, softcap = case
    handle, output_handle = code.handle(sinks) if isinstance(sinks, Tensor) else None, c_void_p()
    options = None if handle is None else byref(handle), c_double(scale), c_int64(window), c_int64(chunk), c_double(softcap)
    assert code("paged_attention", *tensors, *options, c_int64(checked), byref(output_handle)) == 0
    torch.testing.assert_close(code.taken(output_handle, wanted), wanted, atol=2e-5, rtol=1e-5)
    if handle is not None:
        code.library.aoti_torch_delete_tensor_object(handle)


@pytest.mark.parametrize("page", [-1, 9])
def test_a_page_that_is_not_there_is_refused(code: Code, page: int) -> None:
    query, cache, one = torch.randn(1, 1, 2, 16), torch.randn(9, 2, 16, 16), torch.tensor([1])
    for table, start in ((torch.tensor([[page]]), 0), (torch.tensor([[1]]), 16), (torch.tensor([[1]]), -1)):
        arguments = query, cache, cache, table, torch.tensor([start]), one, None, c_double(1), c_int64(0), c_int64(0), c_double(0)
        assert code("paged_attention", *arguments, c_int64(0), byref(c_void_p())) != 0


def test_checks_know_the_operators_that_have_code() -> None:
    assert operators.DECLARED.keys() == OURS


def test_pages_that_were_checked_may_be_more_than_the_sizes_say(code: Code) -> None:
    query, cache = torch.randn(1, 1, 2, 16), torch.randn(9, 2, 16, 16)
    case = torch.tensor([[7]]), torch.tensor([0]), torch.tensor([1]), None, 1.0, 0, 0, 0.0
    wanted = paged_attention(query, cache, cache, *case)
    assert_same(code, (query, cache[:5], cache[:5], *case), wanted, checked=1)


class Both(nn.Module):
    """Both operators one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (128, 64)).to(torch.int8))
        self.register_buffer("scale", torch.rand(128) * 0.01)
        self.register_buffer("cache", torch.randn(9, 2, 16, 32))
        self.sinks = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, start: Tensor, count: Tensor, pages: Tensor) -> Tensor:
        query = int8_linear(torch.relu(x), self.weight, self.scale).view(1, -1, 4, 32)
        plain = paged_attention(query, self.cache, self.cache, pages, start, count, None, 0.3, 0, 0, 0.0)
        return plain + paged_attention(query, self.cache, self.cache, pages, start, count, self.sinks, 0.3, 20, 0, 2.0)


def both_inputs(rows: int) -> tuple[Tensor, ...]:
    return torch.randn(rows, 64), torch.tensor([37]), torch.tensor([1]), torch.tensor([[3, 1, 2, 5]])


@pytest.mark.parametrize("standalone", [None, False])
def test_a_bundle_calls_them(tmp_path: Path, standalone: bool | None) -> None:
    """Bundles with torch's libraries and bundles without them call the operators."""
    torch.manual_seed(0)
    model = Both().eval()
    built = cgcompile.build(model, both_inputs, sizes=[5], out=tmp_path / "both.cgb", target="cpu", standalone=standalone)
    (file,) = (tmp_path / "both.cgb/host").iterdir()
    assert all(f"aoti_torch_cpu_{name}".encode() in file.read_bytes() for name in ("int8_linear", "paged_attention"))
    assert "custom-operator" not in {finding.rule for entry in built.manifest.entries for finding in entry.findings}
    inputs = both_inputs(5)
    with cgbundle.load(tmp_path / "both.cgb") as program:
        torch.testing.assert_close(program(*inputs), model(*inputs), atol=1e-5, rtol=1e-5)
