"""A model whose cache has a variable number of pages and slots, and the checks of its bundles on every target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cgbundle

WIDTH, PAGES, SLOTS = 8, 5, 4
SIZES = (1, 3)
STATE = {"keys_*": "pages", "seen": ("slots", 50)}


class Paged(nn.Module):
    """Writes rows into pages of a cache and sums the pages of a table. `keys_1` is written at only one place of each page."""

    def __init__(self, pages: int = PAGES, slots: int = SLOTS) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.key = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("keys_0", torch.zeros(pages, 2, WIDTH))
        self.register_buffer("keys_1", torch.zeros(pages, 2, WIDTH), persistent=False)
        self.register_buffer("seen", torch.zeros(slots, WIDTH))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def put(self, x: Tensor, page: Tensor, place: Tensor, slot: Tensor) -> Tensor:
        """x (batch, WIDTH), the others int64 (batch,) -> the updated rows of `seen`, plus the number of calls."""
        self.calls.add_(1)
        key_rows = self.key(x)
        self.keys_0[page, place] = key_rows
        self.keys_1[page, 1] = key_rows * 2
        self.seen[slot] = self.seen[slot] + key_rows
        return self.seen[slot] + self.calls

    def read(self, table: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """table int64 (batch, 3), first int32 (batch,) -> sums of pages (batch, WIDTH), and rows that `first` selects."""
        both = self.keys_0[table].sum((1, 2)) + self.keys_1[:, 1][table].sum(1)
        return both, torch.index_select(self.keys_1, 0, first) + nn.functional.embedding(first, self.keys_0[:, 0])[:, None]


def put_inputs(batch: int) -> tuple[Tensor, ...]:
    places = torch.randint(0, 2, (batch,))
    return torch.randn(batch, WIDTH), torch.randperm(PAGES)[:batch], places, torch.randperm(SLOTS)[:batch]


def read_inputs(batch: int) -> tuple[Tensor, ...]:
    return torch.randint(0, PAGES, (batch, 3)), torch.randint(0, PAGES, (batch,), dtype=torch.int32)


ENTRIES: Mapping[str, Callable[..., Any]] = {"put": put_inputs, "read": read_inputs}

MODEL_FILE = """
from tests.helpers.models.paged_models import ENTRIES, STATE, Paged

def model():
    return Paged()

def entries():
    return ENTRIES

def state():
    return STATE
"""


def check_rows(path: Path, device: str, pages: int, slots: int, **options: Any) -> None:
    """Checks a bundle loaded with these numbers of rows against a model of the same sizes: calls, state, reset, a session."""
    with cgbundle.load(path, state={"pages": pages, "slots": slots}, **options) as program:
        assert program.state.rows == {"pages": pages, "slots": slots}
        assert program.state["keys_0"].shape == (pages, 2, WIDTH)
        for target in (program, program.session()):
            _follow(target, Paged(pages, slots), device)
        program.reset()
        assert not any(program.state["keys_1"].tobytes())
        _follow(program, Paged(pages, slots), device)


def _follow(program: Any, model: Paged, device: str) -> None:
    torch.manual_seed(1)
    (pages, *_), (slots, *_) = model.keys_0.shape, model.seen.shape
    close = {"rtol": 1e-4, "atol": 1e-4}
    with torch.no_grad():
        for batch in (1, 3, 3):
            ends = [torch.randperm(size)[:batch] for size in (pages, slots)]
            for page, slot in ([size - 1 - torch.arange(batch) for size in (pages, slots)], ends):
                put = (torch.randn(batch, WIDTH), page, torch.randint(0, 2, (batch,)), slot)
                torch.testing.assert_close(program.put(*[tensor.to(device) for tensor in put]).cpu(), model.put(*put), **close)
                read = torch.stack([page, page.flip(0), torch.randint(0, pages, (batch,))], 1), page.int()
                for got, want in zip(program.read(*[tensor.to(device) for tensor in read]), model.read(*read), strict=True):
                    torch.testing.assert_close(got.cpu(), want, **close)
    for name in ("keys_0", "keys_1", "seen"):
        actual = torch.from_dlpack(program.state[name])
        torch.testing.assert_close(actual, model.get_buffer(name), **close)
