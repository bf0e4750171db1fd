"""Packed sequences are traced as padded ones and equal eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import cgbundle
import cgcompile
from cgcompile.errors import ModelError
from cgcompile.export.export import export, refuse_branches
from cgcompile.model.load import load_source

STEPS = 5


class Layer(nn.Module):
    """A recurrent layer between packing and unpacking."""

    def __init__(self, layer: nn.Module, *, ordered: bool, total: bool, between: Callable[..., Any] | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for weight in layer.parameters():
                nn.init.uniform_(weight, -1, 1)
        self.layer, self.ordered, self.total, self.between = layer.eval(), ordered, total, between

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, *states: torch.Tensor) -> Any:
        first, total = bool(self.layer.batch_first), STEPS if self.total else None
        packed = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=self.ordered)
        if self.between is not None:
            packed = PackedSequence(self.between(packed.data), *packed[1:])
        output, last = self.layer(packed, *([states if len(states) > 1 else states[0]] if states else []))
        filled, counted = pad_packed_sequence(output, batch_first=first, total_length=total, padding_value=-1.0)
        return filled, last, counted


def inputs(layer: nn.Module, lengths: list[int], states: bool = False) -> tuple[torch.Tensor, ...]:
    shape = (len(lengths), STEPS) if layer.batch_first else (STEPS, len(lengths))
    x = torch.randn(*shape, 4)
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    widths = [layer.proj_size or 3, 3] if isinstance(layer, nn.LSTM) else [3]
    hidden_states = [torch.randn(count, len(lengths), width) for width in widths] if states else []
    return x, torch.tensor(lengths), *hidden_states


def compared(model: Layer, ordered: bool, states: bool = False) -> None:
    """Exports once and compares with eager PyTorch at other lengths; padding of the input is NaN."""
    layer = model.layer
    lengths = [[5, 4, 2], [5, 5, 1]] if ordered else [[2, 5, 4], [5, 1, 5]]
    source = load_source(model, lambda: inputs(layer, lengths[0], states))
    program = export(source, {}).programs.first.module(check_guards=False)
    for batch_lengths in lengths:
        arguments = inputs(layer, batch_lengths, states)
        axis = 0 if layer.batch_first else 1
        for at, length in enumerate(batch_lengths):
            arguments[0].select(axis, at)[length:] = torch.nan
        with torch.no_grad():
            filled, last, counted = model(*arguments)
            expected = [filled, *(last if isinstance(last, tuple) else [last]), counted]
            for one, other in zip(program(*arguments), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


LAYERS: list[tuple[str, Callable[[], nn.Module], bool]] = [
    ("an LSTM", lambda: nn.LSTM(4, 3, batch_first=True), True),
    ("an LSTM, unsorted, both ways", lambda: nn.LSTM(4, 3, 2, bidirectional=True), False),
    ("a projected LSTM", lambda: nn.LSTM(4, 3, proj_size=2, bidirectional=True, batch_first=True), False),
    ("an LSTM without biases", lambda: nn.LSTM(4, 3, 2, bias=False, dropout=0.5), False),
    ("a GRU", lambda: nn.GRU(4, 3, 2, bidirectional=True, batch_first=True), False),
    ("an RNN", lambda: nn.RNN(4, 3, 2, bidirectional=True), True),
    ("an RNN of relu", lambda: nn.RNN(4, 3, nonlinearity="relu", batch_first=True), False),
]


@pytest.mark.parametrize("total", [True, False], ids=["with a total length", "without"])
@pytest.mark.parametrize(("factory", "ordered"), [case[1:] for case in LAYERS], ids=[case[0] for case in LAYERS])
def test_layers_give_what_eager_gives(factory: Callable[[], nn.Module], ordered: bool, total: bool) -> None:
    compared(Layer(factory(), ordered=ordered, total=total), ordered)


@pytest.mark.parametrize("layer_class", [nn.LSTM, nn.GRU, nn.RNN])
def test_first_states_are_permuted_with_the_sequences(layer_class: type[nn.Module]) -> None:
    compared(Layer(layer_class(4, 3, bidirectional=True), ordered=False, total=True), False, states=True)


def test_what_treats_every_row_by_itself_keeps_the_padded_form() -> None:
    head, norm = nn.Linear(4, 4).eval(), nn.LayerNorm(4).eval()

    def between(rows: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(head(rows)) + rows * 2
        return nn.functional.dropout(norm(hidden) + norm.bias, 0.1, False).softmax(-1).float()

    model = Layer(nn.GRU(4, 3), ordered=False, total=True, between=between)
    source = load_source(model, lambda: inputs(model.layer, [2, 5, 4]))
    assert not {"nonzero", "index.Tensor"} & _names(source, indexed=1)
    compared(model, False)


def _names(source: Any, indexed: int) -> set[str]:
    """Returns the operations of the program; `indexed` is the number of index operations on the lengths."""
    names = [str(node.target).removeprefix("aten.") for node in export(source, {}).programs.first.graph.nodes]
    assert names.count("index.Tensor") == indexed
    return {*names} - {"index.Tensor"}


OTHERS: list[tuple[str, Callable[..., Any]]] = [
    ("a sum over rows", lambda packed: packed.data.sum()),
    ("a mean along an axis", lambda packed: packed.data.mean(0)),
    ("a softmax over rows", lambda packed: packed.data.softmax(0).max()),
    ("a tensor of as many axes", lambda packed: (packed.data + torch.ones(1, 4)).sum()),
    ("sizes of batches", lambda packed: packed.batch_sizes.float().mean()),
]


@pytest.mark.parametrize("function", [case[1] for case in OTHERS], ids=[case[0] for case in OTHERS])
def test_anything_else_gets_the_rows_that_eager_has(function: Callable[..., Any]) -> None:
    class Other(nn.Module):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = function(pack_padded_sequence(x, lengths))
            return output

    program = export(load_source(Other(), lambda: inputs(nn.GRU(4, 3), [5, 3])), {}).programs.first.module(check_guards=False)
    arguments = inputs(nn.GRU(4, 3), [4, 2])
    torch.testing.assert_close(program(*arguments)[0], Other()(*arguments))


def _added(rows: torch.Tensor) -> torch.Tensor:
    rows += 1
    return rows


@pytest.mark.parametrize("between", [lambda rows: rows.mul_(2), _added, lambda rows: nn.functional.dropout(rows, 0.5, True, True)])
def test_a_write_into_a_packed_sequence_is_refused(between: Callable[..., Any]) -> None:
    model = Layer(nn.GRU(4, 3), ordered=True, total=True, between=between)
    with pytest.raises(ModelError):
        refuse_branches(export(load_source(model, lambda: inputs(model.layer, [5, 3])), {}))


class Tagger(nn.Module):
    def __init__(self, total: bool) -> None:
        super().__init__()
        self.layer, self.head, self.total = nn.LSTM(4, 3, bidirectional=True, batch_first=True), nn.Linear(6, 2), total

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=x.shape[1] if self.total else None)
        tags: torch.Tensor = self.head(output)
        return tags


def sentences(batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.randint(1, seq + 1, (batch,))
    lengths[-1] = seq
    return torch.randn(batch, seq, 4), lengths


def test_a_tagger_is_right_between_the_sizes(tmp_path: Path) -> None:
    model = Tagger(total=True).eval()
    cgcompile.build(model, sentences, sizes={"batch": [3], "seq": [4]}, target="cpu", out=tmp_path / "t.cgb")
    with cgbundle.load(tmp_path / "t.cgb") as program, torch.no_grad():
        for batch in (1, 2, 3):
            for seq in (2, 3, 4):
                x, lengths = torch.randn(batch, seq, 4), torch.randint(1, seq + 1, (batch,))
                torch.testing.assert_close(program(x, lengths), model(x, lengths), rtol=1e-4, atol=1e-5)


def test_without_a_total_length_the_longest_sequence_has_to_fill_the_input() -> None:
    source = replace(load_source(Tagger(total=False).eval(), lambda: sentences(2, 3)), target_device=torch.device("cpu"))
    program = export(source, {}).programs.first.module(check_guards=False)
    with pytest.raises(RuntimeError, match=r"the longest sequence is as long as the input; give .* total_length="):
        program(torch.randn(2, 3, 4), torch.tensor([2, 1]))
    with pytest.raises(RuntimeError, match="no sequence is longer than the input"):
        program(torch.randn(2, 3, 4), torch.tensor([3, 4]))
