"""Verdicts of the padding proof on models with known answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cgbundle.format.schema import Dimension
from cgcompile.export.export import export
from cgcompile.export.functionalization import functional
from cgcompile.export.signature.signature import describe_signature
from cgcompile.model.load import load_source
from cgcompile.pipeline.build import _padded
from cgcompile.transforms.padding import proof
from cgcompile.transforms.padding.proof import prove_padding
from cgcompile.transforms.prepared import Prepared, prepare
from cgcompile.util.padding_reasons import BAG_CURE, short_cure
from tests.cpu.models import Batched, rows

Sizes = dict[str, tuple[int, ...]]


def proved(model: torch.nn.Module, inputs: Callable[..., object], sizes: Sizes) -> tuple[Prepared, tuple[Dimension, ...]]:
    source = load_source(model, inputs)
    exported = export(source, sizes)
    functionalized = {key: functional(program) for key, program in exported.programs.distinct}
    prepared = prepare(exported, describe_signature(exported), functionalized, markers=False)
    return prepared, prove_padding(prepared, lambda text: None)


def decide(model: torch.nn.Module, inputs: Callable[..., object], sizes: Sizes) -> dict[str, tuple[str, bool, str]]:
    _, dimensions = proved(model, inputs, sizes)
    return {dimension.name: (dimension.pad, dimension.chunk, dimension.reason) for dimension in dimensions}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x + torch.rand_like(x), "batch never padded: forward() draws random numbers, and other numbers for other sizes"),
        (lambda x: x - x.mean(0), "batch never padded"),
        (lambda x: x * 2, "batch padded"),
    ],
    ids=["random", "tried", "rows"],
)
def test_a_build_says_why_nothing_was_tried(function: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    prepared, dimensions = proved(Batched(function), rows, {"batch": (2, 5)})
    assert _padded([replace(prepared, dimensions=dimensions)]) == message


@pytest.mark.parametrize(
    ("function", "pad", "chunk"),
    [
        (lambda x: x * 2, "rows", True),
        (lambda x: torch.softmax(x, -1), "rows", True),
        (lambda x: x.repeat_interleave(2, 0), "rows", True),
        (lambda x: x.sum(0), "zeros", False),
        (lambda x: x + x.sum(0), "zeros", False),
        (lambda x: x.mean(0), "no", False),
        (lambda x: x - x.mean(0), "no", False),
        (lambda x: x.cumsum(0), "rows", False),
        (lambda x: x.flip(0), "no", False),
        (
            lambda x: x.max(0).values,
            "no",
            False,
        ),  # inputs from rand are positive, so that zeros never win; negated inputs show the mixing
        (lambda x: torch.softmax(x, 0), "no", False),
        (lambda x: torch.cat([x, x]), "no", False),
        (lambda x: x @ x.T, "rows", False),
    ],
    ids=[
        "pointwise",
        "row softmax",
        "repeat",
        "sum",
        "add sum",
        "mean",
        "centre",
        "cumsum",
        "flip",
        "max",
        "batch softmax",
        "cat",
        "gram",
    ],
)
def test_verdicts(function: Callable[[torch.Tensor], torch.Tensor], pad: str, chunk: bool) -> None:
    verdict = decide(Batched(function), rows, {"batch": (1, 8)})["batch"]
    assert verdict[:2] == (pad, chunk), verdict[2]
    assert verdict[2], "every verdict has a reason"


class Attending(torch.nn.Module):
    """An encoder with a mask of `hidden` tokens, which forward() makes."""

    def __init__(self, hidden: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.hidden = hidden
        self.embedding = torch.nn.Embedding(50, 16)
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, ids: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(ids, other)
        x = self.embedding(ids)
        x, _ = self.attention(x, x, x, key_padding_mask=hidden)
        return x.masked_fill(hidden[..., None], 0).sum(1) / (~hidden).sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("hidden", "other", "pad"),
    [
        (lambda ids, lengths: torch.arange(ids.shape[1]) >= lengths[:, None], "lengths", "no"),
        (lambda ids, mask: ids == 1, "mask", "no"),
        (lambda ids, mask: ids == 0, "mask", "zeros"),
        (lambda ids, mask: ~mask, "mask", "zeros"),
    ],
    ids=["lengths", "token 1", "token 0", "input"],
)
def test_a_mask_that_forward_makes_hides_padding_only_if_zero_means_hidden(hidden: Any, other: str, pad: str) -> None:
    """`short_cure` and the page of padding reasons say this."""

    def inputs(batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        more = torch.randint(1, seq + 1, (batch,)) if other == "lengths" else torch.ones(batch, seq, dtype=torch.bool)
        return torch.randint(2, 50, (batch, seq)), more

    verdict = decide(Attending(hidden).eval(), inputs, {"batch": (1, 4), "seq": (8, 16)})["seq"]
    assert verdict[0] == pad, verdict[2]
    assert bool(short_cure(verdict[2])) or pad == "zeros"


class Bags(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(50, 8, **options)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        return self.bag(ids, offsets)


def test_bags_with_offsets_are_not_padded_and_rows_of_ids_are() -> None:
    """`short_cure` says this."""
    sizes = {"batch": (1, 8), "n": (16, 64)}

    def with_offsets(batch: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(0, 50, (n,)), torch.arange(batch) * (n // batch)

    for pad, _, reason in decide(Bags(), with_offsets, sizes).values():
        assert pad == "no" and short_cure(reason) == BAG_CURE, reason
    by_row = decide(Bags(padding_idx=0), lambda batch, n: torch.randint(1, 50, (batch, n)), sizes)
    assert (by_row["batch"][0], by_row["n"][0]) == ("rows", "zeros")


class Pooled(torch.nn.Module):
    """A mean over the sequence that a mask makes independent of padding."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked = masked

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        kept = mask.unsqueeze(-1).to(x.dtype) if self.masked else torch.ones_like(x)
        return (x * kept).sum(1) / kept.sum(1)


