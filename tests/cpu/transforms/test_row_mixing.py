"""Models with operators that mix rows are padded only if padding can change no result, for any input, not only for the example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode

from cgcompile.transforms.padding import operator_trials
from tests.cpu.models import rows
from tests.cpu.transforms.test_padding_proof import decide

Function = Callable[..., torch.Tensor]


class Over(nn.Module):
    """A function of the inputs and of a module that has a layer with a bias (`biased`) and one without (`plain`)."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.biased = nn.Linear(4, 4)
            self.plain = nn.Linear(4, 4, bias=False)
            self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.function = function
        self.eval()

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.function(self, *tensors)


def signed(batch: int) -> torch.Tensor:
    return torch.randn(batch, 4)


def masked(batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, seq, 4), torch.ones(batch, seq, dtype=torch.int64)


def unmasked(batch: int, seq: int) -> torch.Tensor:
    return torch.randn(batch, seq, 4)


def gate(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = m.biased(x)
    return torch.where(x.sum() > 0, x * 2, x)


def loop(m: Any, x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops import while_loop

    return while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, m.plain(y)), (torch.zeros((), dtype=torch.int64), x))[1]


def loop_over_a_sum(m: Any, x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops import while_loop

    return while_loop(lambda i, y: (i < 2) & (y.sum() < 9), lambda i, y: (i + 1, y + 1), (torch.zeros((), dtype=torch.int64), x))[1]


BATCH: dict[str, tuple[Function, str, bool]] = {
    "a threshold on a sum that biases are added to": (gate, "no", False),
    "a threshold on a sum of zeros": (lambda m, x: torch.where(m.plain(x).sum() > 0, x * 2, x), "zeros", False),
    "a threshold on a maximum": (lambda m, x: torch.where(x.max() > 3, x * 2, x), "no", False),
    "a threshold on a mean": (lambda m, x: torch.where(x.mean() > 9, x * 2, x), "no", False),
    "a threshold on a minimum": (lambda m, x: torch.where(x.min() > -9, x * 2, x), "no", False),
    "where any": (lambda m, x: torch.where((x > 9).any(), x * 2, x), "zeros", False),
    "where any is of the padding, too": (lambda m, x: torch.where((x > -9).any(), x * 2, x), "no", False),
    "where any is a number": (lambda m, x: torch.where((x.long() == 7).any(), x * 2, x), "zeros", False),
    "where all": (lambda m, x: torch.where((x > 9).all(), x * 2, x), "no", False),
    "argmax": (lambda m, x: x * (x.sum(1).argmax() > 9), "no", False),
    "largest": (lambda m, x: x * (x.topk(1, 0).values > 9), "no", False),
    "normalized by the batch": (lambda m, x: F.batch_norm(x, None, None, training=True), "no", False),
    "normalized": (lambda m, x: F.batch_norm(x, m.biased.bias, m.biased.bias + 9), "rows", True),
    "length": (lambda m, x: x / (1 + x.norm()), "zeros", False),
    "in place": (lambda m, x: x.clone().add_(1).relu_(), "rows", True),
    "cond": (lambda m, x: torch.cond(m.biased(x).sum() > 0, lambda y: y * 2, lambda y: y + 1, (x,)), "no", False),
    "cond within a row": (lambda m, x: torch.cond(m.plain(x).sum() > 9, lambda y: y * 2, lambda y: y + 1, (x,)), "zeros", False),
    "loop": (loop, "rows", True),
    "loop over a sum": (loop_over_a_sum, "no", False),
}


@pytest.mark.parametrize("case", BATCH)
def test_batch(case: str) -> None:
    function, pad, chunk = BATCH[case]
    verdict = decide(Over(function), signed, {"batch": (2, 4)})["batch"]
    assert verdict[:2] == (pad, chunk), verdict[2]
    if pad != "rows":
        assert " combines elements along batch (" in verdict[2] or "changes by" in verdict[2] or "fails" in verdict[2]


@pytest.mark.parametrize("case", BATCH)
def test_what_is_believed_of_large_operators_hides_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_trials, "LARGE", 1)
    function, pad, chunk = BATCH[case]
    assert decide(Over(function), signed, {"batch": (2, 4)})["batch"][:2] == (pad, chunk)


