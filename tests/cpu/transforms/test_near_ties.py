"""Indices are right if the floats at them are equal within tolerance; later values are compared with those of eager PyTorch after
the same choice."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from cgcompile.model.flat_module import ProgramModule
from cgcompile.transforms.error_bounds import ErrorBound
from cgcompile.transforms.near_ties.judge import Run, Seen, Verdict, indices_text, judged, judged_beside, near_ties
from cgcompile.transforms.rng.rewrite import with_generator

ROWS, WORDS = 4, 64


class Scores(nn.Module):
    """Scores of words in nearly equal pairs: the score of word 2n is greater than that of word 2n + 1 by `ahead`, which may be
    negative."""

    def __init__(self, ahead: float, then: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        base = torch.stack([torch.randperm(WORDS // 2, generator=generator) for _ in range(ROWS)]).float()
        pairs = base.repeat_interleave(2, 1) - torch.arange(WORDS).remainder(2) * ahead
        self.register_buffer("scores", pairs)
        self.register_buffer("table", torch.randn(WORDS, 8, generator=generator))
        self.then = then

    def forward(self, x: Tensor) -> object:
        outputs = self.then(self, self.scores * x)
        return outputs if isinstance(outputs, tuple) else (outputs,)


TIE, CLEAR = 1e-4, 0.5
"""The tolerance of float32 is 1e-4 of the largest score, 31."""


@cache
def run_of(then: Callable[..., object], ahead: float = TIE, draws: bool = False) -> Run:
    """Runs the model in eager PyTorch, as a build does with the exported program."""
    with torch.no_grad():
        program = torch.export.export(Scores(ahead, then).eval(), (torch.ones(1),))
    module = ProgramModule([with_generator(program) if draws else program])

    def run() -> Seen:
        try:
            outputs = tuple([tensor.clone() for tensor in module(torch.ones(1))])
        finally:
            module.snapshot.restore()
        return Seen(calls=(outputs,), compared=outputs)

    return run


def bounds(seen: Seen) -> list[ErrorBound]:
    exact = [not tensor.is_floating_point() for tensor in seen.compared]
    return [ErrorBound(title=f"output {n}", bound=0.0 if flag else 1e-4, exact=flag, rounded=True) for n, flag in enumerate(exact)]


def verdict(then: Callable[..., object], ahead: float) -> Verdict | None:
    """Returns the verdict for a program whose pairs have the other order: `ahead` is a rounding error or more."""
    got = run_of(then, -ahead)()
    return judged(run_of(then, ahead), got, bounds(got))


def changed(then: Callable[..., object], change: Callable[[tuple[Tensor, ...]], None]) -> Verdict | None:
    """Returns the verdict for a wrong program: eager PyTorch's outputs, changed."""
    run = run_of(then)
    outputs = tuple([tensor.clone() for tensor in run().compared])
    change(outputs)
    return judged(run, Seen(calls=(outputs,), compared=outputs), bounds(Seen(calls=(), compared=outputs)))


def argmax(module: nn.Module, y: Tensor) -> object:
    token = y.argmax(-1)
    return token + 1000, module.table[token], y.log_softmax(-1).gather(1, token[:, None])


def topk(module: nn.Module, y: Tensor) -> object:
    values, indices = y.topk(4)
    return values, indices


def sort(module: nn.Module, y: Tensor) -> object:
    return y.sort(-1, descending=True)[1][:, :6].int(), y.argsort(0)


def moved(module: nn.Module, y: Tensor) -> object:
    """Passes the index through views, casts, a gather, a filter, a concatenation, and an in-place write."""
    best = y.max(1)
    words = torch.where(best.values > 0, best.indices, -1)
    kept = torch.zeros(2 * ROWS, dtype=torch.int64)
    kept[::2] = 2 * words.flip(0)
    return (
        torch.cat([words.int().unsqueeze(1), (y + 20).argmin(1, keepdim=True).int()], 1),
        kept,
        words.gather(0, torch.tensor([3, 0])),
    )