@pytest.mark.parametrize(("masked", "pad"), [(True, "zeros"), (False, "no")])
def test_a_mask_makes_a_sequence_paddable_but_not_cuttable(masked: bool, pad: str) -> None:
    def inputs(batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(batch, seq, 4), torch.ones(batch, seq, dtype=torch.int64)

    verdicts = decide(Pooled(masked), inputs, {"batch": (1, 2), "seq": (4, 8)})
    assert verdicts["batch"][:2] == ("rows", True)
    assert verdicts["seq"][:2] == (pad, False)


def test_rows_that_are_joined_where_no_example_shows_it() -> None:
    """The sum over all rows only scales a softmax that is saturated in the example."""
    verdict = decide(Batched(lambda x: torch.softmax(1e6 * x * x.sum(), -1)), rows, {"batch": (1, 8)})["batch"]
    assert verdict[:2] == ("zeros", False) and "sum combines elements along batch" in verdict[2]


class Asserting(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] == 4
        return x * 2


def test_a_model_that_asserts_its_size_is_not_padded() -> None:
    assert decide(Asserting(), rows, {"batch": (4,)})["batch"] == ("no", False, "the model fails (AssertionError) at batch=1")


def test_the_graph_whose_operators_are_tried_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, functional_graph = [], proof.functional
    monkeypatch.setattr(proof, "functional", lambda program: calls.append(1) or functional_graph(program))
    verdicts = decide(Batched(torch.relu), lambda batch, seq: torch.rand(batch, seq, 4), {"batch": (2, 4), "seq": (2, 8)})
    assert {name: verdict[:2] for name, verdict in verdicts.items()} == {"batch": ("rows", True), "seq": ("rows", True)}
    assert len(calls) == 1


def of_a_branch(x: torch.Tensor) -> torch.Tensor:
    return x - x.amax(0, keepdim=True)  # in a branch


def of_a_loop(at: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x - x.amax(0, keepdim=True)  # in a loop
    return at + 1, x


def of_a_row(x: torch.Tensor) -> torch.Tensor:
    return x - x.amax(0)  # in a row


def without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x - x.amax(0, keepdim=True)  # without gradients


def looped(x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops import while_loop

    return while_loop(lambda at, x: at < 2, of_a_loop, (torch.zeros((), dtype=torch.int64), x))[1]


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (lambda x: x.mean(0), "mean combines elements along batch"),
        (lambda x: torch.cond(x.sum() > -9, of_a_branch, lambda x: x * 2, (x,)), "# in a branch"),
        (looped, "# in a loop"),
        (lambda x: torch.vmap(of_a_row)(x.unsqueeze(0))[0], "# in a row"),
        (lambda x: checkpoint(of_a_branch, x, use_reentrant=False), "# in a branch"),
        (without_gradients, "# without gradients"),
    ],
    ids=["none", "cond", "while_loop", "vmap", "checkpoint", "no_grad"],
)
def test_the_operator_that_changes_is_named_with_its_own_line(function: Callable[[torch.Tensor], torch.Tensor], line: str) -> None:
    """This also holds if outputs of eager PyTorch differ, or if the operator is in a function that is passed to another
    function."""
    pad, chunk, reason = decide(Batched(function), rows, {"batch": (2, 5)})["batch"]
    assert (pad, chunk) == ("no", False)
    named, _, trial = reason.partition("; ")
    assert " combines elements along batch (" in named and "test_padding_proof.py:" in named and line in named, reason
    assert trial.startswith("output ") or trial == "padding with zeros may change a result", reason
