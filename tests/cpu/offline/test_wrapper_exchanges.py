"""How calls of collectives in Inductor's wrapper are recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cgcompile.offline.lower.launches import record_calls
from cgcompile.offline.lowered import INPUT, Copy, Exchange, Lowered
from tests.helpers.raising import raises


def recorded(kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, world: int = 2, cut: str = "x") -> Lowered:
    """Records a wrapper with one call, whose input is `cut`, an expression of the tensor x."""
    call = f"torch.ops.cgcompile.collective.default({cut}, {kind!r}, {world}, {0 if kind == 'broadcast' else -1})"
    wrapper = f"import torch\ndef call(args):\n    x, = args\n    made = {call}\n    del x\n    return (made,)\n"

    def load(source: Any) -> Any:
        raise AssertionError("no kernel is launched")

    lowered, unknown = record_calls((1,), wrapper, [torch.empty(shape, dtype=dtype)], [(INPUT, "0")], load)
    assert not unknown
    return lowered


def exchange_of(lowered: Lowered) -> Exchange:
    (exchange,) = [event for event in lowered.events if isinstance(event, Exchange)]
    return exchange


@pytest.mark.parametrize(
    ("kind", "shape", "output_shape"),
    [
        ("all_reduce", (4, 8), (4, 8)),
        ("all_gather", (4, 8), (8, 8)),
        ("reduce_scatter", (4, 8), (2, 8)),
        ("all_to_all", (4, 8), (4, 8)),
        ("broadcast", (4, 8), (4, 8)),
    ],
)
def test_what_is_a_multiple_goes_as_it_lies(kind: str, shape: tuple[int, ...], output_shape: tuple[int, ...]) -> None:
    lowered = recorded(kind, shape)
    exchange = exchange_of(lowered)
    assert (exchange.kind, exchange.dtype, exchange.nbytes) == (kind, "float32", 128)
    assert lowered.buffers[exchange.source.buffer].kind == INPUT
    assert lowered.outputs[0].shape == output_shape and lowered.outputs[0].pointer == exchange.target
    assert not [event for event in lowered.events if isinstance(event, Copy)]


def test_what_is_none_is_copied_to_where_kernels_may_read_on() -> None:
    lowered = recorded("all_reduce", (3,), torch.bfloat16)
    exchange = exchange_of(lowered)
    (copy,) = [event for event in lowered.events if isinstance(event, Copy)]
    assert copy.nbytes == 6 and copy.target == exchange.source
    assert {lowered.buffers[place.buffer].nbytes for place in (exchange.source, exchange.target)} == {16}
    lowered = recorded("all_gather", (3,), torch.bfloat16)
    copies = [event for event in lowered.events if isinstance(event, Copy)]
    assert [(copy.source.offset, copy.target.offset, copy.nbytes) for copy in copies[1:]] == [(0, 0, 6), (16, 6, 6)]


def test_what_begins_between_two_multiples_is_copied() -> None:
    lowered = recorded("all_reduce", (8,), cut="x.view((4,), (1,), 1)")
    (copy,) = [event for event in lowered.events if isinstance(event, Copy)]
    assert copy.source.offset == 4 and copy.target == exchange_of(lowered).source


def test_refusals() -> None:
    with raises("collective-refused", match="a multiple of 16 for each of 2 ranks"):
        recorded("reduce_scatter", (2, 3))
    with raises("collective-refused", match="int64"):
        recorded("all_reduce", (4,), torch.int64)
    with raises("lowering-broken", match="with gaps"):
        recorded("all_reduce", (8,), cut="x.view((4,), (2,), 0)")


def test_nothing_is_not_sent() -> None:
    lowered = recorded("all_reduce", (0, 4))
    assert not [event for event in lowered.events if isinstance(event, Exchange)] and lowered.outputs[0].shape == (0, 4)
