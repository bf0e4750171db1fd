"""Higher-order operators that can be expanded are replaced by their operations; the program computes the same, can be saved, and
keeps the user's line of each operation."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from cgcompile.export.higher_order.expand import expanded
from cgcompile.model.flat_module import traced_per_size
from cgcompile.model.user_code import place
from cgcompile.transforms.rng.rewrite import with_generator

BATCH = torch.export.Dim("batch", min=2, max=64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(8, 8)
        self.register_buffer("slope", torch.linspace(0, 1, 4))
        self.register_buffer("calls", torch.zeros(()))
        self.seen = create_block_mask(lambda b, h, i, j: (i >= j) & (j > 0), None, None, 6, 6, device="cpu")


class Attention(Net):
    """Four query heads over two key heads, a score_mod that reads a buffer, and a first row that is fully masked."""

    def forward(self, x: torch.Tensor) -> Any:
        q, k = self.mix(x).unflatten(-1, (4, 2)).transpose(1, 2), x.unflatten(-1, (2, 4))[..., :2].transpose(1, 2)

        def score(value: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
            return value + self.slope[head] * (column - row)

        return flex_attention(q, k, k * 2, score_mod=score, block_mask=self.seen, enable_gqa=True)


class Modes(Net):
    """Autocast around a change of the gradient mode, and around state."""

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.mix(x)
            with torch.enable_grad():
                y = self.mix(y).softmax(-1)
            self.calls += 1
        return self.mix(y.float()) + self.calls


class Loops(Net):
    """A scan with a carried value along an axis of fixed size, and a map along the same axis."""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.mix(x)
        carry, rows = scan(lambda h, t: ((h + t).tanh(), (h * t).sin()), torch.zeros_like(y[:, 0]), y, dim=1)
        return carry, rows, map_rows(lambda t, scale: (t * scale).cos(), y.transpose(0, 1), self.mix.bias)


def program(model: nn.Module) -> torch.export.ExportedProgram:
    with torch.no_grad():
        exported = torch.export.export(model.eval(), (torch.randn(3, 6, 8),), dynamic_shapes=({0: BATCH},), strict=False)
    return expanded(exported)


@pytest.mark.parametrize("kind", [Attention, Modes, Loops])
def test_an_operator_becomes_its_operations(kind: type[Net]) -> None:
    model = kind()
    expansion = program(model)
    left = [node for node in expansion.graph.nodes if isinstance(node.target, torch._ops.HigherOrderOperator)]
    assert not left and not list(expansion.graph_module.children())
    assert [
        node for node in expansion.graph.nodes if node.op == "call_function" and "aten" in str(node.target) and not place(node)[0]
        and node.target is not torch.ops.aten.sym_size.int
    ] == []  # fmt: skip
    file = io.BytesIO()
    torch.export.save(expansion, file)
    file.seek(0)
    stored = torch.export.load(file).module(check_guards=False)
    for rows in (2, 5):
        x = torch.randn(rows, 6, 8)
        with torch.no_grad(), traced_per_size():
            torch.testing.assert_close(stored(x), model(x))


def test_random_numbers_and_writes_beside_autocast_stay_operations() -> None:
    class Draws(Modes):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x + torch.rand(6, 8))

    expansion = program(Draws())
    assert {spec.kind.name for spec in expansion.graph_signature.output_specs} == {"USER_OUTPUT"}
    module = with_generator(expansion).module(check_guards=False)  # `with_generator` adds an operator that writes
    x = torch.randn(2, 6, 8)
    with torch.no_grad():
        first, second = module(x), module(x)
    assert module.calls == 2 and not torch.equal(first, second)


def test_what_has_no_such_operator_stays_the_same_program() -> None:
    exported = torch.export.export(nn.Linear(2, 2), (torch.randn(1, 2),), strict=False)
    assert expanded(exported) is exported
