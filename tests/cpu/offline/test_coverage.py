"""`check` for a cross-compiled target and lowering report the same operations without a Triton kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cgcompile
from cgcompile.errors import BuildError
from cgcompile.export.export import export
from cgcompile.model.load import load_source
from cgcompile.offline.decompose.decompositions import gru_cell, lstm_cell, window
from cgcompile.offline.decompose.reductions import average_pool
from cgcompile.offline.lower.coverage import operators_without_kernel
from cgcompile.offline.lower.inductor import lower_key
from cgcompile.targets.architectures import arch

H200 = arch("sm_90")


class Of(nn.Module):
    """A function of an input and of a weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.eye(8) * 2)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.weight)


def spectrogram(x: Tensor) -> Tensor:
    return torch.stft(x, 8, 4, window=torch.hann_window(8), return_complex=True)


CASES: dict[str, tuple[str, Callable[[Tensor, Tensor], Any]]] = {
    "a product": ("", lambda x, w: F.gelu(x @ w)),
    "a sum along an axis": ("", lambda x, w: x.cumsum(-1).logcumsumexp(-1)),
    "order": ("", lambda x, w: x.sort(-1).values + x.topk(2).values.sum()),
    "the likeliest words": ("", lambda x, w: x + torch.cat([x.flatten()] * 30_000).topk(20).values.sum()),
    "attention": ("", lambda x, w: F.scaled_dot_product_attention(x[None], w[None, :, :], w[None])),
    "of a weight alone": ("", lambda x, w: x @ torch.linalg.matrix_exp(w)),
    "a part of a result": ("aten.linalg_inv", lambda x, w: x @ torch.linalg.inv(w)),
    "a cell": ("", lambda x, w: torch.ops.aten.lstm_cell(x, [x, x], *[torch.cat([w] * 4)] * 2, *[torch.cat([w[0]] * 4)] * 2)[0]),
    "a gated cell": ("", lambda x, w: torch.gru_cell(x, x, *[torch.cat([w] * 3)] * 2, *[torch.cat([w[0]] * 3)] * 2)),
    "a pool": ("", lambda x, w: F.adaptive_avg_pool3d(x.view(1, 1, -1, 4, 4), (1, 3, 2)).sum() + x),
    "a pool of maxima": ("", lambda x, w: F.adaptive_max_pool3d(x.view(1, 1, -1, 4, 4), (1, 3, 2)).sum() + x),
    "large windows that overlap": ("", lambda x, w: F.avg_pool2d(x[None] @ w, (4, 7), 1, (2, 3)).sum() + x),
    "a transform and back": ("", lambda x, w: x + torch.istft(torch.stft(x, 4, 2, return_complex=True, center=False), 4, 2)[:, :1]),
    "truth of all": ("", lambda x, w: x * torch.ops.aten._is_all_true(x > 0) * torch.ops.aten._is_any_true(w > 0)),
    "samples of a grid": (
        "",
        lambda x, w: x + F.grid_sample(w[None, None], x[None, :, :4, None].expand(1, -1, 4, 2), align_corners=True).sum(),
    ),
    "windows": ("", lambda x, w: x * torch.hann_window(8) * torch.hamming_window(8, periodic=False)),
    "frequencies": ("", lambda x, w: x * torch.fft.fftfreq(8) + torch.fft.rfftfreq(14, 0.5)),
    "its own statistics": (
        "",
        lambda x, w: x @ F.batch_norm(w[None], None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(w),
    ),
    "rrelu": ("", lambda x, w: F.rrelu(x)),
    "batches": ("", lambda x, w: torch.addbmm(x, x[None], w[None], beta=0.5)),
    "fft": ("", lambda x, w: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(w[:1]).conj(), n=8)),
    "a spectrogram": ("", lambda x, w: torch.view_as_real(spectrogram(x)).transpose(1, 2).view(-1, 3, 10) @ w[:5].repeat(2, 1)),
    "complex": ("", lambda x, w: torch.complex(x, x).abs()),
    "a complex result": ("aten.fft_rfft", lambda x, w: torch.fft.rfft(x)),
    "a complex inverse": ("aten.linalg_inv", lambda x, w: torch.linalg.inv(torch.complex(w, w)).real @ x.T),
    "median": ("aten.median.dim", lambda x, w: x.median(-1).values),
    "digamma": ("aten.digamma", lambda x, w: torch.digamma(x)),
    "solve": ("aten.linalg_solve", lambda x, w: torch.linalg.solve(w + x.T @ x, w)),
    "a branch": (
        "aten.median.dim",
        lambda x, w: torch.cond(x.sum() > 0, lambda x: x.median(-1).values, lambda x: x.sum(-1), (x,)),
    ),
    "a scatter": ("", lambda x, w: x.scatter_reduce(1, (x > 0).long(), x, "amax")),
    "a triangle": ("", lambda x, w: x + torch.linalg.solve_triangular((x.T @ x).tril(), w, upper=False).sum()),
    "an order statistic": ("", lambda x, w: x.kthvalue(2).values),
    "short products": ("", lambda x, w: x @ w + (2 * x) @ w.T),
    "a complex weight": ("", lambda x, w: (torch.complex(x, x) @ torch.complex(w, w)).real),
}
"""The `--fallback-op` value for the first operation without a kernel, or ""."""


def inputs(batch: int) -> tuple[Tensor]:
    return (torch.randn(batch, 8),)


