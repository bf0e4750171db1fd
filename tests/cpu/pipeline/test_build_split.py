"""Models whose layers are split over several GPUs: built by a process for each GPU, and interpreted together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cgcompile
from cgbundle.format.archive import Archive
from cgbundle.format.table import Table
from cgbundle.validate import bundle as verify
from cgbundle.validate.special_kernels import exchanges
from cgcompile.bundle.ranks import Ranks, Value
from cgcompile.pipeline.build import build
from cgcompile.targets.choice import Options
from tests.helpers.raising import raises

MODEL = str(Path(__file__).parent / "layers_model.py")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("split") / "layers.cgb"
    return cgcompile.build(MODEL, sizes={"batch": [2, 4]}, target="sm_90", world=2, split="layers", out=out, progress="silent").path


def test_both_devices_are_proved_together(built: Path) -> None:
    bundle = Archive(str(built))
    assert verify.examine(bundle) == []
    (other,) = verify.check_ranks(bundle, "full")
    for rank_bundle in (bundle, other):
        forward, reset = rank_bundle.manifest.entries
        proofs = [*forward.self_test.proofs, *reset.self_test.proofs]
        assert [proof.method for proof in proofs] == ["interpret"] * 4
        assert all(proof.error <= proof.tolerance for proof in proofs)
        for program, sent in [*[(program, 4) for program in forward.programs], *[(program, 0) for program in reset.programs]]:
            table = Table(rank_bundle.data(program.steps[0].file), "table")
            assert len(exchanges(table, rank_bundle.manifest.world)) == sent, "a value to the second device, and three outputs"
    assert dict(bundle.manifest.provenance.options)["split"] == "layers"


def test_a_device_has_its_own_layers(built: Path) -> None:
    bundle = Archive(str(built))
    first, second = [{row.name: row for row in rank_bundle.manifest.weights} for rank_bundle in (bundle, bundle.rank(1))]
    for number in range(5):
        owner, others = (first, second) if number < 2 else (second, first)
        assert f"layers.{number}.up" in owner and f"layers.{number}.up" not in others
        assert owner[f"layers.{number}.calls"].memory == "state" and f"layers.{number}.calls" not in others
    assert "embedding" in first and "embedding" in second, "it is read at both ends"


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        ({"world": None}, "world-refused", "split='layers' without world"),
        ({"split": "rows"}, "option-invalid", "split 'rows': expected layers"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, options: dict[str, Any], code: str, reason: str) -> None:
    kwargs: dict[str, Any] = {"sizes": [4], "target": "sm_90", "world": 2, "split": "layers", "out": tmp_path / "x.cgb", **options}
    with raises(code, match=reason):
        cgcompile.build(MODEL, progress="silent", **kwargs)


class Alone(Ranks):
    """A single rank; it receives its own values instead of those of the other ranks."""

    def gathered(self, value: Value) -> list[Value]:
        return [value] * self.size


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("x.add_(1)\n        return self.layers(x)", "writes to an input"),
        ("return self.layers(x) + torch.rand_like(x)", "draws random numbers"),
        ("return x + self.layers[0].weight", "no list of layers"),
    ],
)
def test_models_that_cannot_be_split(tmp_path: Path, body: str, reason: str) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n\n"
        f"    def forward(self, x):\n        {body}\n\n\ndef model():\n    return Model().eval()\n\n\n"
        "def inputs():\n    return (torch.ones(4, 4),)\n"
    )
    options = Options(target="sm_90", record="cross-compile", prove="none", world=2, split="layers")
    with raises("split-refused", match=reason):
        build(str(path), None, options, ranks=Alone(rank=0, size=2), out_path=tmp_path / "rank")