KNOWN: dict[str, tuple[Function, str]] = {
    "linear": (lambda m, x: m.biased(x), "rows"),
    "linear over rows": (lambda m, x: F.linear(x.T, torch.ones(4, x.shape[0])).T.sum(0) * x, "zeros"),
    "matmul": (lambda m, x: x[:, None] @ x[:, :, None], "rows"),
    "matmul of rows": (lambda m, x: (x.T @ x).sum() * x, "zeros"),
    "matmul with a weight": (lambda m, x: x @ m.plain.weight, "rows"),
    "addmm": (lambda m, x: torch.addmm(m.biased.bias, x, m.plain.weight), "rows"),
    "conv1d": (lambda m, x: F.conv1d(x[:, None], m.plain.weight[:, None], padding=2).flatten(1), "rows"),
    "conv1d along rows": (lambda m, x: F.conv1d(x.T[:, None], m.plain.weight[:1, None, :3], padding=1)[:, 0].T, "zeros"),
    "conv1d along rows alone": (lambda m, x: F.conv1d(x.T, m.plain.weight[..., None]).T, "rows"),
    "softmax": (lambda m, x: x.softmax(1), "rows"),
    "softmax of rows": (lambda m, x: x.softmax(-2), "no"),
    "layer_norm": (lambda m, x: F.layer_norm(x, (4,)), "rows"),
    "layer_norm of rows": (lambda m, x: F.layer_norm(x.T, x.shape[:1]).T, "no"),
    "batch_norm": (lambda m, x: F.batch_norm(x, m.biased.bias, m.biased.bias + 9), "rows"),
    "batch_norm of rows": (lambda m, x: F.batch_norm(x, None, None, training=True), "no"),
    "attention": (lambda m, x: F.scaled_dot_product_attention(*[x[:, None, :, None]] * 3).flatten(1), "rows"),
    "attention of rows": (lambda m, x: F.scaled_dot_product_attention(x, x, x), "no"),
    "max_pool1d": (lambda m, x: F.max_pool1d(x[:, None], 2)[:, 0], "rows"),
    "max_pool1d of rows": (lambda m, x: F.max_pool1d(x.T, 3, stride=1, padding=1).T, "no"),
    "avg_pool2d": (lambda m, x: F.avg_pool2d(x.view(-1, 1, 2, 2), 2).flatten(1), "rows"),
    "adaptive_avg_pool1d of rows": (lambda m, x: F.adaptive_avg_pool1d(x.T, 1).T * x, "no"),
    "cat": (lambda m, x: torch.cat([x, x], 1), "rows"),
    "cat of rows": (lambda m, x: torch.cat([x, x]), "no"),
    "roll": (lambda m, x: x.roll(1, 1), "rows"),
    "roll of rows": (lambda m, x: x.roll(1, 0), "no"),
    "the last row": (lambda m, x: x * x[-1], "no"),
    "rows turned over behind a view": (lambda m, x: x.view(-1, 2, 2).transpose(1, 2).flip(0).reshape(-1, 4), "no"),
    "moved and back": (lambda m, x: x.T.unsqueeze(0).expand(2, -1, -1).permute(2, 0, 1).flatten(1), "rows"),
    "split": (lambda m, x: torch.stack(x.split(2, 1), 2).flatten(1), "rows"),
}  # fmt: skip


