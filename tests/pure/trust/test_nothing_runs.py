"""bundles/TRUST.md promises that commands which only show a bundle execute nothing of it. If its signature is wrong, they read only
its manifest."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cgbundle.format import file_names
from tests.helpers.bundles import tiny_bundle
from tests.helpers.bundles.signing import Pair
from tests.helpers.places import GOLDEN, ROOT

CPU, CUDA = GOLDEN / "v1/cpu_state.cgb", GOLDEN / "v1/gpt_two.cgb"

LOOKS = (
    ("inspect", CPU), ("inspect", "--json", CPU), ("inspect", "--kernels", CUDA), ("inspect", "--memory", CUDA),
    ("inspect", "--html", "-", CUDA), ("inspect", "--dot", CUDA), ("verify", CPU), ("verify", CUDA), ("verify", "--json", CPU),
    ("diff", CPU, CUDA), ("diff", CPU, CPU),
)  # fmt: skip

WATCH = """
import contextlib, ctypes, io, json, os, pickle, sys

EXECUTES = {"ctypes.dlopen", "pickle.find_class", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork"}
seen = []

def watch(event, arguments):
    name = arguments[0] if arguments else ""
    if event in EXECUTES or event == "open" and isinstance(name, str) and (".cgb" in name or not name.startswith("/")):
        seen.append((event, str(name)))

from cgcompile_cli import main
import cgbundle, cgbundle.cpu.backend, cgbundle.validate.bundle, typer.testing
sys.addaudithook(watch)
"""


def watched(code: str, *arguments: object) -> list[tuple[str, str]]:
    """Returns what a process executed, and every file of a bundle that it opened."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "cli"), str(ROOT / "bundles")])
    done = subprocess.run(
        [sys.executable, "-c", WATCH + code + "\nprint(json.dumps(seen))", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [(event, what) for event, what in json.loads(done.stdout.splitlines()[-1])]


def test_inspect_verify_and_diff_execute_nothing() -> None:
    code = f"""
for command in {[[str(word) for word in command] for command in LOOKS]!r}:
    made = typer.testing.CliRunner().invoke(main.app, command)
    assert made.output and not isinstance(made.exception, Exception), (command, made.exception)
"""
    seen = watched(code)
    assert [event for event in seen if event[0] != "open"] == []
    opened = {what for _, what in seen}
    assert {file_names.MANIFEST, file_names.WEIGHTS, "model.so"} <= opened, "files are seen"


def test_the_check_detects_execution() -> None:
    """A test of the test above: it fails if something is executed."""
    code = """
with contextlib.suppress(OSError): ctypes.CDLL(sys.argv[1])
pickle.loads(pickle.dumps(print))
os.system("true")
"""
    seen = watched(code, CPU / "host/nothing.so")
    assert {event for event, _ in seen} == {"ctypes.dlopen", "pickle.find_class", "os.system"}


@pytest.mark.parametrize("wrong", ["another key", "no signature", "a changed manifest"])
def test_a_load_that_the_key_refuses_reads_manifest_and_signature_alone(tmp_path: Path, wrong: str) -> None:
    from cgcompile.bundle.sign import sign

    bundle, ours = tiny_bundle.write_bundle(tmp_path / "tiny.cgb"), Pair.make(tmp_path)
    if wrong != "no signature":
        sign(bundle, ours.private)
    if wrong == "a changed manifest":
        (bundle / file_names.MANIFEST).write_bytes((bundle / file_names.MANIFEST).read_bytes() + b"\n")
    key = Pair.make(tmp_path, "theirs").digits if wrong == "another key" else ours.digits
    code = """
try: cgbundle.load(sys.argv[1], key=sys.argv[2])
except cgbundle.CgbundleError as error: assert error.code.startswith("signature-"), error
else: raise AssertionError("loaded")
"""
    seen = watched(code, bundle, key)
    assert {what for event, what in seen if event == "open"} <= {str(bundle), file_names.MANIFEST, file_names.SIGNATURE}
    assert [event for event in seen if event[0] != "open"] == []


UNPICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "zipfile", "runpy", "code", "importlib.util"}


@pytest.mark.parametrize("path", sorted((ROOT / "bundles/cgbundle").rglob("*.py")), ids=lambda path: path.stem)
def test_the_runtime_has_no_way_to_execute_python_from_a_file(path: Path) -> None:
    """The runtime has no pickle and no eval, and opens program.pt2 only to hash it."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & UNPICKLES
        elif isinstance(node, ast.ImportFrom):
            assert node.module not in UNPICKLES
        elif isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in ("eval", "exec", "compile", "__import__"), f"{path}:{node.lineno}"
        elif isinstance(node, ast.Name) and node.id == "PROGRAM" and path.name != "file_names.py":
            assert path.name == "bundle.py", "the manifest has to list it; nothing else asks for it"
