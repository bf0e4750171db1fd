"""A model with several entries: their names, their export over one module, and what they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cgcompile
from cgcompile.checks import check
from cgcompile.export.export import export
from cgcompile.export.exported import Exported
from cgcompile.export.programs import with_shared_constants
from cgcompile.export.signature.signature import describe_signature
from cgcompile.model.flat_module import run_eager
from cgcompile.model.load import load_sources
from cgcompile.model.source import sample
from cgcompile.transforms.padding.proof import prove_padding
from cgcompile.transforms.prepared import Prepared, prepare, together
from tests.golden.models import Lanes, traced_entries
from tests.helpers.raising import raises

SIZES: dict[str, dict[str, tuple[int, ...]]] = {"forward": {"batch": (1, 4)}, "fill": {"rows": (2,)}, "empty": {}}


class Literals(nn.Module):
    """Two methods with one literal each, which torch.export gives the same name."""

    def one(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([1.0, 2.0, 3.0])

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([4.0, 5.0, 6.0])


def exports(model: nn.Module, entries: Any, sizes: Any) -> list[Exported]:
    return [export(source, sizes[source.entry]) for source in load_sources(model, entries)]


@pytest.fixture(scope="module")
def entries() -> list[tuple[Exported, Prepared]]:
    model, entries = traced_entries()
    exported = exports(model, entries, SIZES)
    prepared = [prepare(entry, describe_signature(entry), check(entry).functionalized, markers=False) for entry in exported]
    return list(zip(exported, together(prepared), strict=True))


def test_entries_have_one_module_and_one_name_for_each_weight(entries: list[tuple[Exported, Prepared]]) -> None:
    assert [exported.source.entry for exported, _ in entries] == ["forward", "fill", "empty"]
    assert len({id(exported.source.model) for exported, _ in entries}) == 1
    (first, *others) = [prepared.programs.weights() for _, prepared in entries]
    for other in others:
        for name in first.keys() & other.keys():
            assert other[name].data_ptr() == first[name].data_ptr()
    assert {"model.linear.weight", "model.linear.bias", "model.cache"} <= first.keys()


def test_what_one_entry_writes_to_is_state_for_all(entries: list[tuple[Exported, Prepared]]) -> None:
    assert [prepared.state for _, prepared in entries] == [("model.cache",)] * 3
    assert [prepared.changes for _, prepared in entries] == [(), ("model.cache",), ("model.cache",)]
    assert {id(prepared.weights["model.cache"]) for _, prepared in entries} == {id(entries[0][1].weights["model.cache"])}


def test_an_entry_that_changes_nothing_is_padded(entries: list[tuple[Exported, Prepared]]) -> None:
    proved = [prove_padding(ready, lambda text: None) for _, ready in entries]
    assert [[(d.name, d.pad, d.chunk) for d in dims] for dims in proved] == [[("batch", "rows", True)], [("rows", "no", False)], []]
    assert proved[1][0].reason == "fill() writes to its buffer 'cache'"


def test_eager_pytorch_runs_the_method(entries: list[tuple[Exported, Prepared]]) -> None:
    exported, prepared = entries[1]
    x, lane = sample(exported.source, {"rows": 2}).tensors
    ran = run_eager(prepared.reference, (x, lane))
    expected = Lanes.fill(_like(exported.source.model), x, lane)
    assert torch.allclose(ran.outputs[0], expected)


def _like(model: nn.Module) -> Any:
    lanes = Lanes()
    lanes.load_state_dict(model.state_dict())
    return lanes


def test_literals_of_one_name_get_names_of_their_own() -> None:
    rows = {"one": lambda: (torch.ones(3),), "other": lambda: (torch.ones(3),)}
    exported_models = exports(Literals(), rows, {"one": {}, "other": {}})
    names = [set(exported.programs.first.constants) for exported in exported_models]
    shared = with_shared_constants([exported.programs for exported in exported_models])
    values = {name: value.tolist() for programs in shared for name, value in programs.weights().items()}
    assert names[0] == names[1] and len(values) == 2 and sorted(values.values()) == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert [programs.first.module()(torch.ones(3))[0].tolist() for programs in shared] == [[2.0, 3.0, 4.0], [4.0, 5.0, 6.0]]


# --- files -----------------------------------------------------------------------------------------------------------

MODEL = """
import torch
class Two(torch.nn.Module):
    steps = 3
    def prefill(self, ids): return ids + 1
    def decode(self, ids): return ids + 2
def model(): return Two()
def rows(batch): return (torch.zeros(batch),)
"""


def file(folder: Path, more: str) -> str:
    path = folder / "model.py"
    path.write_text(MODEL + more)
    return str(path)


def test_a_file_with_entries(tmp_path: Path) -> None:
    sources = load_sources(file(tmp_path, "def entries(): return {'prefill': rows, 'decode': lambda: (torch.zeros(1),)}"))
    assert [(source.entry, source.dimensions) for source in sources] == [("prefill", ("batch",)), ("decode", ())]
    assert sources[0].model is sources[1].model


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("def entries(): return {'prefill': rows}\ndef inputs(): return ()", "defines both inputs\\(\\) and entries\\(\\)"),
        ("def entries(): return [rows]", "entries\\(\\) returned list, expected a dict from methods"),
        ("def entries(): return {}", "entries\\(\\) returned an empty dict"),
        ("def entries(): return {'encode': rows}", "Two has no method 'encode'"),
        ("def entries(): return {'steps': rows}", "Two has no method 'steps'"),
        ("def entries(): return {'_call_impl': rows}", "'_call_impl' is not the name of a method"),
        ("def entries(): return {'prefill': 3}", "'prefill': expected a function, got int"),
        ("def entries(): raise KeyError('x')", "model.py:9: entries\\(\\) failed: KeyError"),
    ],
)
def test_entries_that_are_none(tmp_path: Path, more: str, message: str) -> None:
    with raises("source-invalid", match=message):
        load_sources(file(tmp_path, more))


def test_inputs_that_do_not_fit_name_the_method(tmp_path: Path) -> None:
    (source,) = load_sources(file(tmp_path, "def entries(): return {'decode': lambda: (torch.zeros(1), 2)}"))
    with raises(
        "source-invalid", match=r"the inputs function of entry 'decode' does not fit decode\(.*\): \d arguments by position, and"
    ):
        sample(source, {})


class Silent(nn.Module):
    """Returns nothing; its only effect is a write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forget(self, x: torch.Tensor) -> None:
        self.seen.zero_()

    def idle(self, x: torch.Tensor) -> None:
        x + 1


def test_a_method_that_gives_no_tensor_writes_something() -> None:
    def rows() -> tuple[torch.Tensor, ...]:
        return (torch.randn(4),)

    report = cgcompile.check(Silent(), {"forget": rows}, target="cpu")
    assert not report.refused
    with raises("structure-unsupported", match=r"idle\(\) returns no tensor, and writes to no buffer or input"):
        cgcompile.check(Silent(), {"idle": rows}, target="cpu")