def loop(module: nn.Module, y: Tensor) -> object:
    """Each token determines the next scores."""

    def more(turn: Tensor, token: Tensor, tokens: Tensor) -> Tensor:
        return turn < 5

    def step(turn: Tensor, token: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        new = (y + module.table[token].sum(1, keepdim=True) * torch.arange(WORDS).sin()).argmax(-1)
        return turn + 1, new, torch.where(torch.arange(5) == turn, new[:, None], tokens)

    begin = (torch.tensor(0), y.argmax(-1), torch.full((ROWS, 5), -1))
    return torch.while_loop(more, step, begin)[2]


def hidden(module: nn.Module, y: Tensor) -> object:
    """The index itself is not an output."""
    return module.table[y[:1].argmax(-1)]


def beams(module: nn.Module, y: Tensor) -> object:
    """Two outputs are made from an index of one row; neither is the index."""
    best = (y + torch.arange(ROWS)[:, None] / 4).reshape(1, -1).topk(3).indices
    return best // WORDS, best % WORDS


def filtered(module: nn.Module, y: Tensor) -> object:
    """Filters words whose scores are below the eighth score; then other scores select a word. One word is at the threshold."""
    least = y.topk(7).values[:, -1:]
    return (torch.where(y >= least, -y, float("-inf")) + 0 * y).argmax(-1)


def narrowed(module: nn.Module, y: Tensor) -> object:
    """The compiled program filters the word with the best score, and keeps the word that it selects."""
    limit = y[:, :1] * 0 + 28
    return torch.where(y <= limit, y + 0.6 * torch.arange(WORDS).remainder(2), float("-inf")).argmax(-1)


def drawn(module: nn.Module, y: Tensor) -> object:
    return torch.multinomial((y / 4).softmax(-1), 8, replacement=True)


def raced(module: nn.Module, y: Tensor) -> object:
    return torch.multinomial((y / 4).softmax(-1), 3)


@pytest.mark.parametrize("then", [argmax, topk, sort, moved, loop, hidden, beams], ids=lambda function: function.__name__)
def test_a_choice_among_equal_floats_is_right(then: Callable[..., object]) -> None:
    got = run_of(then, -TIE)()
    assert any(not torch.equal(one, other) for one, other in zip(got.compared, run_of(then)().compared, strict=True))
    assert verdict(then, TIE)


@pytest.mark.parametrize(
    "then", [argmax, topk, sort, moved, loop, hidden, beams, filtered, narrowed], ids=lambda function: function.__name__
)
def test_a_choice_of_less_is_wrong(then: Callable[..., object]) -> None:
    assert verdict(then, CLEAR) is None


@pytest.mark.parametrize("then", [filtered, narrowed])
def test_a_filter_that_rounding_decides_explains_a_choice(then: Callable[..., object]) -> None:
    assert not torch.equal(run_of(then, -TIE)().compared[0], run_of(then)().compared[0])
    assert verdict(then, TIE)


def test_the_report_counts_indices_that_differ() -> None:
    got = run_of(argmax, -TIE)()
    judgement = judged(run_of(argmax), got, bounds(got))
    assert judgement and judgement.indices == ((4, 4), (0, 0), (0, 0))
    assert torch.equal(judgement.expected[0], got.compared[0]) and torch.allclose(judgement.expected[1], got.compared[1])
    text = "output 0: 4 of 4 indices differ from eager PyTorch's where the values are equal within tolerance"
    assert indices_text(bounds(got), [judgement.indices]) == text


def test_the_share_of_indices_with_others_that_are_as_good() -> None:
    def picked(module: nn.Module, y: Tensor) -> object:
        shift = 0.4 * torch.arange(ROWS)[:, None].clamp(max=1)  # all rows except the first have no ties
        apart = y + shift * torch.arange(WORDS).remainder(2)
        near = torch.cat([apart.argmax(-1), torch.arange(ROWS)])  # the second half are no indices
        return near, apart.topk(4)[1].int(), y.max(-1).values, (y * 10).round().long()

    assert near_ties(run_of(picked)) == (1 / (2 * ROWS), 1 / ROWS, 0.0, 0.0)
    assert near_ties(run_of(picked, CLEAR)) == (0.0, 0.0, 0.0, 0.0)
    assert near_ties(run_of(picked, CLEAR), floor=0.1) == (0.5, 1.0, 0.0, 0.0)


def test_the_share_of_draws_at_the_edges_of_intervals() -> None:
    def searched(module: nn.Module, y: Tensor) -> object:
        sums = (y[:1] * 0 + 1).cumsum(-1)
        return torch.searchsorted(sums, torch.tensor([[3.0, 3.5, 0.0, 64.001, 70.0]]))

    assert near_ties(run_of(searched)) == (2 / 5,)


def second_best(outputs: tuple[Tensor, ...]) -> None:
    outputs[1][:, 0] = outputs[1][:, 2]


def twice(outputs: tuple[Tensor, ...]) -> None:
    outputs[1][1, 1] = outputs[1][1, 0]


def next_one(outputs: tuple[Tensor, ...]) -> None:
    outputs[1][:] += 1


def outside(outputs: tuple[Tensor, ...]) -> None:
    outputs[1][0, 0] = WORDS


@pytest.mark.parametrize("change", [second_best, twice, next_one, outside], ids=lambda function: function.__name__)
def test_mistakes_of_topk_are_refused(change: Callable[[tuple[Tensor, ...]], None]) -> None:
    assert changed(topk, lambda outputs: None)
    assert changed(topk, change) is None


def test_what_follows_from_a_choice_has_to_follow_from_it() -> None:
    def other(outputs: tuple[Tensor, ...]) -> None:
        outputs[1][0] = outputs[1][1]

    assert changed(argmax, other) is None


@pytest.mark.parametrize("then", [drawn, raced], ids=lambda function: function.__name__)
def test_a_draw_is_judged_by_its_random_number(then: Callable[..., object]) -> None:
    run = run_of(then, draws=True)
    got = run()
    assert judged(run, got, bounds(got))
    ignored = tuple([tensor.flip(0) for tensor in got.compared])
    assert not torch.equal(ignored[0], got.compared[0])
    assert judged(run, Seen(calls=(ignored,), compared=ignored), bounds(got)) is None


def test_a_draw_at_the_edge_of_an_interval_may_fall_on_either_side() -> None:
    def searched(module: nn.Module, y: Tensor) -> object:
        sums = y.abs().cumsum(-1)
        middle = sums[:, 9:10] + 0.01 * module.table[0, 0].sign()
        return torch.searchsorted(sums, middle), (sums <= middle).sum(-1)

    def other(outputs: tuple[Tensor, ...]) -> None:
        outputs[0][:] = 9 if int(outputs[0][0]) == 10 else 10
        outputs[1][:] = outputs[0][:, 0]

    def further(tensors: tuple[Tensor, ...]) -> None:
        tensors[0][:] = 13

    assert changed(searched, other)
    assert changed(searched, further) is None


def test_integers_of_another_origin_have_to_be_equal() -> None:
    def rounded(module: nn.Module, y: Tensor) -> object:
        return y.argmax(-1), (y * 10).round().long()

    def other(outputs: tuple[Tensor, ...]) -> None:
        outputs[1][0, 0] += 1

    assert changed(rounded, other) is None


def test_the_users_model_has_to_agree_too() -> None:
    got = run_of(argmax, -TIE)()
    frozen = tuple([tensor + 1 for tensor in got.compared])
    assert judged_beside(run_of(argmax), run_of(argmax)().compared, got, bounds(got))
    assert judged_beside(run_of(argmax), frozen, got, bounds(got)) is None


def test_a_mask_hides_nothing_of_the_rest_of_its_row() -> None:
    """The largest value of a mask does not hide how close the others are."""

    def masked(module: nn.Module, y: Tensor) -> object:
        return y.masked_fill(torch.arange(WORDS) > 1, torch.finfo(torch.float32).min).topk(4).indices

    def other(outputs: tuple[Tensor, ...]) -> None:
        outputs[0][:, 1], outputs[0][:, 2] = outputs[0][:, 2].clone(), outputs[0][:, 1].clone()

    assert changed(masked, other) is None
