"""`program.update` of weights whose values Python read during the build."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.raising import raises

torch = pytest.importorskip("torch")

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgbundle.format import archive  # noqa: E402


class Gated(torch.nn.Module):
    """A branch on a tied weight, a size from a buffer, a number from a parameter, and weights that Python does not read."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.linear = torch.nn.Linear(4, 4)
        self.gate = torch.nn.Parameter(torch.tensor([0.5, -0.25]))
        self.tied = torch.nn.Module()
        self.tied.gate = self.gate
        self.register_buffer("count", torch.tensor([3, 1]))
        self.register_buffer("constant", torch.tensor(2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.gate.sum() > 0:
            y = y * self.gate[0]
        if self.constant > 1:
            y = y + 1
        return y[:, : int(self.count[0])]


def rows(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 4),)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gated") / "gated.cgb"
    cgcompile.build(Gated(0).eval(), rows, sizes=[2], out=path, target="cpu")
    return path


def test_the_manifest_names_them_with_the_line_that_read_them(bundle: Path) -> None:
    manifest = archive.read_manifest(str(bundle))
    fixed = {manifest.weights[row.weight].name: row for row in manifest.frozen}
    assert {name: row.reason for name, row in fixed.items()} == {
        "gate": "baked", "tied.gate": "baked", "count": "baked", "constant": "constant",
    }  # fmt: skip
    assert all(("test_update_baked.py:" in row.where) == (row.reason == "baked") for row in fixed.values())
    assert fixed["gate"].where == fixed["tied.gate"].where != fixed["count"].where


def test_other_values_are_refused_and_nothing_changes(bundle: Path) -> None:
    (x,) = rows(2)
    with cgbundle.load(bundle) as program, torch.no_grad():
        for name in ("gate", "tied.gate", "count"):
            weights = dict(Gated(1).state_dict())
            weights[name] = weights[name] + 1
            if "gate" in name:
                weights["gate"] = weights["tied.gate"] = weights[name]
            named = "'(tied.)?gate'" if "gate" in name else f"'{name}'"
            with raises("update-refused", match=f"weight {named} was read by Python at .*test_update_baked.py:.* differs"):
                program.update(weights)
        torch.testing.assert_close(program(x), Gated(0)(x))


def test_equal_values_are_accepted(bundle: Path, tmp_path: Path) -> None:
    (x,) = rows(2)
    other = tmp_path / "other.cgb"
    cgcompile.build(Gated(2).eval(), rows, sizes=[2], out=other, target="cpu")
    with cgbundle.load(bundle) as program, torch.no_grad():
        program.update(Gated(1).state_dict())
        torch.testing.assert_close(program(x), Gated(1)(x))
        program.update({"linear.weight": torch.zeros(4, 4)}, partial=True)
        program.update(other)
        torch.testing.assert_close(program(x), Gated(2)(x))


def test_a_bundle_of_other_values_is_refused(bundle: Path, tmp_path: Path) -> None:
    model = Gated(2).eval()
    model.gate.data[0] = 0.75
    other = tmp_path / "other.cgb"
    cgcompile.build(model, rows, sizes=[2], out=other, target="cpu")
    with cgbundle.load(bundle) as program, raises("update-refused", match="gate' was read by Python"):
        program.update(other)
