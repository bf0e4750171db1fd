"""prove: a fresh process with the runtime alone loads the staged bundle, replays the exam and reports; nothing is published that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cgbundle
from cgbundle.schema import Manifest, Proof

from .errors import ProofFailed


def prove(stage: Path, manifest: Manifest) -> tuple[Proof, ...]:
    """The measured proofs, in the order of the programs.  Raises ProofFailed with the first key that fails, or the runtime's own error."""
    runtime = str(Path(cgbundle.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([runtime, *filter(None, [os.environ.get("PYTHONPATH")])])}
    process = subprocess.run(
        [sys.executable, "-m", "cgbundle.exam", str(stage)], capture_output=True, text=True, env=environment, check=False
    )
    answer = _answer(process)
    if "error" in answer:
        raise ProofFailed(f"the fresh process refused the bundle: {answer['error']}")
    if answer["torch_imported"]:
        raise ProofFailed("the fresh process imported torch: it proves nothing about serving without it")
    proofs = []
    for proof, row in zip(manifest.exam.proofs, answer["results"], strict=True):
        if not (row["exact"] if manifest.exam.compare == "bits" else row["error"] <= row["tolerance"]):
            raise ProofFailed(
                f"int_key {_key(manifest, row['key'])}: the bundle differs from eager PyTorch by {row['error']:.1e}, allowed {row['tolerance']:.1e}",
                "nothing was published; please report this model",
            )
        proofs.append(Proof(key=proof.key, method="replay", error=row["error"], tolerance=proof.tolerance))
    return tuple(proofs)


def _answer(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = process.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        said = (process.stderr.strip().splitlines() or ["no message"])[-1]
        how = f"was killed by signal {-process.returncode}" if process.returncode < 0 else f"ended with code {process.returncode}"
        raise ProofFailed(f"the fresh process {how}: {said}")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _key(manifest: Manifest, key: Sequence[int]) -> str:
    return ", ".join(f"{dimension.name}={size}" for dimension, size in zip(manifest.dimensions, key, strict=True)) or "()"
