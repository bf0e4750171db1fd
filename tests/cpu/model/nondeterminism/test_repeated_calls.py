"""Random numbers of Python and NumPy, the time and other hidden inputs are refused by name and line if a result uses them."""

from __future__ import annotations

import datetime
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from random import uniform
from time import perf_counter
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import cgcompile
from cgbundle.format.schema import Finding
from cgcompile.model.nondeterminism.generators import first_draw, generators, put_back, states
from tests.helpers.raising import raises

SEEN = numpy.random.default_rng(3)
"""A generator that one of the user's methods uses."""

OWN = random.Random(4)


class Model(nn.Module):
    """A function of an input and of this module, which has a weight and generators."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.linear = nn.Linear(8, 8)
        self.state, self.kept = numpy.random.RandomState(1), {"all": [numpy.random.default_rng(0)]}
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        seen = SEEN, OWN
        return self.function(self, x, *seen)


def rows(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 8),)


def findings(function: Callable[..., Any], sizes: tuple[int, ...] = (1, 8)) -> list[Finding]:
    report = cgcompile.check(Model(function).eval(), rows, sizes=sizes, target="cpu")
    return [finding for finding in report.findings if finding.rule != "aliased-output"]


def layerdrop(model: Model, x: torch.Tensor, *seen: Any) -> torch.Tensor:
    """Always draws numbers but uses them only in training, as transformers' MusicGen and Data2VecAudio do."""
    for _ in range(20):
        drawn, another = random.uniform(0, 1), numpy.random.random()
        if model.training and (drawn < 0.1 or another < 0.1):
            continue
        x = model.linear(x)
    return x


def timed(model: Model, x: torch.Tensor, *seen: Any) -> torch.Tensor:
    begun = perf_counter()
    y: torch.Tensor = model.linear(x)
    assert perf_counter() >= begun
    return y


def reseeded(model: Model, x: torch.Tensor, *seen: Any) -> torch.Tensor:
    """Draws the same numbers in every call, as transformers' BigBird does."""
    numpy.random.seed(0)
    return x + torch.from_numpy(numpy.random.rand(8)).float()


def remembered(model: Model, x: torch.Tensor, *seen: Any) -> torch.Tensor:
    if not hasattr(model, "scale"):
        model.scale = random.random()  # type: ignore[assignment]
    return x * model.scale


def identified(model: Model, x: torch.Tensor, *seen: Any) -> torch.Tensor:
    assert secrets.token_hex(4)
    y: torch.Tensor = model.linear(x)
    return y


DECIDING: list[tuple[str, str, Callable[..., Any]]] = [
    ("python-random", "Python's `random`", lambda m, x, *_: x + 1e-2 * random.random() * x.new_ones(())),
    ("python-random", "Python's `random`", lambda m, x, *_: x * random.gauss(0, 1)),
    ("python-random", "Python's `random`", lambda m, x, *_: x * 2 if uniform(0, 1) < 1e-6 else x),
    ("python-random", "Python's `random`", lambda m, x, *_: x[:, random.sample(range(8), 8)]),
    ("python-random", "`numpy.random`", lambda m, x, *_: x + 1e-2 * numpy.random.rand() * x.new_ones(())),
    ("python-random", "`numpy.random`", lambda m, x, *_: x * 2 if numpy.random.rand() > 1 - 1e-6 else x),
    ("python-random", "a `numpy.random.Generator`", lambda m, x, seen, generator: x + 1e-2 * m.kept["all"][0].random()),
    ("python-random", "a `numpy.random.Generator`", lambda m, x, seen, generator: x + 1e-2 * seen.normal()),
    ("python-random", "a `numpy.random.RandomState`", lambda m, x, *_: x + 1e-2 * float(m.state.rand())),
    ("python-random", "a `random.Random`", lambda m, x, seen, generator: x + 1e-2 * generator.random()),
    ("python-random", "Python's `random`", lambda m, x, *_: x * random.random() if x.shape[0] > 4 else x + 0),
    ("clock-read", "time.time()", lambda m, x, *_: x + time.time()),
    ("clock-read", "time.time()", lambda m, x, *_: x + 1e-2 * (time.time() % 1.0)),
    ("clock-read", "time.perf_counter()", lambda m, x, *_: x + perf_counter()),
    ("clock-read", "datetime.now()", lambda m, x, *_: x + datetime.datetime.now().year),
    ("unrepeatable-result", "os.urandom()", lambda m, x, *_: x * 10 ** (30 * float(numpy.random.default_rng().random()))),
    ("unrepeatable-result", "os.urandom()", lambda m, x, *_: x * 10 ** (secrets.randbelow(30_000_000) / 1e6)),
    ("unrepeatable-result", "by ", lambda m, x, *_: x * 10 ** (30 * random.Random().random())),
]


