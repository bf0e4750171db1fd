"""Writes a candidate as a bundle and replays it in a new process.  Candidates must pass this before they are timed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from cgbundle.format import file_names
from cgbundle.format.schema import Manifest
from cgbundle.validate import host_code

from ...bundle.emit import seal, write_programs
from ...bundle.proof import replay
from ...bundle.provenance import provenance
from ...bundle.self_test import KeySelfTest
from ...capture.build import CutProgram, emit
from ...targets.build_spec import BuildSpec, manifest_of
from ...transforms.error_bounds import error_bounds
from .candidates import Candidate


def prove(
    spec: BuildSpec,
    candidate: Candidate,
    cut: CutProgram,
    expected: Mapping[str, Sequence[KeySelfTest]],
    stage: Path,
    weights: Path,
    trial: Path,
) -> Manifest:
    """Writes the candidate as a bundle at `trial` and replays it.  Host regions of `stage` are copied; the file `weights` and
    the file of tables beside it are linked.  `expected`: by entry, the results of eager PyTorch.  Raises proof-failed,
    bundle-refused."""
    trial.mkdir(parents=True)
    for path in (weights, weights.with_name(file_names.TABLES)):
        if path.exists():
            os.link(path, trial / path.name)
    if (stage / file_names.HOST).is_dir():
        (trial / file_names.HOST).mkdir()
        for file in (stage / file_names.HOST).iterdir():
            shutil.copyfile(file, trial / file_names.HOST / file.name)  # each bundle appends its own rows
    parts = emit(spec, trial, candidate.recorded, cut, folded=candidate.folded, expected=expected)
    for entry in spec.entries:
        write_programs(trial, entry.programs, entry.name)
    manifest = manifest_of(spec, parts, provenance(spec.first.source.label, {}))
    host_code.attach(trial, manifest)
    sealed = seal(trial, manifest)
    replay(trial, sealed, [error_bounds(entry, sealed.weights) for entry in spec.entries], spec.options.allow)
    return sealed
