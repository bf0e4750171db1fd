"""Objects that are still held when the interpreter ends, with modules already emptied, are freed silently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.places import ROOT

HOLDING = """
import abc, ctypes, os, sys
from cgbundle.call.update import OpenFile
from cgbundle.format.archive import Archive
from cgbundle.process import KeptFile
from cgbundle.tensors.capsules import export
from cgbundle.tensors.tensor import Tensor, empty

folder = sys.argv[1]
own = empty("float32", (4,))

class Held:
    def __dlpack__(self, **options):
        return export(own.address, "float32", (4,), (1,), own, (1, 0))

    def __dlpack_device__(self):
        return 1, 0

files = [KeptFile(os.open(folder, os.O_RDONLY)), Archive(folder), OpenFile(folder + "/weights.safetensors")]
held = [*files, own, Held().__dlpack__()]
if "numpy" in sys.argv:
    import numpy
    held.append(numpy.from_dlpack(Held()))
abc.held = held, list(sys.modules.values())  # abc is emptied after them
"""


@pytest.mark.parametrize("library", ["", "numpy"])
def test_what_is_held_at_the_end_says_nothing(library: str) -> None:
    if library:
        pytest.importorskip(library)
    bundle = ROOT / "tests/golden/v1/mlp.cgb"
    environment = {**os.environ, "PYTHONPATH": str(Path(ROOT, "bundles"))}
    process = subprocess.run([sys.executable, "-c", HOLDING, str(bundle), library], capture_output=True, text=True, env=environment)
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
