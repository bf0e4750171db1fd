"""A recorder process loads a saved program and gives its state another number of rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from cgbundle.format.schema import Weight  # noqa: E402
from cgcompile.capture.request import Request, with_more_rows  # noqa: E402
from cgcompile.export.export import export  # noqa: E402
from cgcompile.export.torch_program import on_device, save_program, without_weights  # noqa: E402
from cgcompile.model.flat_module import PREFIX  # noqa: E402
from cgcompile.model.load import load_sources, with_rows  # noqa: E402
from cgcompile.model.source import CUDA, ROWS  # noqa: E402
from cgcompile.targets.cuda.lowering import lower, repair  # noqa: E402
from cgcompile.targets.cuda.tensors import point_weights  # noqa: E402
from cgcompile.transforms.state_rows import with_counted_rows  # noqa: E402
from tests.helpers.models.paged_models import ENTRIES, PAGES, SLOTS, STATE, Paged  # noqa: E402


@pytest.mark.parametrize("more", [0, 200])
def test_a_saved_program_takes_more_rows_of_state(tmp_path: Path, more: int) -> None:
    source = with_rows(load_sources(Paged(), ENTRIES), STATE)[0]
    program = with_counted_rows(export(source, {"batch": (1, 3)}, alone=False).programs.first, source.rows, CUDA)
    save_program(without_weights(program), tmp_path / "put.pt2")
    varying = {PREFIX + name for row in source.rows for name in row.buffers}
    tensors = {}
    for name, value in {**program.state_dict, **program.constants}.items():
        tensors[name] = value.new_zeros((len(value) + more, *value.shape[1:])) if name in varying else value.detach().clone()
        if name.startswith(ROWS):
            tensors[name] += more
    module = repair(on_device(torch.export.load(tmp_path / "put.pt2"), torch.device("cpu"), tensors).module(check_guards=False))
    point_weights(module, tensors)
    model = Paged(PAGES + more, SLOTS + more)
    put = torch.randn(3, 8), torch.tensor([PAGES + more - 1, 0, 1]), torch.tensor([0, 1, 1]), torch.tensor([SLOTS + more - 1, 0, 1])
    with torch.no_grad():
        torch.testing.assert_close(lower(module, "inductor", "size")(*put)[0], model.put(*put))
    torch.testing.assert_close(tensors["model.keys_0"], model.keys_0)
    assert tensors["cgcompile_rows_pages"].tolist() == [PAGES + more]


def test_a_request_for_more_rows(tmp_path: Path) -> None:
    rows = [
        Weight(name=name, tensor=name, dtype="float32", shape=(4, 2), strides=(2, 1), memory="state", offset=offset, zeros=True)
        for name, offset in (("model.cache", 0), ("model.keys", 256))
    ]
    plain = Request(
        role="record", programs={}, calls=tmp_path, result=tmp_path, keys=(), level="", specialize="size", code="", placements={},
        uploads={}, stored=tmp_path, weights=tuple(rows), weights_end=0, state_end=512, inputs_end=0, settings={}, shift=False,
        written={}, self_test_calls={}, varying=("model.keys",),
    )  # fmt: skip
    assert with_more_rows(plain, 1) == replace(plain, weights=(rows[0], replace(rows[1], shape=(5, 2))), more=1)
