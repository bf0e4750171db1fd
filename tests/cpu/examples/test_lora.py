"""The LoRA example: adapters selected by row from a bank, and merged ones, equal eager PyTorch."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.places import ROOT

torch = pytest.importorskip("torch")

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402

SMALL = {"LORA_LAYERS": "2", "LORA_WIDTH": "16", "LORA_RANK": "2", "LORA_SLOTS": "4"}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def test_adapters_by_row_and_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setenv(name, value)
    lora = SimpleNamespace(**runpy.run_path(str(ROOT / "examples/lora.py")))
    built = cgcompile.build(str(ROOT / "examples/lora.py"), sizes=[1, 4], out=tmp_path / "lora.cgb", target="cpu")
    network = lora.model()
    torch.manual_seed(1)
    adapters = {slot: lora.adapter() for slot in (1, 2, 3)}
    x, _ = lora.rows(4)
    slot = torch.tensor([3, 0, 1, 2])
    with cgbundle.load(built.path) as program, torch.no_grad():
        torch.testing.assert_close(program(x, slot), network(x, torch.zeros_like(slot)), **CLOSE)
        for number, (down, up) in adapters.items():
            program.load(torch.tensor([number]), down, up)
            network.load(torch.tensor([number]), down, up)
        want = network(x, slot)
        assert (want - network(x, torch.zeros_like(slot))).abs().amax((1, 2))[1] == 0, "slot 0 is none"
        torch.testing.assert_close(program(x, slot), want, **CLOSE)
        torch.testing.assert_close(program(x[:3], slot[:3]), want[:3], **CLOSE)
        program.load(torch.tensor([3]), *[value.zero_() for value in lora.adapter()])
        torch.testing.assert_close(program(x, slot)[0], network(x, torch.zeros_like(slot))[0], **CLOSE)
        program.update(lora.merged(network.state_dict(), *adapters[2]), partial=True)
        torch.testing.assert_close(program(x, torch.zeros_like(slot)), network(x, torch.full_like(slot, 2)), **CLOSE)