@pytest.mark.parametrize("case", KNOWN)
def test_what_is_known_of_operators_is_what_trying_them_shows(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, pad = KNOWN[case]
    for large in (2**20, 1):
        monkeypatch.setattr(operator_trials, "LARGE", large)
        verdict = decide(Over(function), signed, {"batch": (2, 4)})["batch"]
        assert verdict[0] == pad, verdict[2]


class Calls(TorchFunctionMode):
    """Counts calls of a function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.calls = name, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += getattr(function, "__name__", "").partition(".")[0] == self.name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "function", "spared"),
    [("tanh", lambda m, x: x.tanh(), 3), ("linear", lambda m, x: m.biased(x), 3), ("roll", lambda m, x: x.roll(1, 1), 2)],
)
def test_large_operators_that_join_nothing_are_not_tried(
    name: str, function: Function, spared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []
    for large in (2**20, 1):
        monkeypatch.setattr(operator_trials, "LARGE", large)
        with Calls(name) as calls:
            assert decide(Over(function), signed, {"batch": (2, 4)})["batch"][:2] == ("rows", True)
        counted.append(calls.calls)
    assert counted[0] - counted[1] == 2 * spared * 2, "so many other values at two sizes, at the beginning and the end of a frame"


def test_what_is_large_and_joined_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models combine elements of rows with a large tensor whose rows are not rows of the call, or are in another order."""
    monkeypatch.setattr(operator_trials, "LARGE", 1)
    for function in (lambda m, x: x * x.flip(0), lambda m, x: x * torch.arange(x.shape[0]).flip(0)[:, None]):
        assert decide(Over(function), signed, {"batch": (2, 4)})["batch"][0] == "no"


def attention(score: Callable[..., torch.Tensor]) -> Function:
    """Two layers: in the second one, padded positions hold values that depend on the call."""

    def function(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            y = m.biased(x)
            x = score(y, m.plain(x), y, mask) + x
        return x

    return function


def by_infinity(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT).masked_fill(mask[:, None] == 0, float("-inf")).softmax(-1) @ v


def by_ten_thousand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT + (1.0 - mask[:, None]) * -10000.0).softmax(-1) @ v


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=mask[:, None, None].bool())[:, 0]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT).masked_fill(~torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril(), float("-inf")).softmax(-1) @ v


def forgotten(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT).softmax(-1) @ v


def saturated(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Padded scores are low in the example, but another call may have lower ones."""
    return (x.abs().sum(-1) * 100).softmax(-1)[..., None] * x


SEQ: dict[str, tuple[Function, Callable[..., object], str, bool]] = {
    "masked by -inf": (attention(by_infinity), masked, "zeros", False),
    "masked by -10000": (attention(by_ten_thousand), masked, "zeros", False),
    "masked and fused": (attention(fused), masked, "zeros", False),
    "causal": (attention(causal), masked, "rows", False),
    "not masked": (attention(forgotten), masked, "no", False),
    "saturated": (saturated, masked, "no", False),
    "cumsum": (lambda m, x: x.cumsum(1), unmasked, "rows", False),
    "lstm": (lambda m, x: m.lstm(x)[0], unmasked, "rows", False),
    "lstm's last state": (lambda m, x: m.lstm(x)[1][0], unmasked, "no", False),
    "masked maximum": (
        lambda m, x, mask: m.biased(x).masked_fill(mask[..., None] == 0, float("-inf")).amax(1), masked, "zeros", False,
    ),
    "maximum of zeros": (lambda m, x, mask: ((m.biased(x) + 9) * mask[..., None]).amax(1), masked, "no", False),
    "the last that a mask keeps": (
        lambda m, x, mask: x[torch.arange(x.shape[0]), mask.sum(1) - 1], masked, "zeros", False,
    ),
    "rows as one axis": (lambda m, x: m.biased(x.reshape(-1, 4)).view(x.shape), unmasked, "rows", True),
    "rows as one axis, centred": (
        lambda m, x: (lambda y: torch.where(y.sum() > 99, y, x.reshape(-1, 4)))(m.biased(x.reshape(-1, 4))).view(x.shape),
        unmasked, "no", False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("large", [2**20, 1])
@pytest.mark.parametrize("case", SEQ)
def test_sequence(case: str, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_trials, "LARGE", large)
    function, inputs, pad, chunk = SEQ[case]
    verdict = decide(Over(function), inputs, {"seq": (5,), "batch": (2,)})["seq"]
    assert verdict[:2] == (pad, chunk), verdict[2]


class Layer(torch.nn.Module):
    """PyTorch's masked attention, with a width at which kernels for two sizes give different bits. Its program has views that
    require one memory order of the axes."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = torch.nn.MultiheadAttention(64, 4, batch_first=True)
        self.layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) if whole else None

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.layer is not None:
            return self.layer(x, src_key_padding_mask=~mask)
        return self.attention(x, x, x, key_padding_mask=~mask, need_weights=False)[0]


