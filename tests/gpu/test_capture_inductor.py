"""Captured Inductor kernels replay bit for bit in a new process on a GPU."""

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


def test_what_was_compiled_serves_other_weights_and_one_more_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cgbundle
    import cgcompile

    monkeypatch.setenv("CGCOMPILE_CACHE", str(tmp_path / "cache"))

    def lowered(seed: int, sizes: list[int]) -> set[str]:
        """Returns the int_keys that were lowered before the recording."""
        torch.manual_seed(seed)
        model, texts = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()).eval(), set[str]()
        path = tmp_path / f"{seed}.cgb"
        cgcompile.build(
            model, lambda batch: (torch.randn(batch, 32),), sizes=sizes, out=path, target="cuda",
            progress=lambda event: texts.add(event.text),
        )  # fmt: skip
        x = torch.randn(sizes[-1], 32, device="cuda")
        with cgbundle.load(path) as program:
            torch.testing.assert_close(program(x), model.cuda()(x), rtol=1e-4, atol=1e-4)
        return {text.rpartition("lowering ")[2] for text in texts if text.startswith("prime") and "lowering" in text}

    assert lowered(0, [1, 8]) == {"(1,)", "(8,)"}
    assert lowered(1, [1, 8]) == set()
    assert lowered(2, [1, 8, 16]) == {"(16,)"}
