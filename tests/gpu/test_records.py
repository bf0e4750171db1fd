"""GPU bundles of models with their own classes as inputs and outputs, captured or cross-compiled, compared with eager PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgcompile  # noqa: E402
from tests.helpers.models import record_checks as checks  # noqa: E402


def test_a_causal_language_model_with_its_cache(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    first, then = (
        cgcompile.build(checks.causal(), inputs, sizes=sizes, out=tmp_path / f"{inputs.__name__}.cgb", target="cuda").path
        for inputs, sizes in ((checks.prompt, {"batch": [1, 2], "seq": [8]}), (checks.step, {"batch": [1, 2], "past": [8]}))
    )
    for device in ("cuda", "cpu"):
        checks.check_prompt_and_step(first, then, device, batch=2, seq=8)
        checks.check_step(then, device, batch=1, past=8)


def test_dataclasses_in_and_out(tmp_path: Path) -> None:
    path = cgcompile.build(
        checks.DataclassModel(), checks.dataclass_inputs, sizes=[1, 4], out=tmp_path / "captured.cgb", target="cuda"
    ).path
    for device in ("cuda", "cpu"):
        checks.check_dataclasses(path, device)


def test_dataclasses_in_a_cross_compiled_bundle(tmp_path: Path) -> None:
    path = cgcompile.build(
        checks.DataclassModel(),
        checks.dataclass_inputs,
        sizes=[1, 4],
        out=tmp_path / "cross_compiled.cgb",
        target="cuda",
        record="cross-compile",
        prove="none",
    ).path
    checks.check_dataclasses(path, "cuda")