@pytest.mark.parametrize("whole", [False, True])
def test_attention_of_torch_is_padded_behind_its_mask(whole: bool) -> None:
    def inputs(batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch, seq, 64), torch.ones(batch, seq, dtype=torch.bool)

    model = Layer(whole).eval()
    verdicts = decide(model, inputs, {"batch": (1, 8), "seq": (16, 64)})
    assert verdicts["batch"][:2] == ("rows", True), verdicts["batch"][2]
    assert verdicts["seq"][:2] == ("zeros", False), verdicts["seq"][2]
    x, mask = inputs(3, 9)
    with torch.no_grad():
        got = model(F.pad(x, (0, 0, 0, 7, 0, 5)), F.pad(mask, (0, 7, 0, 5)))[:3, :9]
        torch.testing.assert_close(got, model(x, mask), rtol=1e-5, atol=1e-5)


def test_the_operator_is_named_with_its_line() -> None:
    reason = decide(Over(gate), signed, {"batch": (1, 4)})["batch"][2]
    assert reason.startswith("sum combines elements along batch (") and "test_row_mixing.py:" in reason
    assert reason.endswith("return torch.where(x.sum() > 0, x * 2, x)); padding with zeros may change a result")


def test_a_dtype_that_cannot_be_tried_is_not_padded() -> None:
    def halved(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x.abs().to(torch.uint16).to(torch.float32) * 0.5

    pad, chunk, reason = decide(Over(halved), signed, {"batch": (2, 4)})["batch"]
    assert (pad, chunk) == ("no", False) and "cannot be compared at two sizes (" in reason


def test_the_verdict_is_the_same_whatever_is_drawn() -> None:
    def drawn(scale: float, shift: float) -> Callable[[int], torch.Tensor]:
        return lambda batch: torch.randn(batch, 4) * scale + shift

    verdicts = {
        decide(Over(gate), drawn(scale, shift), {"batch": (1, 4)})["batch"][0] for scale in (0.01, 50) for shift in (0, -9, 9)
    }
    assert verdicts == {"no"}


FIRST: dict[str, Function] = {
    "x": lambda m, x: x,
    "biased": lambda m, x: m.biased(x),
    "plain": lambda m, x: m.plain(x),
    "relu": lambda m, x: m.plain(x).relu(),
    "low": lambda m, x: x.masked_fill(x == 0, -1e30),
    "exp": lambda m, x: x.clamp(max=9).exp(),
}
JOINS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda y: y.sum(0),
    "mean": lambda y: y.mean(0),
    "amax": lambda y: y.amax(0),
    "amin": lambda y: y.amin(0),
    "max of all": lambda y: y.max(),
    "prod": lambda y: y.prod(0),
    "norm": lambda y: y.norm(),
    "var": lambda y: y.var(0, correction=0),
    "any": lambda y: (y > 1).any().float(),
    "all": lambda y: (y > -1).all().float(),
    "argmin": lambda y: y.argmin(0).float(),
    "count": lambda y: (y > 2).sum(0).float(),
    "logsumexp": lambda y: y.logsumexp(0),
    "softmax": lambda y: y.softmax(0),
    "cumsum": lambda y: y.cumsum(0),
    "cummin": lambda y: y.cummin(0).values,
    "sorted": lambda y: y.sort(0).values,
    "largest": lambda y: y.topk(1, 0).values,
    "gram": lambda y: (y.T @ y).sum(0),
    "first": lambda y: y[0],
    "last": lambda y: y[-1],
}
LAST: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gated": lambda x, j: torch.where(j > 0.5, x * 2, x),
    "far": lambda x, j: torch.where(j > 1e3, x, x + 1),
    "added": lambda x, j: x + j,
    "weak": lambda x, j: x + (j * 1e-3).tanh(),
}


@settings(max_examples=14, deadline=None)
@given(st.sampled_from(sorted(FIRST)), st.sampled_from(sorted(JOINS)), st.sampled_from(sorted(LAST)), st.booleans())
def test_what_is_padded_is_right_for_every_call(first: str, join: str, last: str, positive: bool) -> None:
    model = Over(lambda m, x: LAST[last](x, JOINS[join](FIRST[first](m, x))))
    pad = decide(model, rows if positive else signed, {"batch": (5,)})["batch"][0]
    if pad == "no":
        return
    generator = torch.Generator().manual_seed(0)
    for call in range(200):
        size = 1 + call % 4
        x = torch.randn(size, 4, generator=generator) * 10.0 ** (call % 5 - 2) + (call % 3 - 1) * (call % 7)
        with torch.no_grad():
            want, got = model(x), model(torch.cat([x, torch.zeros(5 - size, x.shape[1])]))[:size]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()), equal_nan=True)
