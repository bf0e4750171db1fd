"""Models with branches and loops, and inputs for them that reach every path."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH, TURNS = 16, 8

Way = Callable[[Tensor, Tensor], Tensor]


class Nested(nn.Module):
    """Two nested branches; one of them contains a loop with a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)

        def deep(h: Tensor) -> Tensor:
            def turn(i: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
                return i + 1, torch.cond(v.sum() > 40, lambda v: self.second(v) - 1, lambda v: v * 1.5, (v,))

            start = torch.zeros((), dtype=torch.int64, device=h.device)
            turns, v = torch.while_loop(lambda i, v: (i < 6) & (v.abs().max() < 30), turn, (start, h))
            return v + turns

        def flat(h: Tensor) -> Tensor:
            return torch.cond(h.mean() > -1, lambda h: h.sin(), lambda h: self.second(h).relu(), (h,))

        y = torch.cond(h.sum() > 0, deep, flat, (h,))
        return y @ h.T, h.sum()


class Carried(nn.Module):
    """A loop swaps, transposes or only copies its carried values; branches copy their operands in either order."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        def turn(i: Tensor, a: Tensor, b: Tensor, square: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
            return i + 1, b.clone(), a + b, square.T.contiguous(), kept.clone()

        n = (x[0, 0] * 4).to(torch.int64)
        first = (torch.zeros_like(n), x, x + 1, x[:, :3] * 1, x.sum(0))
        i, a, b, square, kept = torch.while_loop(lambda i, *rest: i < n, turn, first)
        c, d = torch.cond(a.sum() > b.mean(), lambda a, b: (b.clone(), a * 1), lambda a, b: (a.clone(), b[:, :4].clone()), (a, b))
        return i, a, b, square, kept, c, d[1:]


class ReadAfterwards(nn.Module):
    """Only the loop uses `doubled`. `read` is also an output; `seen` and `whole` are read after the loop."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        doubled, read, seen, whole = x * 2, x + 1, x.sin(), x.cos()

        def turn(i: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
            return i + 1, *[tensor * 0.5 + i for tensor in carried]

        first = (torch.zeros((), dtype=torch.int64, device=x.device), doubled, read, seen, whole.T)
        outputs = torch.while_loop(lambda i, scaled, *_: (i < 4) & (scaled.sum() > -8), turn, first)
        return *outputs, read, seen + outputs[1], whole[0]


class Shifted(nn.Module):
    """A loop step moves carried values to other positions, adds two of them, and casts one."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        def turn(i: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
            return i + 1, a + b, a.clone(), b.to(torch.float64)

        n = (x[0, 0] * 4).to(torch.int64)
        return torch.while_loop(lambda i, *rest: i < n, turn, (torch.zeros_like(n), x, x * 2, x.double()))


class Overlapping(nn.Module):
    """The first part of a loop step makes a view of a carried value; the last part reads the view and writes the value."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def turn(i: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            rows = v.reshape(8, 8).narrow(0, 1, 4)
            more = torch.cond(v.sum() > 0, lambda v: v * 0.5, lambda v: v + 0.25, (v,))
            return i + 1, more + rows.sum(1).repeat(16) * 0.1 - rows.T.reshape(-1).repeat(2).flip(0) * 0.1

        start = torch.zeros((), dtype=torch.int64, device=x.device)
        i, v = torch.while_loop(lambda i, v: i < 5, turn, (start, x))
        return i, v


class Middle(nn.Module):
    """Twelve layers, and a branch between the sixth and the seventh: a wide layer or a copy."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.before = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6)])
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.after = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        return self.after(torch.cond(x.sum() > 0, lambda h: h + self.wide(h), lambda h: h * 1, (h,)))


class Layer(nn.Module):
    """A layer; with `folded`, the build computes its scale."""

    def __init__(self, folded: bool) -> None:
        super().__init__()
        self.linear, self.folded = nn.Linear(WIDTH, WIDTH), folded
        self.scale = nn.Parameter(torch.randn(WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.exp() if self.folded else self.scale
        return x + self.linear(x).tanh() * scale


class Layered(nn.Module):
    """Equal layers before a loop and inside it. The loop carries one value per layer; after it the layers run in reverse order."""

    def __init__(self, count: int = 5, folded: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(folded) for _ in range(count)])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = x * 0.5
        for layer in self.layers:
            h = layer(h)

        def turn(i: Tensor, v: Tensor, *tails: Tensor) -> tuple[Tensor, ...]:
            new = []
            for layer, tail in zip(self.layers, tails, strict=True):
                new.append(tail * 0.5 + v)
                v = layer(v) * 0.9 + new[-1].mean()
            return i + 1, v, *new

        start = torch.zeros((), dtype=torch.int64, device=x.device)
        first = (start, h, *[x * number for number in range(len(self.layers))])
        turns, v, *tails = torch.while_loop(lambda i, v, *_: (i < 6) & (v.abs().max() < 9), turn, first)
        for layer in reversed(self.layers):
            v = layer(v)
        return turns, v, *tails


class Chosen(nn.Module):
    """Selects one of several cases by a number, inside a counting loop. Of two cases with the same number the first one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.layers
        cases: list[tuple[int, Way]] = [
            (3, lambda v, s: one(v).tanh()),
            (0, lambda v, s: v * s),
            (7, lambda v, s: two(v).sin() - v),
            (3, lambda v, s: v.exp()),
        ]

        def select(i: Tensor, v: Tensor, s: Tensor, number: int = 0) -> Tensor:
            if number == len(cases):
                return v + s * 2
            case, chosen = cases[number]
            return torch.cond(i == case, lambda i, v, s: chosen(v, s), lambda i, v, s: select(i, v, s, number + 1), (i, v, s))

        number = (x[0, 0] * 10).to(torch.int64)
        y = select(number, x, x.mean())
        start = torch.zeros((), dtype=torch.int64, device=x.device)
        return torch.while_loop(lambda i, v: i < 9, lambda i, v: (i + 1, select(i, v, v.mean())), (start, y))


class Drawing(nn.Module):
    """A loop that draws random numbers and reads state, and state that a branch changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def turn(i: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, v + torch.rand(WIDTH, device=x.device) * self.scale

        start = torch.zeros((), dtype=torch.int64, device=x.device)
        turns, v = torch.while_loop(lambda i, v: (i < TURNS) & (v.sum() < 30), turn, (start, x))
        self.seen.copy_(torch.cond(turns > 3, lambda s: s + 1, lambda s: s - 1, (self.seen,)))
        self.scale.mul_(2)
        return v, turns, self.seen.clone()


class Guarded(nn.Module):
    """An embedding lookup that is only safe under its condition, in a branch and in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8)

    def forward(self, ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cond((ids < 4).all(), lambda i, x: self.table(i) + x, lambda i, x: x - 1, (ids, x))
        first = ids.sum()
        last, total = torch.while_loop(
            lambda i, total: i < 4, lambda i, total: (i + 1, total + self.table(i.view(1)).sum()), (first, x.sum())
        )
        return seen, total + last


class Keeping(nn.Module):
    """State that is written before, between and after branches, a view of it as an operand of a branch, and a mutated input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rows", torch.zeros(4, 6))

    def forward(self, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        self.count.add_(1)
        row = self.rows[0]
        y = torch.cond(x.sum() > self.count, lambda x, r: x + r, lambda x, r: x * 2 - r, (x, row))
        self.rows.mul_(0.5)
        self.rows[1].add_(y.sum(0))
        z = torch.cond(self.count % 2 == 0, lambda y: y.exp(), lambda y: y.sin(), (y,))
        self.rows[0].copy_(z[0])
        counts.add_(self.count)
        return z, self.rows.sum(1)


def chosen_inputs() -> list[Tensor]:
    inputs = _random(2, WIDTH, ((1, 0.5),) * 5)
    for x, first in zip(inputs, (0.35, 0.05, 0.75, 0.95, -0.35), strict=True):
        x[0, 0] = first
    return inputs


def _random(rows: int, columns: int, cases: tuple[tuple[float, float], ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(rows, columns, generator=generator) * scale + shift for scale, shift in cases]


def nested_inputs() -> list[Tensor]:
    return _random(4, WIDTH, ((1, 1), (1, -1), (3, 4), (9, -6), (0.1, 0)))


def carried_inputs() -> list[Tensor]:
    return [tensor.abs() * scale for tensor, scale in zip(_random(3, 4, ((1, 0),) * 4), (0.1, 1, 3, 0), strict=True)]


def overlapping_inputs() -> list[Tensor]:
    return [tensor.view(-1) for tensor in _random(8, 8, ((1, 0.1), (2, -0.3)))]


def middle_inputs() -> list[Tensor]:
    return _random(4, 64, ((1, 1), (1, -1), (0.3, 0.1), (2, -0.5)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]], tuple[str, ...]]] = {
    "nested": (Nested, nested_inputs, ("if", "if", "if", "while")),
    "carried": (Carried, carried_inputs, ("if", "while")),
    "read afterwards": (ReadAfterwards, carried_inputs, ("while",)),
    "shifted": (Shifted, carried_inputs, ("while",)),
    "overlapping": (Overlapping, overlapping_inputs, ("if", "while")),
    "middle": (Middle, middle_inputs, ("if",)),
    "chosen": (Chosen, chosen_inputs, ("switch", "switch", "while")),
    "layered": (Layered, nested_inputs, ("while",)),
    "folded": (lambda: Layered(folded=True), nested_inputs, ("while",)),
}
"""By name: the model, its inputs, and the sorted types of its conditional nodes."""