@pytest.mark.parametrize(("rule", "said", "function"), DECIDING)
def test_what_no_bundle_can_repeat_is_refused_at_its_line(rule: str, said: str, function: Callable[..., Any]) -> None:
    (hit,) = findings(function)
    assert (hit.rule, hit.severity) == (rule, "refuse") and said in hit.message
    if said != "by ":  # no line is known otherwise
        assert hit.where.startswith("tests/cpu/model/nondeterminism/test_repeated_calls.py:") and "lambda m, x" in hit.source


@pytest.mark.parametrize(
    ("function", "rules"),
    [
        (layerdrop, ["python-random"]),
        (timed, ["clock-read"]),
        (reseeded, []),
        (identified, []),
        (lambda m, x, *_: x * torch.rand(()), ["random-operation"]),
    ],
)
def test_what_changes_no_result_is_noted_at_most(function: Callable[..., Any], rules: list[str]) -> None:
    assert [(finding.rule, finding.severity) for finding in findings(function)] == [(rule, "note") for rule in rules]


def test_a_number_that_the_first_call_draws_is_refused_by_name() -> None:
    (hit,) = findings(remembered)
    assert (hit.rule, hit.severity) == ("earlier-calls", "refuse")
    assert "forward() sets 'scale' to another value in every process, and later calls read it" in hit.message


def test_a_build_refuses_it_and_leaves_generators_and_hooks_as_they_were(tmp_path: Any) -> None:
    hooks = sys.getprofile(), sys.gettrace(), time.time
    model = Model(DECIDING[0][2]).eval()
    random.seed(5)
    with raises("check-refused", match=r"test_repeated_calls.py:\d+: python-random: forward\(\) draws") as caught:
        cgcompile.build(model, rows, sizes=[1, 4], target="cpu", out=tmp_path / "x.cgb")
    assert "draw it with torch" in caught.value.hint and not list(tmp_path.iterdir())
    assert (sys.getprofile(), sys.gettrace(), time.time) == hooks


# --- the generators -----------------------------------------------------------------------------------------------


@pytest.fixture
def rngs() -> Iterator[Any]:
    found_generators = generators(Model(timed), "forward")
    with put_back(found_generators):
        yield found_generators


def test_all_generators_are_found_and_put_back(rngs: Any) -> None:
    assert [one.name.replace("`", "") for one in rngs] == [
        "Python's random", "numpy.random", "a numpy.random.RandomState", "a numpy.random.Generator", "a numpy.random.Generator",
        "a random.Random",
    ]  # fmt: skip
    before = states(rngs)
    with put_back(rngs):
        random.random(), numpy.random.rand(), SEEN.random(), OWN.random()
        assert sum(one != other for one, other in zip(before, states(rngs), strict=True)) == 4
    assert states(rngs) == before


def test_draws_can_be_had_from_either_end(rngs: Any) -> None:
    for one, draw in ((rngs[0], random.random), (rngs[1], numpy.random.rand)):
        drawn = []
        for state in one.ends(one.read()):
            one.write(state)
            drawn.append(draw())
        assert drawn[0] == 0 and 1 - 1e-9 < drawn[1] < 1
    assert rngs[3].ends(rngs[3].read()) == (), "of NumPy's newer generators that is not known"


def test_every_distribution_ends_at_the_ends(rngs: Any) -> None:
    """Some distributions draw again until a condition holds: they must end if a generator returns only an end of its range."""
    for state in rngs[0].ends(rngs[0].read()):
        rngs[0].write(state)
        assert random.normalvariate(0, 1) and random.gauss(0, 1) and random.randrange(7) < 7 and random.choice("ab")
    for state in rngs[1].ends(rngs[1].read()):
        rngs[1].write(state)
        assert numpy.random.randn() and numpy.random.randint(7) < 7 and len(numpy.random.permutation(9)) == 9


def inner(x: float) -> float:
    return x + 1


def several() -> float:
    number = inner(1.0)
    number = inner(number) * random.random()
    return number + random.random()


def test_the_first_draw_is_the_one_that_is_named(rngs: Any) -> None:
    where, line = first_draw(rngs, several)
    assert line == "number = inner(number) * random.random()" and where.startswith("tests/cpu/model/nondeterminism/")
    assert first_draw(rngs, lambda: inner(1.0)) == ("", "")
