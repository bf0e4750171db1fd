"""Integers that rounding can change, and constants of a call, in the build, the manifest and the commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import cgbundle
from cgbundle import self_test
from cgbundle.format import archive
from cgbundle.format.schema import Manifest
from cgcompile.bundle.proof import replay
from cgcompile.transforms.error_bounds import ErrorBound
from cgcompile_cli import main
from tests.cpu.pipeline import token_model
from tests.helpers.raising import raises

WAIVER = "mismatched-integers"
BOUNDS = [
    ErrorBound(title="output logits (bfloat16)", bound=4e-2, exact=False, rounded=True),
    ErrorBound(title="output token (int64)", bound=0.0, exact=True, rounded=True),
    ErrorBound(title="output flag (bool)", bound=0.0, exact=True, rounded=False),
]


@pytest.fixture(scope="module")
def path() -> Path:
    return token_model.allowed()


@pytest.fixture
def manifest(path: Path) -> Manifest:
    return archive.read_manifest(str(path))


def call(*arguments: object) -> str:
    result = CliRunner().invoke(main.app, [str(argument) for argument in arguments], prog_name="cgcompile", env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_integers_that_differ_end_a_build_and_the_message_says_where(path: Path, manifest: Manifest) -> None:
    """Each difference is less than bfloat16's 4 % of the largest index, but indices are compared exactly."""
    token = r"output token \(int64\): \d of 8 values differ, first at \[\d\]: 1000"
    words = f"batch=8: the bundle's outputs differ from eager PyTorch: {token}"
    with raises("proof-failed", match=words) as caught:
        replay(path, manifest, [BOUNDS], ())
    assert caught.value.hint.endswith(f"or allow it with --allow {WAIVER}")
    with raises("proof-failed", match=words):
        replay(path, manifest, [[BOUNDS[0], replace(BOUNDS[1], rounded=False), BOUNDS[2]]], (WAIVER,))


def test_what_is_allowed_stands_in_the_manifest_and_bounds_the_replay(path: Path, manifest: Manifest) -> None:
    share = manifest.entries[0].self_test.bounds[1]
    assert manifest.entries[0].self_test.bounds == (4e-2, share, 0.0) and 0 < share <= 1 and manifest.allowed == (WAIVER,)
    (proof,) = manifest.entries[0].self_test.proofs
    assert proof.errors[1] == share and 0 < proof.errors[0] < 4e-2 and proof.errors[2] == proof.distance == 0
    (finding,) = [finding for finding in manifest.entries[0].findings if finding.rule == WAIVER]
    assert finding.message == f"output token (int64): up to {share:.1%} of the values differ from eager PyTorch's"
    (row,) = self_test.fresh(str(path))["results"]
    assert row["passed"] and [tensor["error"] for tensor in row["tensors"]] == list(proof.errors)
    shown = call("inspect", path)
    assert WAIVER in shown and f"output token (int64)      {share:.1e}" in shown


def test_a_call_agrees_with_what_was_recorded(path: Path) -> None:
    x = token_model.inputs(8)["x"]
    assert isinstance(x, torch.Tensor)
    model = token_model.Token()
    with cgbundle.load(path) as program:
        outputs = program(x, "b", temperature=2.0)
        torch.testing.assert_close(outputs["logits"], model(x, "b", temperature=2.0)["logits"], rtol=4e-2, atol=4e-2)
        assert torch.equal(program(x, mode="b", temperature=2.0, scale=None)["token"], outputs["token"])
        for args, kwargs, words in (
            (
                (x,),
                {"temperature": 2.0},
                "input 'mode' is missing: the bundle was built for the constant 'b', and .* default is 'a'",
            ),
            (
                (x, "b"),
                {},
                "input 'temperature' is missing: the bundle was built for the constant 2.0, and the model's default is 1.0",
            ),
            ((x, "b"), {"temperature": 1.0}, "input 'temperature': the bundle was built for the constant 2.0, got 1.0"),
            ((x, "b"), {"temperature": 2}, "the bundle was built for the constant 2.0, got 2"),
            ((x, "b", None, 2.0), {}, "expected at most 2 inputs by position"),
        ):
            with raises("input-structure", match=words):
                program(*args, **kwargs)


def test_inspect_and_run_tell_the_constants(path: Path) -> None:
    shown = [" ".join(line.split()) for line in call("inspect", path).splitlines()]
    assert "in mode str 'b' (constant, must be given: the model's default is 'a')" in shown
    assert "in scale NoneType None (constant, may be left out)" in shown
    assert "in temperature float 2.0 (constant, must be given: the model's default is 1.0)" in shown
    assert "result = program(x, mode='b', temperature=2.0)" in shown
    plain = json.loads(call("inspect", path, "--json"))
    assert plain["constants"][2] == {"name": "temperature", "value": 2.0, "default": [1.0], "keyword": True, "required": True}
    assert [constant["name"] for constant in json.loads(call("run", path, "--json"))["constants"]] == [
        "mode",
        "scale",
        "temperature",
    ]
