"""Programs are compared with a new model that nobody has called. Python state of earlier calls is reported, or becomes a buffer."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import cgbundle
import cgcompile
from cgbundle.format.schema import Finding
from cgcompile.export.export import export
from cgcompile.export.functionalization import functional
from cgcompile.model.flat_module import call_eager
from cgcompile.model.load import load_source, load_sources
from cgcompile.model.nondeterminism.fresh_process import FreshModels, Place, copied_models, forked_models
from cgcompile.model.source import CPU, OTHER_SEED, SEED, SELF_TEST_SEED, sample
from cgcompile.pipeline import sequences
from cgcompile.pipeline.sequences import Call, drawn, sequence, with_sequences
from tests.helpers.raising import raises
from tests.sequences.drawn import FAITHFUL, UNFAITHFUL, draw

SHARED: dict[str, Any] = {}


class Lazy(nn.Module):
    """The first call's input affects all later calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.scale = x.std(1, keepdim=True)
        return x * self.scale


class LazyAtASize(nn.Module):
    """The first call's input affects later calls, until a call has another size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale") or self.scale.shape[0] != x.shape[0]:
            self.scale = x.std(1, keepdim=True)
        return x * self.scale


class Shared(nn.Module):
    """The same as `Lazy`, with a global variable of the file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "mean" not in SHARED:
            SHARED["mean"] = x.mean()
        return x - SHARED["mean"]


class OfItsClass(nn.Module):
    """The same as `Lazy`, with a class attribute."""

    first: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if OfItsClass.first is None:
            OfItsClass.first = x.mean()
        return x - OfItsClass.first


class Largest(nn.Module):
    """The largest size so far, as in transformers' dynamic rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest = max(self.largest, x.shape[0])
        return x * self.largest


class Growing(nn.Module):
    """A table that grows with the sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.length:
            self.length = x.shape[0]
            self.table = torch.arange(self.length).sin()[:, None]
        return x + self.table[: x.shape[0]]


class Filled(nn.Module):
    """A buffer that the first calls fill, and its filled length, as in rotary_embedding_torch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(16, 1), persistent=False)
        self.length = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.length:
            self.table[: x.shape[0]] = torch.arange(1, x.shape[0] + 1)[:, None]
            self.length = x.shape[0]
        return x * self.table[: x.shape[0]]


class Counting(nn.Module):
    """Numbers and a tensor that the next call reads, and a number that no result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.decay, self.unread = 0, 1.0, 0
        self.before = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.unread += 1
        self.decay = self.decay * 0.5
        y = x * self.calls + self.decay + self.before
        self.before = x.mean(0)
        return y


class DrawnOnce(nn.Module):
    """The first call draws a parameter, as gpytorch's variational strategies do."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(4))
        self.drawn = False

    def draw(self) -> None:
        self.mean.data.copy_(torch.randn_like(self.mean))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.drawn:
            self.draw()
            self.drawn = True
        return x + self.mean


class DrawnByNumpy(DrawnOnce):
    """The same as `DrawnOnce`, with NumPy's generator."""

    def draw(self) -> None:
        self.mean.data.copy_(torch.from_numpy(numpy.random.rand(4)))


