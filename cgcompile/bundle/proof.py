"""The proof of a staged bundle: a fresh process with the runtime alone loads it and replays the exam."""

from __future__ import annotations

from pathlib import Path

from cgbundle.exam import BITS, fresh, name_key
from cgbundle.format.schema import Manifest, Proof

from ..errors import BuildError


def replay(stage: Path, manifest: Manifest) -> tuple[Proof, ...]:
    """The measured proofs, in the order of the programs.  Raises proof-failed with the first key that fails."""
    answer = fresh(str(stage))
    if "error" in answer:
        raise BuildError("proof-failed", f"the fresh process refused the bundle: {answer['error']}", answer["hint"])
    if answer["torch_imported"]:
        raise BuildError("proof-failed", "the fresh process imported torch: it proves nothing about serving without it")
    proofs = []
    for proof, row in zip(manifest.exam.proofs, answer["results"], strict=True):
        if not row["passed"]:
            promise = "the recorded bits" if manifest.exam.compare == BITS else f"at most {row['tolerance']:.1e}"
            raise BuildError(
                "proof-failed",
                f"int_key {name_key(manifest, row['key'])}: the bundle's outputs differ by {row['error']:.1e}, expected {promise}",
                "nothing was published; please report this model",
            )
        error = proof.error if manifest.exam.compare == BITS else row["error"]
        proofs.append(Proof(key=proof.key, method="replay", error=error, tolerance=proof.tolerance))
    return tuple(proofs)
