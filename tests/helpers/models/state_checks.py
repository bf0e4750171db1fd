"""Checks of bundles with state. The tests of the CPU and of the GPU call them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import cgbundle
from tests.helpers.models.state_models import PLACES, SIZES, WIDTH, Between, between, draw, looks, pairs, rows, running, singles
from tests.helpers.raising import raises

ORDER = (4, 1, 1, 4, 1, 4, 4, 1, 4)
"""Batch size of each call."""


def near(got: Any, want: torch.Tensor) -> None:
    """Checks equality within the float32 tolerance; integers must be equal."""
    actual = torch.as_tensor(getattr(got, "tensor", got)).cpu()
    assert actual.dtype == want.dtype and actual.shape == want.shape
    rounded = want.is_floating_point()
    torch.testing.assert_close(actual, want.cpu(), rtol=1e-4 if rounded else 0, atol=1e-5 if rounded else 0)


def state_near(program: Any, network: torch.nn.Module) -> None:
    """Checks that all state equals the module's buffers."""
    buffers = dict(network.named_buffers())
    assert set(program.state) == set(buffers)
    for name, value in buffers.items():
        near(torch.from_dlpack(program.state[name]), value)


def check_state(path: Path, device: str, mode: str = "graph", outputs: str = "copy") -> None:
    """Checks that calls of several sizes share state, as calls of an eager module share buffers, and that sessions do not."""
    network = running().to(device)
    first = copy.deepcopy(network)
    with cgbundle.load(path, mode=mode, outputs=outputs) as program, torch.no_grad():
        state_near(program, network)
        for round_, batch in enumerate(ORDER):
            (x,) = draw(rows, batch, round_, device)
            for got, want in zip(program(x), network(x), strict=True):
                near(got, want)
            state_near(program, network)
        with program.session() as other:
            state_near(other, first)
            (x,) = draw(rows, 4, 50, device)
            other(x)
            first(x)
            state_near(other, first)
        state_near(program, network)
        program.reset()
        state_near(program, running())
        program.state["place"] = torch.full((1,), 4)
        assert program.state["place"].tolist() == [4]
        fresh = running().to(device)
        fresh.place.fill_(4)
        (x,) = draw(rows, 1, 60, device)
        for got, want in zip(program(x), fresh(x), strict=True):
            near(got, want)
        assert program.session_memory["state"] == dict(program.manifest.memories)["state"]


def check_state_is_guarded(path: Path, device: str) -> None:
    """Checks that wrong state is rejected. PyTorch would cast or broadcast it, and padding would be written to the cache."""
    with cgbundle.load(path) as program:
        with raises("state-missing", match="nothing") as missing:
            program.state["nothing"]
        assert "cache" in str(missing.value) + missing.value.hint
        for wrong in (torch.zeros(2, dtype=torch.int64), torch.zeros(1), torch.zeros((), dtype=torch.int64)):
            with pytest.raises(cgbundle.CgbundleError, match="place"):
                program.state["place"] = wrong
        assert program.state["place"].tolist() == [2]
        with raises("key-missing", match="cache|writes"):
            program(*draw(rows, 3, 0, device))
        with raises("state-missing", match="random"):
            program.seed(1)
        live = torch.from_dlpack(program.state.view("cache"))
        program(*draw(rows, 4, 1, device))
        if device == "cuda":
            torch.cuda.synchronize()
        assert live.shape == (4, PLACES, WIDTH) and live[:, 2].abs().sum() > 0


def check_a_buffer_that_is_handed_out_is_live(path: Path, device: str) -> None:
    """Checks that a returned buffer is live, as in eager PyTorch: later calls change it, and writes to it affect later calls."""
    network = running().to(device)
    with cgbundle.load(path) as program, torch.no_grad():
        (x,) = draw(rows, 4, 0, device)
        got, want = program(x)[2], network(x)[2]
        for _ in range(2):
            program(x), network(x)
        assert torch.equal(got, want) and want.item() == 5
        got.fill_(0), want.fill_(0)
        for actual, expected in zip(program(x), network(x), strict=True):
            near(actual, expected)
        assert program.state["place"].tolist() == [1]


def check_looks(path: Path, device: str) -> None:
    """Checks that the same outputs share memory as in eager PyTorch."""
    network = looks().to(device)
    with cgbundle.load(path) as program, torch.no_grad():
        assert {alias.output for alias in program.manifest.entries[0].aliases} == {1, 2, 3, 4, 5, 6}
        for batch in SIZES:
            x, y = draw(pairs, batch, batch, device)
            got, want = program(x, y), network(x, y)
            assert got["three"] == 3 and got["none"] is None and got.keys() == want.keys()
            for name in ("made", "again", "first", "turned", "x", "row", "weight"):
                near(got[name], want[name])
            assert got["x"] is x
            got["made"].zero_()
            assert not got["again"].any() and not got["first"].any() and not got["turned"].any()
            got["row"].fill_(7)
            assert (y[0] == 7).all()
            later = program(x, y)
            assert not got["made"].any() and later["made"].any()
            got["weight"].add_(1)
            near(program(x, y)["made"], later["made"] + 1)
            got["weight"].sub_(1)
        apart = torch.randn(4, 2 * WIDTH, device=device)[:, ::2]
        row = program(apart, apart)["row"]
        row.zero_()
        assert not apart[0].any()


