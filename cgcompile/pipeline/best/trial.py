"""A candidate as a bundle of its own, replayed in a fresh process: the proof that every bundle has to pass, before it is timed."""

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
from ...targets.build_spec import BuildSpec
from ...transforms.error_bounds import error_bounds
from ..manifest import manifest_of
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
    """Writes the candidate as a bundle at `trial`, with a copy of the host regions of `stage`, and links to the file of `weights`
    and to that of the tables beside it.  Then replays it.  `expected`: by entry, what eager PyTorch gives.  Raises proof-failed,
    bundle-refused."""
    trial.mkdir(parents=True)
    for path in (weights, weights.with_name(file_names.TABLES)):
        if path.exists():
            os.link(path, trial / path.name)
    if (stage / file_names.HOST).is_dir():
        (trial / file_names.HOST).mkdir()
        for file in (stage / file_names.HOST).iterdir():
            shutil.copyfile(file, trial / file_names.HOST / file.name)  # each bundle writes its own rows behind it
    parts = emit(spec, trial, candidate.recorded, cut, folded=candidate.folded, expected=expected)
    for entry in spec.entries:
        write_programs(trial, entry.prepared.programs, entry.name)
    manifest = manifest_of(spec, parts, [()] * len(spec.entries), provenance(spec.entries[0].source.label, {}))
    host_code.attach(trial, manifest)
    sealed = seal(trial, manifest)
    replay(trial, sealed, [error_bounds(entry.prepared, sealed.weights) for entry in spec.entries], spec.allow)
    return sealed
