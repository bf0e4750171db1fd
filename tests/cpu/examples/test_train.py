"""A training step as an entry: losses equal those of eager PyTorch, and training continues from saved state with the same
losses."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from tests.cpu.examples.test_examples import load  # noqa: E402

STEPS = 30

ADDED_BY_ATOMICS = {"embedding_dense_backward", "index_put", "index_add", "scatter_add", "scatter_reduce", "_index_put_impl_"}
"""Operators that sum with atomic additions on a GPU, in any order."""


def test_steps_of_a_bundle_are_those_of_eager_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = load("train")
    for name, value in (("LAYERS", 1), ("WIDTH", 16), ("HEADS", 2), ("LENGTH", 8), ("BATCH", 4)):
        monkeypatch.setattr(train, name, value)
    eager = train.model()
    entries = train.entries()
    path = cgcompile.build(train.model(), {"step": entries["step"]}, out=tmp_path / "train.cgb", target="cpu").path
    torch.manual_seed(1)
    drawn = [train.sequences(train.BATCH) for _ in range(STEPS)]
    with torch.no_grad():
        expected = [float(eager.step(*batch)) for batch in drawn]
    with cgbundle.load(path) as program:
        losses = [float(program.step(*batch)) for batch in drawn[: STEPS // 2]]
        kept = {name: torch.from_dlpack(program.state[name]).clone() for name in program.state}
        losses += [float(program.step(*batch)) for batch in drawn[STEPS // 2 :]]
    with cgbundle.load(path) as resumed:
        for name, value in kept.items():
            resumed.state[name] = value
        again = [float(resumed.step(*batch)) for batch in drawn[STEPS // 2 :]]
    assert losses == pytest.approx(expected, rel=1e-3) and losses[-1] < losses[0]
    assert again == losses[STEPS // 2 :]


def test_no_gradient_depends_on_the_order_of_threads() -> None:
    gradients = load("train").model().gradients
    called = {
        str(node.target).split(".")[1]
        for node in gradients.graph.nodes
        if node.op == "call_function" and "aten" in str(node.target)
    }
    assert "mm" in called and not called & ADDED_BY_ATOMICS