def check_looks_as_views(path: Path, device: str) -> None:
    """Checks that a view raises after the next call has overwritten it; clone() keeps the values. PyTorch has a similar error."""
    with cgbundle.load(path, outputs="view") as program, torch.no_grad():
        x, y = draw(pairs, 4, 0, device)
        first = program(x, y)
        kept = first["made"].clone()
        assert first["x"] is x
        program(y, x)
        for name in ("made", "again", "first", "turned"):
            with raises("stale-view", match=r"call 1.*call 2|clone"):
                first[name][0]
        near(kept, looks().to(device)(x, y)["made"])
        near(first["weight"], looks().linear.bias)


def kinds_of_inputs(device: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns pairs of tensors (4, WIDTH) by name, one pair for every kind of memory layout."""
    x = torch.randn(4, WIDTH, device=device)
    row = torch.randn(WIDTH, device=device)
    long = torch.randn(4 + WIDTH, device=device)
    return {
        "twice the same tensor": (x, x),
        "expanded along the rows": (row.expand(4, WIDTH), x),
        "expanded along the columns": (row[:4, None].expand(4, WIDTH), x),
        "strided": (torch.randn(4, 2 * WIDTH, device=device)[:, ::2], torch.randn(8, WIDTH, device=device)[::2]),
        "transposed": (torch.randn(WIDTH, 4, device=device).t(), x),
        "overlapping": (long.as_strided((4, WIDTH), (1, 1)), x),
        "two parts of one tensor": (torch.randn(5, WIDTH, device=device)[:4], torch.randn(5, WIDTH, device=device)[1:]),
        "not at the start of its storage": (torch.randn(5, WIDTH, device=device)[1:], x),
        "a lazy negative": (torch.view_as_complex(torch.randn(4, WIDTH, 2, device=device)).conj().imag, x),
    }


def check_inputs(path: Path, device: str) -> None:
    """Checks inputs of all layouts; no input may be changed. PyTorch copies them, or skips CUDA graphs for expanded dimensions and
    overlapping memory."""
    with cgbundle.load(path) as program:
        for name, (x, y) in kinds_of_inputs(device).items():
            before = x.clone(), y.clone()
            for batch in (4, 1, 3):
                inputs = x[:batch], y[:batch], torch.empty(batch, 0, device=device)
                got, nothing = program(*inputs)
                near(got, (inputs[0] + inputs[1]) * 2)
                assert nothing.shape == (batch, 0), name
            assert torch.equal(x, before[0]) and torch.equal(y, before[1]), name


def check_between(path: Path, device: str, mode: str = "graph", outputs: str = "copy") -> None:
    """Checks state and mutated inputs on both sides of a host region against eager PyTorch, for every call and session."""
    network = Between().to(device)
    with cgbundle.load(path, mode=mode, outputs=outputs) as program, torch.no_grad():
        for session, rounds in ((program, 5), (program.session(), 2)):
            alone = copy.deepcopy(network) if session is program else Between().to(device)
            for round_ in range(rounds):
                inputs = draw(between, SIZES[round_ % 2], round_, device)
                bundle_inputs, eager_inputs = ([tensor.clone() for tensor in inputs] for _ in range(2))
                for got, want in zip(session(*bundle_inputs), alone(*eager_inputs), strict=True):
                    near(got, want)
                for got, want in zip(bundle_inputs, eager_inputs, strict=True):
                    near(got, want)
                state_near(session, alone)
        program.reset()
        state_near(program, network)
        program.state["count"] = torch.full((1,), 1000)
        program(*draw(between, 1, 0, device))
        assert 1000 < program.state["count"].tolist()[0] < 1100
        with raises("key-missing"):
            program(*draw(between, 3, 0, device))


CALLS = 5_000
MOMENTS = ((0.5, 1 / 12), (0.0, 1.0), (1.0, 1 / 3), (0.3, 0.21))
"""Mean and variance of four distributions: uniform, normal, dropout of 0.25 on the number 1, and Bernoulli at 0.3."""


def check_random(path: Path, device: str) -> None:
    """Checks torch.rand and similar operators: mean and variance over 5,000 calls, and that no call repeats another. A seed must
    repeat the numbers, and sessions must differ. PyTorch registers a generator with a graph; a bundle counts its calls."""
    x = draw(singles, 4, 0, device)[0]
    with cgbundle.load(path) as program:
        assert list(program.state) == ["calls"], "the state of the random numbers is nobody's buffer"
        samples = [[value.cpu().clone() for value in program(x)[:4]] for _ in range(CALLS)]
        every = [torch.stack([call[place] for call in samples]).double() for place in range(4)]
        for values, (mean, variance) in zip(every, MOMENTS, strict=True):
            spread = (variance / values.numel()) ** 0.5
            assert abs(values.mean() - mean) < 5 * spread
            assert abs(values.var() - variance) < 0.02 * variance + 1e-3
        for place in (0, 1):
            assert len({call[place].numpy().tobytes() for call in samples}) == CALLS
        assert abs(torch.corrcoef(torch.stack([every[0].flatten(), every[1].flatten()]))[0, 1]) < 0.01
        assert program.state["calls"].tolist() == [CALLS]

        def some(session: Any) -> list[bytes]:
            return [value.cpu().numpy().tobytes() for _ in range(3) for value in session(x)[:4]]

        program.seed(7)
        first = some(program)
        assert some(program) != first
        program.reset()
        again = some(program)
        assert again != first, "reset() brings back state; random numbers go on"
        program.seed(7)
        assert some(program) == first
        with program.session() as one, program.session() as other:
            assert len({tuple(some(session)) for session in (program, one, other)}) == 3
            one.seed(7), other.seed(8)
            assert some(one) == first != some(other)
        for wrong in (-1, 2**63):
            with pytest.raises(ValueError, match="seed"):
                program.seed(wrong)
    with cgbundle.load(path) as program:
        assert some(program) != first, "every load begins elsewhere"
