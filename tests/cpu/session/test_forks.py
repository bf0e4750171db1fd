"""In a forked process some functions of a loaded program work; all others raise an error at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.places import GOLDEN, skip_older_torch

BEGIN = f"""
import gc, multiprocessing, os, sys, threading
import cgbundle
path = {str(GOLDEN / "v1" / "cpu_mlp.cgb")!r}

def call(program):
    return bytes(program(*inputs(program))[:1])

def inputs(program):
    from array import array
    from cgbundle.tensors.tensor import from_bytes
    spec, = program.inputs
    shape = [size if isinstance(size, int) else program.int_keys[0][0] for size in spec.shape]
    count = 1
    for size in shape:
        count *= size
    return [from_bytes(array("f", range(count)).tobytes(), spec.dtype, tuple(shape))]

def said(act):
    try:
        act()
    except cgbundle.CallError as error:
        return f"{{error.code}}: {{error}}"
    return "done"

def in_child(act):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            print(act(), flush=True)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""

LOADED = "process-forked: program 'sequential' was loaded before this process was forked, and works in the parent only"
CALLED = "process-forked: this process was forked after its parent had run CPU code, whose threads do not exist here"

SCRIPTS = {
    "nothing but imports": ("in_child(lambda: said(lambda: cgbundle.load(path).replay(inputs(cgbundle.load(path)))))", ["done"]),
    "loaded": (
        """
program = cgbundle.load(path)
in_child(lambda: said(lambda: program.replay(inputs(program))))
in_child(lambda: said(lambda: cgbundle.load(path).replay(inputs(program))))
in_child(lambda: said(program.session))
print(said(lambda: program.replay(inputs(program))))
""",
        [LOADED, "done", LOADED, "done"],
    ),
    "called": (
        """
program = cgbundle.load(path)
session = program.session()
kept = program.replay(inputs(program)), session.replay(inputs(program))
in_child(lambda: said(lambda: program.replay(inputs(program))))
in_child(lambda: said(lambda: session.replay(inputs(program))))
in_child(lambda: said(lambda: cgbundle.load(path)))
in_child(lambda: said(program.close))
def forget():
    global program, session, kept
    del program, session, kept
    gc.collect()
    return "collected"
in_child(forget)
print(said(lambda: program.replay(inputs(program))))
""",
        [LOADED, LOADED, CALLED, "done", "collected", "done"],
    ),
    "a pool of processes": (
        """
program = cgbundle.load(path)
program.replay(inputs(program))
def work(number):
    return bool(program.replay(inputs(program)))
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(said(lambda: pool.map(work, [1])))
""",
        [LOADED],
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_forked_process_works_or_says_why_not(name: str) -> None:
    skip_older_torch()
    script, expected = SCRIPTS[name]
    done = subprocess.run([sys.executable, "-c", BEGIN + script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected
