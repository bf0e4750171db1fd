"""Cross-compiled state whose number of rows is chosen at load time: the interpreter verifies bundles, and their code does not
depend on the number."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.raising import raises

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import cgcompile  # noqa: E402
from cgbundle.cpu.host_weights import Room, resized  # noqa: E402
from cgbundle.format import archive  # noqa: E402
from cgbundle.format.file_names import KERNELS, all_programs  # noqa: E402
from cgbundle.format.table import Table  # noqa: E402
from cgbundle.gpu.moves import Relocation  # noqa: E402
from cgbundle.validate.contents import check_loaded  # noqa: E402
from tests.helpers.models import row_kernels  # noqa: E402
from tests.helpers.models.paged_models import ENTRIES, PAGES, SLOTS, STATE, Paged  # noqa: E402

MORE_ROWS = {"pages": PAGES + 200, "slots": SLOTS}


def built(folder: Path, pages: int, prove: str) -> archive.Archive:
    out, sizes = folder / f"{pages}.cgb", {"put": [3], "read": [3]}
    bundle = cgcompile.build(Paged(pages), ENTRIES, sizes=sizes, state=STATE, target="sm_90", prove=prove, out=out)
    return archive.Archive(str(bundle.path))


def test_the_code_is_the_same_for_any_number_of_rows(tmp_path: Path) -> None:
    """A bundle that is loaded with more rows has the same recordings as a bundle that is built with more rows."""
    few, many = built(tmp_path, PAGES, "interpret"), built(tmp_path, MORE_ROWS["pages"], "none")
    check_loaded(few)
    assert [proof.method for entry in few.manifest.entries for proof in entry.self_test.proofs] == ["interpret"] * 2
    images = [{file.path for file in bundle.manifest.files if file.path.startswith(KERNELS)} for bundle in (few, many)]
    assert images[0] == images[1]
    resized_manifests = [resized(bundle.manifest, MORE_ROWS, Room(1 << 30, 0.5, "the GPU")) for bundle in (few, many)]
    assert resized_manifests[0].weights == resized_manifests[1].weights
    relocations = [
        Relocation(bundle.manifest, resized_manifest)
        for bundle, resized_manifest in zip((few, many), resized_manifests, strict=True)
    ]
    for one, two in zip(all_programs(few.manifest), all_programs(many.manifest), strict=True):
        for step, other in zip(one.steps, two.steps, strict=True):
            tables = [
                relocation.moved(Table(bundle.data(file), file))
                for relocation, bundle, file in zip(relocations, (few, many), (step.file, other.file), strict=True)
            ]
            for column in ("relocation_at", "relocation_memory", "relocation_offset", "blocks", "grid_x", "threads_x"):
                assert getattr(tables[0], column).tolist() == getattr(tables[1], column).tolist(), column


@pytest.mark.parametrize("sized", [False, True])
def test_operators_of_triton_kernels_may_not_read_the_number_of_rows(tmp_path: Path, sized: bool) -> None:
    def build() -> None:
        cgcompile.build(
            row_kernels.RowKernels(sized), row_kernels.inputs, state={"cache": "rows"}, target="sm_90", out=tmp_path / "x.cgb"
        )

    if sized:
        with raises("state-refused", match=r"int_key \(\): with more rows the kernels or their arguments differ"):
            build()
    else:
        build()
        check_loaded(archive.Archive(str(tmp_path / "x.cgb")))


class Looped(torch.nn.Module):
    """Passes rows of its state through a loop and writes them back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(3, 4))

    def forward(self, row: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        begin = torch.zeros((), dtype=torch.int64, device=x.device), self.kept[row]
        _, output = torch.while_loop(lambda turn, y: turn < 3, lambda turn, y: (turn + 1, y * 0.5 + x), begin)
        self.kept[row] = output
        return output


def test_rows_are_read_before_a_loop_and_written_after_it(tmp_path: Path) -> None:
    out = tmp_path / "looped.cgb"
    inputs = torch.tensor([1, 2]), torch.randn(2, 4)
    cgcompile.build(Looped().eval(), lambda: inputs, state={"kept": "rows"}, target="sm_90", out=out)
    check_loaded(archive.Archive(str(out)))
