"""The capture recorder on a GPU, of what Inductor lowered: it replays bit for bit in a fresh process."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from tests.gpu.helpers.recording import RECORDED, check_recording, record_case, replay  # noqa: E402


@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_replays_bit_for_bit_elsewhere(name: str, tmp_path: Path) -> None:
    check_recording(name, tmp_path, "inductor")


def test_one_lowering_serves_all_sizes(tmp_path: Path) -> None:
    record_case("gpt_small", tmp_path, "inductor", specialize="shared")
    assert replay(tmp_path) == "exact"
