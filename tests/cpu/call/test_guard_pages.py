"""No golden CPU bundle accesses memory outside of its inputs: the inputs lie between inaccessible pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cgbundle.format import archive
from tests.helpers.places import GOLDEN, ROOT

CPU = [path for path in sorted(GOLDEN.glob("v*/*.cgb")) if archive.read_manifest(str(path)).target.kind == "cpu"]

CALLS = """
import sys
from contextlib import closing
import cgbundle
from cgbundle import self_test
from cgbundle.errors import MachineError
from cgbundle.format import archive, file_names
from tests.helpers.drivers.guard_pages import guarded
for path in sys.argv[1:]:
    try:
        program = cgbundle.load(path)
    except MachineError as error:
        print("cannot run here:", error)
        continue
    with program, closing(archive.Archive(path).mapped(file_names.SELF_TEST)) as stored:
        for key in program.int_keys:
            for at_end in (False, True):
                inputs = self_test.inputs_of(stored, program.manifest.entries[0], key)
                made = program.replay([guarded(each.tobytes(), each.dtype, each.shape, at_end=at_end) for each in inputs])
                print(len(made), "outputs of", len(b"".join([each.tobytes() for each in made])), "bytes")
"""

OUTSIDE = """
import ctypes
from tests.helpers.drivers.guard_pages import GuardedMemory
memory = GuardedMemory(100, at_end={at_end})
ctypes.memset(memory.address, 1, 100)
print("inside", flush=True)
ctypes.memset(memory.address {offset}, 1, 1)
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment())


def environment() -> dict[str, str]:
    return {"PYTHONPATH": f"{ROOT}:{ROOT}/cli:{ROOT}/bundles", "PATH": "/usr/bin:/bin"}


@pytest.mark.parametrize(("at_end", "offset"), [(True, "+ 100"), (False, "- 1")])
def test_a_byte_outside_ends_the_process(at_end: bool, offset: str) -> None:
    done = python(OUTSIDE.format(at_end=at_end, offset=offset))
    assert done.stdout == "inside\n" and done.returncode < 0


def test_calls_stay_inside_their_inputs() -> None:
    done = python(CALLS, *map(str, CPU))
    assert done.returncode == 0, done.stderr[-500:]
    lines = done.stdout.splitlines()
    if any(line.startswith("cannot") for line in lines):
        pytest.skip(lines[0])
    assert len(lines) == sum(2 * len(archive.read_manifest(str(path)).entries[0].programs) for path in CPU)
