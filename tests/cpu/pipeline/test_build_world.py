"""Models over several GPUs: built by a process for each rank, and interpreted together."""

from __future__ import annotations

from pathlib import Path

import pytest

import cgcompile
from cgbundle.format.archive import Archive
from cgbundle.format.table import Table
from cgbundle.validate import bundle as verify
from cgbundle.validate.special_kernels import exchanges
from cgcompile.bundle import manifest_text
from tests.helpers.raising import raises

HERE = Path(__file__).parent
MODEL = str(HERE / "world_model.py")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("world") / "shares.cgb"
    return cgcompile.build(MODEL, sizes=[4], target="sm_90", world=2, out=out, progress="silent").path


def test_every_collective_is_proved_on_all_ranks(built: Path) -> None:
    bundle = Archive(str(built))
    manifest = bundle.manifest
    assert verify.examine(bundle) == []
    (other,) = verify.check_ranks(bundle, "full")
    for rank_manifest, rank in ((manifest, 0), (other.manifest, 1)):
        world = rank_manifest.world
        assert world is not None
        assert (world.rank, world.size) == (rank, 2)
        (proof,) = rank_manifest.entries[0].self_test.proofs
        assert proof.method == "interpret" and proof.error <= proof.tolerance
        assert dict(rank_manifest.memories)["peer"] == 2 * world.stride
    (program,) = manifest.entries[0].programs
    table = Table(bundle.data(program.steps[0].file), "table")
    collectives = exchanges(table, manifest.world)
    assert [exchange.symbol.removeprefix("cgcompile_") for exchange in collectives[:1]] == ["packets_float32"]
    assert sorted([exchange.symbol.removeprefix("cgcompile_") for exchange in collectives[1:]]) == [
        "buffers_side_by_side", "packets_bfloat16", "packets_side_by_side", "packets_side_by_side",
    ]  # fmt: skip


def test_a_rank_reads_its_own_weights_and_shares_the_images(built: Path) -> None:
    files = manifest_text.list_files(str(built))
    assert {"weights.safetensors", "ranks/1/weights.safetensors", "ranks/1/manifest.json"} <= set(files)
    kernels, others = [{name.removeprefix(at) for name in files if name.startswith(at)} for at in ("kernels/", "ranks/1/kernels/")]
    named = {file.path for file in Archive(str(built)).rank(1).manifest.files if file.path.startswith("kernels/")}
    assert not kernels & others and named <= {f"kernels/{name}" for name in kernels | others}
    assert (built / "weights.safetensors").read_bytes() != (built / "ranks/1/weights.safetensors").read_bytes()


def test_damage_of_any_rank_is_found(built: Path) -> None:
    table = next((built / "ranks/1/graphs").iterdir())
    held = table.read_bytes()
    try:
        table.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
        assert "file-damaged" in [error.code for error in verify.examine(Archive(str(built)))]
        with raises("file-damaged", match="ranks/1/"):
            verify.check_ranks(Archive(str(built)))
    finally:
        table.write_bytes(held)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"target": "cpu"}, "the target cpu has one device"),
        ({"world": 9}, "expected 2 to 8"),
        ({"record": "capture"}, "is cross-compiled"),
        ({"donations": [("a.b", "c.d")]}, "donations"),
    ],
)
def test_what_is_not_built(tmp_path: Path, options: dict[str, object], reason: str) -> None:
    arguments: dict[str, object] = {"sizes": [4], "target": "sm_90", "world": 2, "out": tmp_path / "x.cgb", **options}
    with raises("world-refused", match=reason):
        cgcompile.build(MODEL, progress="silent", **arguments)  # type: ignore[arg-type]


def test_a_model_without_ranks(tmp_path: Path) -> None:
    import torch

    with raises("world-refused", match="a module in memory"):
        cgcompile.build(torch.nn.Linear(1, 1), lambda: (torch.ones(1),), target="sm_90", world=2, progress="silent")
    with raises("source-invalid", match=r"model\(rank, world\) needs the number of GPUs"):
        cgcompile.build(MODEL, sizes=[4], target="sm_90", out=tmp_path / "x.cgb", progress="silent")


def test_a_local_variable_makes_no_ranks(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(
        "import torch\n\ndef model():\n    rank, world = 4, 4\n    return torch.nn.Linear(rank, world)\n\n"
        "def inputs(batch):\n    return torch.ones(batch, 4)\n"
    )
    report = cgcompile.check(str(tmp_path / "plain.py"), sizes=[1], target="cpu")
    assert [finding for finding in report.findings if finding.severity == "refuse"] == []
