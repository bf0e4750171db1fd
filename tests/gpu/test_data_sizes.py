"""Outputs with data-dependent sizes on a GPU: captured and cross-compiled bundles equal eager PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

import cgbundle
from cgbundle.program.opening import MODES
from tests.helpers.raising import raises

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

from torch.utils._pytree import tree_leaves  # noqa: E402

from tests.helpers.models.selecting_models import Head, boxes  # noqa: E402

SIZES = (12, 100)
"""Small sizes: Triton needs 40 seconds to compile a kernel that sorts 300 numbers."""


@pytest.mark.parametrize("record", ["capture", "cross-compile"])
def test_calls_return_true_sizes(record: str, tmp_path: Path) -> None:
    import cgcompile

    model, path = Head().eval(), tmp_path / "head.cgb"
    proof = {"prove": "none"} if record == "cross-compile" else {}
    cgcompile.build(model, boxes, sizes=SIZES, out=path, target="cuda", record=record, **proof)
    nothing = -30 * torch.linalg.pinv(model.scores.weight.detach()).sum(1)  # a box whose scores are all low
    eager, seen = model.cuda(), set()
    for mode in MODES:
        for outputs in ("copy", "view"):
            with cgbundle.load(path, mode=mode, outputs=outputs) as program, torch.no_grad():
                assert [[step.kind for step in spec.steps] for spec in program.manifest.entries[0].programs] == [["graph"]] * 2
                for seed in range(60):
                    torch.manual_seed(seed)
                    (x,) = boxes(SIZES[seed % 2])
                    x = (x * 0 + nothing if seed % 5 == 0 else x.abs() * 30 if seed % 5 == 1 else x).cuda()
                    wanted, actual = eager(x), program(x)
                    seen.add(len(wanted["boxes"]))
                    for want, got in zip(tree_leaves(wanted), tree_leaves(actual), strict=True):
                        value = got.tensor if outputs == "view" else got
                        assert value.device == x.device
                        torch.testing.assert_close(value, want, rtol=1e-4, atol=1e-4)
                host = program(x.cpu())
                for want, got in zip(tree_leaves(eager(x)), tree_leaves(host), strict=True):
                    value = got.tensor if outputs == "view" else got
                    torch.testing.assert_close(value, want.cpu(), rtol=1e-4, atol=1e-4)
    assert 0 in seen and len(seen) > 5


def test_a_call_is_no_part_of_a_callers_capture(tmp_path: Path) -> None:
    import cgcompile

    path = cgcompile.build(Head().eval(), boxes, sizes=[12], out=tmp_path / "head.cgb", target="cuda").path
    x = torch.randn(12, 4, device="cuda")
    with cgbundle.load(path) as program:
        program(x)
        torch.cuda.synchronize()
        with raises("capture-refused", match="depend on data"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            program(x)
