"""`python -m tests.avx2` hides AVX-512 from its processes; every CPU golden runs there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cgbundle.cpu.machine import processor_flags
from cgbundle.format import archive
from cgbundle.format.schema import Manifest
from tests.helpers.bundles import tiny_bundle
from tests.helpers.places import GOLDEN, ROOT, skip_older_torch

pytest.importorskip("torch")

SEEN = """
import json, sys, torch
from torch._inductor.cpu_vec_isa import pick_vec_isa
import cgbundle
from cgbundle import self_test
from cgbundle.cpu.machine import processor_flags
from cgcompile.targets.instruction_sets import macros

def answer(path):
    try:
        with cgbundle.load(path) as program:
            return all(result.passed("tolerance") for result in self_test.replay_self_test(program))
    except cgbundle.CgbundleError as error:
        return str(error)

native = macros("g++", "-march=native")
print(json.dumps({
    "flags": sorted(processor_flags()), "macros": [name for name in native if "AVX" in name],
    "torch": torch.backends.cpu.get_cpu_capability(), "Inductor": str(pick_vec_isa()),
    "answers": [answer(path) for path in sys.argv[1:]],
}))
"""


def needs_avx512(manifest: Manifest) -> Manifest:
    return replace(manifest, target=replace(manifest.target, features=("avx2", "avx512f")))


@pytest.mark.skipif(os.uname().machine != "x86_64" or "avx2" not in processor_flags(), reason="needs a processor with AVX2")
def test_every_cpu_golden_runs_without_avx512(tmp_path: Path) -> None:
    """Bundles for this processor are refused if they need AVX-512."""
    skip_older_torch()
    goldens = sorted(GOLDEN.glob("v*/*.cgb"))
    paths = [path for path in goldens if archive.read_manifest(str(path)).target.kind == "cpu"]
    refused = tiny_bundle.write_bundle(tmp_path / "refused.cgb", needs_avx512)
    done = subprocess.run(
        [sys.executable, "-m", "tests.avx2", sys.executable, "-c", SEEN, *paths, refused],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    hidden = processor_flags() - set(seen["flags"])
    assert {name for name in processor_flags() if name.startswith("avx512")} <= hidden and "avx2" not in hidden
    assert "__AVX2__" in seen["macros"] and not any("AVX512" in name for name in seen["macros"])
    assert (seen["torch"], seen["Inductor"]) == ("AVX2", "avx2")
    assert len(paths) >= 6 and seen["answers"][:-1] == [True] * len(paths)
    assert "this processor lacks avx512f, which the bundle's code uses" in seen["answers"][-1]