@pytest.mark.parametrize("name", CASES)
def test_check_names_what_lowering_refuses(name: str) -> None:
    expected, function = CASES[name]
    program = export(load_source(Of(function).eval(), inputs), {"batch": (4, 8)}).programs.first
    findings = operators_without_kernel(program, (), H200)
    assert [bool(findings), expected in "".join(finding.fix for finding in findings)] == [bool(expected), True]
    assert all(finding.where.startswith("tests/cpu/offline/test_coverage.py:") for finding in findings)
    try:
        lower_key(program, (4,), inputs(4), H200)
    except BuildError as error:
        assert expected, error
        assert error.exit_code == 1
    else:
        assert not expected


@pytest.mark.parametrize("biased", [True, False])
def test_cells_are_what_pytorch_computes(biased: bool) -> None:
    x, hidden, state = torch.randn(3, 4, 5)
    for gates, cell, decomp, states in ((3, torch.gru_cell, gru_cell, hidden), (4, torch.lstm_cell, lstm_cell, (hidden, state))):
        weights = [torch.randn(gates * 5, 5) for _ in range(2)] + [torch.randn(gates * 5) for _ in range(2 * biased)]
        torch.testing.assert_close(decomp(x, states, *weights), cell(x, states, *weights))


@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_windows_are_what_pytorch_computes(length: int) -> None:
    for decomp, torchs in ((window(0.5), torch.hann_window), (window(0.54), torch.hamming_window)):
        for periodic in (True, False):
            torch.testing.assert_close(decomp(length, periodic), torchs(length, periodic))


@pytest.mark.parametrize("ceil_mode", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_averages_of_large_windows_are_what_pytorch_computes(ceil_mode: bool, inner: bool) -> None:
    x = torch.randn(2, 3, 12, 13)
    for kernel, stride, padding in (((7, 7), (1, 1), (0, 0)), ((9, 3), (2, 3), (3, 1)), ((6, 6), (5, 5), (2, 2))):
        settings = (kernel, stride, padding, ceil_mode, inner)
        torch.testing.assert_close(average_pool(x, *settings), F.avg_pool2d(x, *settings))
    given3 = ((2, 7, 7), (1, 1, 1), (1, 0, 3), ceil_mode, inner, 5)
    torch.testing.assert_close(average_pool(x, *given3), F.avg_pool3d(x, *given3))
    half = x.to(torch.bfloat16)
    torch.testing.assert_close(average_pool(half, (7, 7), (1, 1)), F.avg_pool2d(half, (7, 7), (1, 1)))


def test_what_is_on_the_host_needs_no_kernel() -> None:
    program = export(load_source(Of(CASES["median"][1]).eval(), inputs), {"batch": (4, 8)}).programs.first
    (node,) = [node.name for node in program.graph.nodes if "median" in str(node.target)]
    assert not operators_without_kernel(program, (node,), H200)


def test_an_assertion_has_no_kernel_and_the_host_checks_it() -> None:
    def asserting(x: Tensor, w: Tensor) -> Tensor:
        torch._assert_async((x < 9).all())
        return x @ w

    (finding,) = cgcompile.check(Of(asserting).eval(), inputs, sizes=[4], target="sm_90").findings
    assert (finding.rule, finding.severity) == ("tensor-assertion", "host")
    assert not cgcompile.check(Of(asserting).eval(), inputs, sizes=[4], target="cuda").findings, "a capture has a kernel"


def test_the_hint_names_all_operators_at_once() -> None:
    """If one operation on complex numbers runs on the host, the neighbouring ones must run there too."""

    def parts(x: Tensor, w: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x @ w)
        spectrum[:, 1] = 0
        spectrum[:, 2:] = spectrum[:, 2:].tan()
        return torch.fft.irfft(spectrum, n=8)

    report = cgcompile.check(Of(parts).eval(), inputs, sizes=[4], target="sm_90")
    assert {finding.rule for finding in report.findings} == {"operator-without-kernel"}
    hints = hinted(report.findings[0].fix)
    assert {"aten.tan", "aten.fft_rfft"} <= {*hints}
    assert not cgcompile.check(Of(parts).eval(), inputs, sizes=[4], target="sm_90", fallback_ops=hints).refused


def test_a_complex_input_is_refused_where_a_complex_weight_is_not() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, dtype=torch.complex64))

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            return (x * self.weight).real + (x * z).real

    def complex_inputs(batch: int) -> tuple[Tensor, ...]:
        return torch.randn(batch, 8), torch.randn(8, dtype=torch.complex64)

    program = export(load_source(Turned().eval(), complex_inputs), {"batch": (4, 8)}).programs.first
    (finding,) = operators_without_kernel(program, (), H200)
    assert "aten.mul" in finding.fix


def model_of(name: str) -> Callable[..., Any]:
    return lambda **options: cgcompile.check(Of(CASES[name][1]).eval(), inputs, sizes=[4, 8], **options)


def test_the_report_of_a_target_has_the_rules_of_its_recorder() -> None:
    check = model_of("median")
    assert not check(target="cpu").refused and not check(target="cuda").refused
    report = check(target="sm_90")
    (refusal,) = [finding for finding in report.findings if finding.severity == "refuse"]
    assert (refusal.rule, refusal.message) == ("operator-without-kernel", "median has no Triton kernel")
    assert refusal.fix.endswith("--fallback-op aten.median.dim")
    assert not check(target="sm_90", fallback_ops=hinted(refusal.fix)).refused, "what the hint says works when pasted"


def hinted(fix: str) -> Sequence[str]:
    return [word for word in fix.split() if word.startswith("aten.")]
