"""The list of PyTorch's operators agrees with `check` for models that call them."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from typer.testing import CliRunner, Result

import cgcompile
from cgcompile.targets.choice import resolved
from cgcompile.tools.operators import KINDS, operators
from cgcompile_cli.main import app
from tests.helpers.raising import raises

TABLES = {target: {operator.name: operator for operator in operators(target)} for target in ("sm_90", "cuda", "cpu")}


def test_the_reason_of_some_is_what_limits_the_operator() -> None:
    assert TABLES["sm_90"]["aten.gru"].kind == "some" and TABLES["sm_90"]["aten.gru"].why.startswith("with dropout: ")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["operators", *arguments, "--quiet"], prog_name="cgcompile", env={"COLUMNS": "80"})


class Several(nn.Module):
    def forward(self, x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.relu(x), torch.index_select(x, 1, i[0]), torch.gcd(i, i + 2), torch.histc(x.flatten(), 4),
            torch.nanmedian(x, 1)[0], torch.nn.functional.leaky_relu(x),
        )  # fmt: skip


def test_what_is_refused_for_an_absent_gpu_is_what_check_refuses() -> None:
    def inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(batch, 8), torch.ones(batch, 8, dtype=torch.int64)

    report = cgcompile.check(Several(), inputs, sizes=[2, 4], target="sm_90")
    refused = {finding.message.partition(" has no")[0] for finding in report.findings if finding.rule == "operator-without-kernel"}
    called = {"relu", "index_select", "gcd", "histc", "nanmedian", "leaky_relu"}
    kinds = {name: TABLES["sm_90"][f"aten.{name}"].kind for name in called}
    assert {name for name in called if kinds[name] == "no"} <= refused <= {name for name in called if kinds[name] in ("no", "some")}
    assert len(refused) == 3 and sum(kind == "yes" for kind in kinds.values()) == 3


@pytest.mark.parametrize(
    ("name", "traced", "captured", "compiled"),
    [
        ("relu", "yes", "yes", "yes"),
        ("linear", "parts", "parts", "parts"),
        ("_fft_c2c", "some", "yes", "yes"),
        ("gcd", "no", "yes", "yes"),
        ("median", "some", "yes", "yes"),
        ("nonzero", "host", "host", "yes"),
        ("index", "some", "some", "yes"),
        ("multinomial", "yes", "yes", "yes"),
        ("_scaled_dot_product_flash_attention_for_cpu", "some", "some", "some"),
        ("poisson", "no", "no", "no"),
        ("bernoulli", "yes", "yes", "yes"),
        ("linalg_inv", "no", "no", "parts"),
    ],
)
def test_an_operator_on_every_kind_of_target(name: str, traced: str, captured: str, compiled: str) -> None:
    assert tuple(TABLES[target][f"aten.{name}"].kind for target in TABLES) == (traced, captured, compiled)


def test_what_is_listed() -> None:
    for table in TABLES.values():
        assert len(table) > 500 and {operator.kind for operator in table.values()} <= set(KINDS)
        assert not [name for name in table if name.endswith(("_", "_out")) or "backward" in name]
    with raises("target-unavailable"):
        operators("sm_999")


def test_the_command_shows_some_or_all() -> None:
    result = call("geqrf", "gcd", "--target", "sm_90")
    assert result.exit_code == 0 and [line.split()[:2] for line in result.stdout.splitlines()[-2:]] == [
        ["aten.gcd", "no"], ["aten.geqrf", "no"],
    ]  # fmt: skip
    plain = json.loads(call("aten.relu", "--json").stdout)
    assert {"name": "aten.relu", "kind": "yes", "why": ""} in plain["operators"] and plain["target"] == resolved("auto")
    assert "no operator" in call("no_such_operator").stderr
    assert "aten.relu " in (shown := call("--target", "cpu").stdout) and "aten._" not in shown