class Remembering(nn.Module):
    """One entry sets what the other one reads."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        self.found = x * 2
        return self.found + 1

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.found.mean()


def rows(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 4) * 5,)


def constant(batch: int) -> tuple[torch.Tensor]:
    return (torch.arange(batch * 4.0).reshape(batch, 4),)


def alike(batch: int) -> tuple[torch.Tensor]:
    return (torch.ones(batch, 4),)


def refusals(model: nn.Module, sizes: Any = (1, 8), inputs: Any = rows) -> list[Finding]:
    all_findings = cgcompile.check(model.eval(), inputs, sizes=sizes, target="cpu").findings
    return [finding for finding in all_findings if finding.severity == "refuse"]


@pytest.mark.parametrize(
    ("kind", "sizes", "inputs"),
    [
        (Lazy, (1, 8), rows), (LazyAtASize, (1, 8), rows), (LazyAtASize, (8,), rows), (Lazy, (8,), constant), (Lazy, (8,), alike),
    ],
)  # fmt: skip
def test_a_value_of_the_first_input_is_refused_by_name_and_line(kind: type[nn.Module], sizes: Any, inputs: Any) -> None:
    (finding,) = refusals(kind(), sizes, inputs)
    assert (finding.rule, finding.source) == ("earlier-calls", "self.scale = x.std(1, keepdim=True)")
    assert finding.message.startswith("forward() sets 'scale' from the values of its inputs, and a later call reads it")
    assert finding.where.startswith("tests/cpu/pipeline/test_sequences.py:")


@pytest.mark.parametrize("kind", [DrawnOnce, DrawnByNumpy])
@pytest.mark.parametrize("seed", [SEED, OTHER_SEED])
def test_numbers_that_the_first_call_draws_are_refused_whatever_was_seeded_before(kind: type[DrawnOnce], seed: int) -> None:
    model = kind()
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    (finding,) = refusals(model)
    assert finding.rule == "earlier-calls" and "'drawn' at its first call, and later calls read it" in finding.message
    assert refusals(model) == []  # the advice of the finding: call the model once before the build


def test_it_ends_a_build_and_leaves_no_bundle(tmp_path: Path) -> None:
    with raises("check-refused", match="earlier-calls: forward.. sets 'scale'"):
        cgcompile.build(Lazy().eval(), rows, sizes=[8], target="cpu", out=tmp_path / "lazy.cgb")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("model", "name"), [(Shared(), "SHARED"), (OfItsClass(), "OfItsClass.first")])
def test_a_value_outside_of_the_module_is_named(model: nn.Module, name: str) -> None:
    SHARED.clear()
    OfItsClass.first = None
    (finding,) = refusals(model)
    assert name in finding.message and finding.rule == "earlier-calls"
    assert finding.where.startswith("tests/cpu/pipeline/test_sequences.py:"), finding


def test_an_order_of_sizes_that_decides_is_refused() -> None:
    (finding,) = refusals(Largest())
    assert finding.message.startswith("forward() sets 'largest' at its first call, and later calls read it")


def test_what_depends_on_sizes_alone_is_right() -> None:
    assert refusals(Growing()) == []
    assert refusals(Growing(), (8,)) == []


def test_a_buffer_that_the_first_calls_fill_is_a_weight_that_is_full() -> None:
    exported = export(load_source(Filled().eval(), rows), {"batch": (2, 4)})
    assert functional(exported.programs.first).buffers_to_mutate == {}
    (x,) = sample(exported.source, {"batch": 4}).tensors
    torch.testing.assert_close(exported.programs.at((4,)).module()(x)[0], Filled()(x))
    assert refusals(Filled()) == []


def test_counters_are_state_that_begins_as_in_a_new_model() -> None:
    model = Counting().eval()
    exported = export(load_source(model, rows), {"batch": (2, 4)})
    assert sorted(functional(exported.programs.first).buffers_to_mutate.values()) == ["model.before", "model.calls", "model.decay"]
    assert [obstacle.rule for obstacle in exported.obstacles] == ["unread-attribute"]
    program, eager = exported.programs.first.module(), Counting()
    for seed in range(3):
        (x,) = sample(exported.source, {"batch": 2 + seed % 2}, seed).tensors
        torch.testing.assert_close(program(x)[0], eager(x))


def test_counters_are_numbers_again_afterwards() -> None:
    model = Counting().eval()
    assert refusals(model) == []
    assert (model.calls, model.decay, model.unread) == (0, 1.0, model.unread)
    assert torch.equal(model.before, torch.zeros(4)) and not list(model.buffers())


def test_a_bundle_counts_as_the_model_does(tmp_path: Path) -> None:
    built = cgcompile.build(Counting().eval(), rows, sizes=[2, 3], target="cpu", out=tmp_path / "counting.cgb")
    eager = Counting().eval()
    with cgbundle.load(str(built.path)) as program:
        for seed in range(4):
            x = torch.randn(2 + seed % 2, 4, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(torch.as_tensor(program(x)), eager(x))


def test_what_one_entry_sets_and_another_reads_is_refused() -> None:
    report = cgcompile.check(Remembering().eval(), {"encode": rows, "decode": rows}, sizes=(2, 4), target="cpu")
    refused_findings = [finding for one in (report, *report.others) for finding in one.findings if finding.severity == "refuse"]
    assert [finding.rule for finding in refused_findings] == ["earlier-calls"]
    assert "'found'" in refused_findings[0].message and refused_findings[0].source == "self.found = x * 2"


def test_every_int_key_is_called_with_new_inputs_and_in_both_orders() -> None:
    exported = export(load_source(nn.Linear(4, 4), rows), {"batch": (2, 4)})
    calls = sequence([exported])
    assert [(call.sizes["batch"], call.seed) for call in calls] == [
        (2, SELF_TEST_SEED), (2, OTHER_SEED), (2, SELF_TEST_SEED),
        (4, SELF_TEST_SEED), (4, OTHER_SEED), (4, SELF_TEST_SEED), (2, OTHER_SEED),
    ]  # fmt: skip
    assert SEED not in (SELF_TEST_SEED, OTHER_SEED)
    fixed = replace(exported, source=replace(exported.source, inputs=constant))
    seen = constant(4)[0]
    for seed in (SELF_TEST_SEED, OTHER_SEED):
        (other,), _ = drawn(fixed, Call(entry=0, sizes={"batch": 4}, seed=seed))
        assert not torch.equal(seen, other) and 0 <= other.min() <= other.max() <= seen.max()
    whole = replace(fixed, source=replace(fixed.source, inputs=lambda batch: (constant(batch)[0].long(),)))
    (other,), _ = drawn(whole, Call(entry=0, sizes={"batch": 4}, seed=SELF_TEST_SEED))
    assert not torch.equal(seen.long(), other) and torch.equal(seen.long().flatten(), other.flatten().sort().values)
    (other,), _ = drawn(
        replace(fixed, source=replace(exported.source, inputs=alike)), Call(entry=0, sizes={"batch": 4}, seed=SELF_TEST_SEED)
    )
    assert other.min() >= 1 and other.std() > 0


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize(
    ("module", "calls"), [(nn.Linear(4, 4), 4), (Counter(), 7), (nn.Sequential(nn.Dropout(), nn.Linear(4, 4)), 7)]
)
def test_a_program_that_keeps_nothing_is_called_once_for_the_same_inputs(
    module: nn.Module, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = load_source(module, rows)
    exported = export(source, {"batch": (2, 4)})
    models = copied_models([source], None)
    models.begin(Place(device=CPU, target_device=CPU, capability=(0, 0)))
    sizes: list[int] = []

    def counted(reference: Any, tensors: Any, seed: int) -> tuple[torch.Tensor, ...]:
        sizes.append(len(tensors[0]))
        return call_eager(reference, tensors, seed)

    monkeypatch.setattr(sequences, "call_eager", counted)
    assert not [obstacle for obstacle in with_sequences([exported], models)[0].obstacles if obstacle.rule == "earlier-calls"]
    assert len([size for size in sizes if size in (2, 4)]) == calls


@pytest.mark.parametrize("seed", range(2))
def test_drawn_modules_that_are_faithful_pass(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text((drawn_module := draw(seed, 0)).text)
    assert not cgcompile.check(str(path), sizes=drawn_module.sizes, target="cpu").refused, drawn_module.features


@pytest.mark.parametrize("seed", range(2))
def test_drawn_modules_that_are_not_are_refused(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text((drawn_module := draw(seed, 1)).text)
    assert cgcompile.check(str(path), sizes={"batch": (1, 3), "seq": (2, 5)}, target="cpu").refused, drawn_module.features


def test_the_names_of_features_are_their_own() -> None:
    names = [feature.name for feature in (*FAITHFUL, *UNFAITHFUL)]
    assert len(names) == len(set(names))


# --- the processes ---------------------------------------------------------------------------------------------------


def copies(model: nn.Module) -> FreshModels:
    return copied_models(load_sources(model.eval(), rows), None)


def test_models_that_are_copied_are_new_too() -> None:
    exported = export(load_source(Lazy().eval(), rows), {"batch": (2,)})
    for _ in range(2):
        models = copies(Lazy())
        models.begin(Place(device=CPU, target_device=CPU, capability=(8, 0)))
        (checked_export,) = with_sequences([exported], models)
        assert [obstacle.rule for obstacle in checked_export.obstacles] == ["earlier-calls"]


def test_tensors_with_gradients_are_copied() -> None:
    model = nn.Linear(4, 4)
    model.computed = torch.ones(1, requires_grad=True) * 2  # type: ignore[assignment]
    models = copies(model)
    models.begin(Place(device=CPU, target_device=CPU, capability=(8, 0)))
    with models.new({"forward": {"batch": 2}}) as new:
        new.send(0, rows(2), SEED)
        assert not new.receive().raised


def test_a_model_that_is_made_again_has_the_same_weights() -> None:
    first, second = [load_sources(nn.Linear(4, 4), rows) for _ in range(2)]
    exported = export(first[0], {"batch": (2,)})
    models = copied_models(first, lambda: second)
    models.begin(Place(device=CPU, target_device=CPU, capability=(8, 0)))
    (checked_export,) = with_sequences([exported], models)
    assert not checked_export.obstacles


def test_a_model_that_cannot_be_copied_is_named() -> None:
    model = nn.Linear(4, 4)
    model.held = SimpleNamespace(lock=threading.Lock())  # type: ignore[assignment]
    with raises("fresh-failed", match="the model cannot be copied"):
        copies(model)


def test_a_process_that_uses_cuda_copies_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    (finding,) = refusals(Lazy(), (8,))
    assert finding.message.startswith("forward() sets 'scale' from the values of its inputs")
    assert refusals(Killed()) == [], "no other process calls it"


class Killed(nn.Module):
    """Kills every process except one."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = os.getpid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.allowed:
            os.kill(os.getpid(), signal.SIGKILL)
        return x + 1


class Raising(Killed):
    """Raises an error in every process except one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.allowed:
            raise ValueError("not here")
        return x + 1


def test_a_process_that_ends_is_one_line() -> None:
    with raises("fresh-failed", match="was killed, or crashed"):
        cgcompile.check(Killed().eval(), rows, sizes=[2], target="cpu")


def test_what_a_new_model_raises_is_one_line() -> None:
    with raises("eager-failed", match=r"test_sequences.py:\d+: forward\(\) failed: ValueError: not here"):
        cgcompile.check(Raising().eval(), rows, sizes=[2], target="cpu")


def test_a_process_that_has_just_begun_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "setpgid", lambda process, group: None)  # so that the child has not called it yet
    with forked_models(load_sources(nn.Linear(4, 4), rows)):
        pass


def test_no_process_is_left() -> None:
    for _ in range(3):
        cgcompile.check(nn.Linear(4, 4), rows, sizes=[2], target="cpu")
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
