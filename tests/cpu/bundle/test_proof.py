"""The answers of the replay process become proofs. A proof has the error against eager PyTorch, or the distance from a recording's
results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cgbundle.format.schema import Manifest
from cgbundle.self_test import Compared, Result
from cgcompile.bundle import proof
from cgcompile.transforms.error_bounds import ErrorBound
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.tiny_bundle import SIZES, manifest
from tests.helpers.bundles.tiny_bundle import proof as proved
from tests.helpers.raising import raises

BOUND = ErrorBound(title="output y (float32)", bound=1e-5, exact=False, rounded=True)


def sealed_manifest(expected: str, compare: str = "tolerance") -> Manifest:
    """Returns the manifest before the replay. If the expected outputs are those of a recording, these had the error 4e-6 against
    eager PyTorch."""
    errors = (4e-6,) if expected == "recording" else ()
    proofs = tuple([proved(size, method="none", errors=errors) for size in SIZES])
    base = manifest()
    return edited(base, self_test=replace(base.entries[0].self_test, compare=compare, expected=expected, proofs=proofs))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    def answer(compare: str, *errors: float) -> None:
        rows = []
        for size, error in zip(SIZES, errors, strict=True):
            tensor = Compared(
                title=BOUND.title, error=error, bound=1e-5, exact=not error, text="1 of 8 values differ" if error else ""
            )
            rows.append(Result(entry="forward", key=(size,), tensors=(tensor,)).plain(compare))
        monkeypatch.setattr(proof, "fresh", lambda path, outputs="": {"results": rows, "torch_imported": False})

    return answer


def test_beside_a_recording_both_distances_are_kept(answers: Any) -> None:
    """The proof keeps the recording's error against eager PyTorch, and the largest difference between the replay and the
    recording."""
    answers("tolerance", 1e-6, 0.0)
    (self_test,) = proof.replay(Path("nowhere"), sealed_manifest("recording"), [[BOUND]], ()).self_tests
    assert [(row.method, row.error, row.errors, row.distance) for row in self_test.proofs] == [
        ("replay", 4e-6, (4e-6,), 1e-6), ("replay", 4e-6, (4e-6,), 0.0),
    ]  # fmt: skip


def test_without_a_recording_the_replay_is_what_is_compared_with_eager(answers: Any) -> None:
    answers("tolerance", 1e-6, 2e-6)
    (self_test,) = proof.replay(Path("nowhere"), sealed_manifest("eager"), [[BOUND]], ()).self_tests
    assert [(row.method, row.error, row.tolerance, row.errors, row.distance) for row in self_test.proofs] == [
        ("replay", 1e-6, 1e-5, (1e-6,), 0.0), ("replay", 2e-6, 1e-5, (2e-6,), 0.0),
    ]  # fmt: skip
    answers("tolerance", 1e-6, 2e-5)
    words = (
        r"batch=4: the bundle's outputs differ from eager PyTorch: output y \(float32\): by 2.0e-05, allowed 1.0e-05: 1 of 8 values"
    )
    with raises("proof-failed", match=words):
        proof.replay(Path("nowhere"), sealed_manifest("eager"), [[BOUND]], ())


@pytest.mark.parametrize(("compare", "error"), [("bits", 1e-9), ("tolerance", 2e-5)])
def test_a_replay_that_is_not_its_recording_is_refused(answers: Any, compare: str, error: float) -> None:
    answers(compare, 0.0, error)
    with raises(
        "proof-failed", match=r"batch=4: the replay differs from the recording: output y \(float32\): 1 of 8 values differ"
    ):
        proof.replay(Path("nowhere"), sealed_manifest("recording", compare), [[BOUND]], ())
