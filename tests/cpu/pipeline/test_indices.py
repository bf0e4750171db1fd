"""Indices may differ by rounding, in builds and replays without --allow, if the floats that they select are equal within
tolerance."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import cgbundle
import cgcompile
from cgbundle import self_test
from cgbundle.format.file_names import NEAR_TIES, SELF_TEST
from cgcompile.bundle.emit import seal
from cgcompile.bundle.proof import replay
from cgcompile.bundle.self_test import eager_self_test, read_self_test, replace_self_tests
from cgcompile.export.export import export
from cgcompile.export.functionalization import functional
from cgcompile.export.signature.signature import describe_signature
from cgcompile.model.load import load_source
from cgcompile.transforms.error_bounds import error_bounds
from cgcompile.transforms.prepared import prepare
from cgcompile.util.progress import Event
from tests.helpers.raising import raises

WORDS, ROWS = 512, 8


class Words(nn.Module):
    """The most likely word, and its row of a table."""

    def __init__(self, select: str = "argmax") -> None:
        super().__init__()
        self.select = select
        self.table = nn.Parameter(torch.linspace(-1, 1, WORDS).to(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = (x * 1.01 + 0.3) * 1.7 + 0.1  # Inductor omits the rounding to bfloat16 that makes ties
        token = scores.topk(2).indices[:, 1] if self.select == "second" else getattr(scores, self.select)(-1)
        return {"token": token + 1000, "value": self.table[token]}


def inputs(batch: int) -> torch.Tensor:
    """In half of the rows one word has a much higher score."""
    x = torch.rand(batch, WORDS)
    x[batch // 2 :, 7] = 2
    return x.to(torch.bfloat16)


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return []


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, events: list[Event]) -> cgcompile.Built:
    out = tmp_path_factory.mktemp("indices") / "a.cgb"
    return cgcompile.build(Words().eval(), inputs, sizes=[ROWS], out=out, target="cpu", progress=events.append)


def test_a_build_tells_which_indices_differ_and_its_self_test_holds_them(built: cgcompile.Built, events: list[Event]) -> None:
    (verified,) = [event.text for event in events if (event.stage, event.state) == ("verify", "done")]
    assert f"of {ROWS} indices differ from eager PyTorch's where the values are equal within tolerance" in verified
    assert (
        not built.manifest.allowed
        and built.manifest.entries[0].self_test.bounds[0] == 0.5
        and built.manifest.entries[0].self_test.proofs[0].errors[0] == 0
    )
    (tie_finding,) = [finding for finding in built.manifest.entries[0].findings if finding.rule == NEAR_TIES]
    assert tie_finding.message == "output token (int64): up to 50.0% of the indices could be replaced by an equally good index"
    with cgbundle.load(built.path) as program:
        assert all(result.exact for result in self_test.replay_self_test(program))


@pytest.mark.parametrize(("others", "passes"), [(ROWS // 2, True), (ROWS // 2 + 1, False)])
def test_another_processor_may_select_as_many_others_as_are_as_good(
    built: cgcompile.Built, tmp_path: Path, others: int, passes: bool
) -> None:
    """The self-test has indices that this processor does not select, as if another processor had computed them."""
    folder = shutil.copytree(built.path, tmp_path / "other.cgb")
    key = read_self_test(folder / SELF_TEST, built.manifest, built.manifest.entries[0], (ROWS,))
    token, *rest = key.outputs
    selected = torch.cat([token[:others] + 1, token[others:]])
    replace_self_tests(folder / SELF_TEST, {built.manifest.entries[0].name: [replace(key, outputs=(selected, *rest))]})
    seal(folder, built.manifest)
    with cgbundle.load(folder) as program:
        (result,) = self_test.replay_self_test(program)
    assert result.passed("tolerance") == passes and result.tensors[0].error == others / ROWS


@pytest.mark.parametrize("select", ["argmin", "second"])
def test_code_that_selects_another_word_is_refused(built: cgcompile.Built, tmp_path: Path, select: str) -> None:
    """The compiled code selects the largest score; the model selects the smallest, or the second one of topk."""
    source = load_source(Words(select).eval(), inputs)
    exported = export(source, {"batch": (ROWS,)})
    functionalized = {key: functional(program) for key, program in exported.programs.distinct}
    prepared = prepare(exported, describe_signature(exported), functionalized, markers=False)
    folder = shutil.copytree(built.path, tmp_path / "other.cgb")
    self_tests = eager_self_test(prepared, built.manifest.weights)
    replace_self_tests(folder / SELF_TEST, {built.manifest.entries[0].name: self_tests})
    with raises("proof-failed", match=f"output token .int64.: . of {ROWS} values differ"):
        replay(folder, seal(folder, built.manifest), [error_bounds(prepared, built.manifest.weights)], (), [prepared])
