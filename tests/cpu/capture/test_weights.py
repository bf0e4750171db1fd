"""Weights in a recorder process: read from the bundle's file directly into the model's tensors, and compared without a second
copy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cpu.capture.recorder import regions

assert regions, "modules of the recorder can be imported from here on"
from cgbundle.format.safetensors_files import Mapped  # noqa: E402
from cgcompile.capture.worker import weights as module  # noqa: E402
from cgcompile.targets.memory_layout import Table, lay_out  # noqa: E402
from cgcompile.targets.weights import contents, shapes_of, write_tables, write_weights  # noqa: E402

TENSORS = {
    "model.a": torch.randn(1000, 7),
    "model.across": torch.randn(6, 5).t(),
    "model.flag": torch.tensor([True, False, True]),
    "model.none": torch.empty(0, 4),
    "model.on_host": torch.randn(3, 2),
    "model.state": torch.arange(5),
    "model.zeros": torch.zeros(4, 3),
    "model.minus": torch.full((2,), -0.0),
}
TENSORS["model.tied"] = TENSORS["model.a"]


def stored(path: Path) -> tuple[tuple[module.Weight, ...], dict[str, torch.Tensor]]:
    layout = lay_out(shapes_of(TENSORS), ("model.state", "model.zeros", "model.minus"), ("model.on_host",))
    written = write_weights(path, TENSORS, layout.rows)
    rows = tuple([replace(row, zeros=weight.zeros) for row, weight in zip(layout.rows, written, strict=True)])
    return rows, {
        "weights": torch.ones(layout.weights_end, dtype=torch.uint8),
        "state": torch.ones(layout.state_end, dtype=torch.uint8),
    }


def test_every_tensor_comes_from_the_file_to_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 1 << 10)  # several blocks per tensor
    rows, buffers = stored(tmp_path / "weights.safetensors")
    module.upload(tmp_path / "weights.safetensors", rows, buffers)
    for row in rows:
        if row.name != "model.on_host":
            expected = contents(TENSORS[row.name], row.strides)
            assert bytes(buffers[row.memory][row.offset : row.offset + len(expected)].numpy()) == expected, row.name
    held = module.on_host(tmp_path / "weights.safetensors", rows)
    assert held.keys() == {"model.on_host"} and torch.equal(held["model.on_host"], TENSORS["model.on_host"])


def test_state_of_zeros_takes_no_bytes(tmp_path: Path) -> None:
    rows, _ = stored(tmp_path / "weights.safetensors")
    assert [row.name for row in rows if row.zeros] == ["model.zeros"], "-0.0 has a bit"
    mapped = Mapped(str(tmp_path / "weights.safetensors"), "weights")
    assert "zeros" not in mapped.entries and "minus" in mapped.entries


def test_any_changed_element_changes_the_digest_of_its_weight_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORDS", 64)
    path = tmp_path / "weights.safetensors"
    rows, buffers = stored(path)
    module.upload(path, rows, buffers)
    before = module.digests(rows, buffers)
    assert before.keys() == {"model.a", "model.across", "model.flag", "model.none", "model.state", "model.zeros", "model.minus"}
    row = next(row for row in rows if row.name == "model.a")
    for at in (0, 13, 27_996):
        buffers["weights"][row.offset + at] ^= 1
        now = module.digests(rows, buffers)
        assert [name for name in now if now[name] != before[name]] == ["model.a"]
        module.upload(path, [row], buffers)
        assert module.digests(rows, buffers) == before
    swapped = buffers["weights"][row.offset : row.offset + 16].view(torch.int64)
    swapped.copy_(swapped.flip(0))
    assert module.digests(rows, buffers)["model.a"] != before["model.a"], "the same words elsewhere"


def test_tables_have_a_file_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "tables.safetensors"
    assert write_tables(path, ()) == () and not path.exists()
    rows = write_tables(path, (Table(offset=512, contents=b"table"), Table(offset=1024, contents=bytes(256))))
    assert [(row.name, row.memory, row.offset, row.shape) for row in rows] == [
        ("cgcompile.table.0", "weights", 512, (5,)), ("cgcompile.table.1", "weights", 1024, (256,)),
    ]  # fmt: skip
    mapped = Mapped(str(path), "tables")
    assert bytes(mapped.data("cgcompile.table.0")) == b"table" and mapped.entries.keys() == {row.tensor for row in rows}
