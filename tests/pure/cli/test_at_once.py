"""Commands that need no torch answer at once: they import neither torch nor Rich, and few modules in total. Seconds are not tested,
since the machine may be busy. An answer takes 0.1 to 0.2 s of processor time with the counted modules; importing torch takes 2 s,
Rich 0.1 s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.places import ROOT

COUNTED = """
import atexit, json, os, sys

class Refusing:
    def create_module(self, spec):
        raise AssertionError(f"{spec.name} is imported")

    def exec_module(self, module):
        pass

class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {"torch", "triton", "numpy", "rich", "safetensors", "asyncio", "transformers"}:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)):
                spec.loader = Refusing()
                return spec

sys.meta_path.insert(0, Ban())
atexit.register(lambda: open(os.environ["MODULES"], "w").write(json.dumps(list(sys.modules))))
from cgcompile_cli.main import main
main()
"""

MODEL = """
import torch

def model():
    raise AssertionError("the model was made")

def inputs(batch: int, seq: int = 8):
    return torch.zeros(batch, seq)
"""

MOST = 400
"""Limit for the length of `sys.modules` at the end: commands have 290 to 370 modules, and 2000 with torch. More than half belong to
Typer."""


class Answer:
    """The output of a command in a process that may import neither torch nor Rich, and its modules at the end."""

    def __init__(self, folder: Path, *arguments: object, before: str = "", **more: str) -> None:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "cli"), str(ROOT / "bundles")])
        modules_file = folder / "modules.json"
        done = subprocess.run(
            [sys.executable, "-c", COUNTED.replace("main()", f"{before}main()"), *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": paths, "MODULES": str(modules_file), "COLUMNS": "80"} | more,
            capture_output=True, text=True, check=False, cwd=folder,
        )  # fmt: skip
        self.status, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.modules: list[str] = json.loads(modules_file.read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Changes to a folder with a model, a bundle of that name, and files that are neither."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "broken.py").write_text("import torch; def\n")
    (tmp_path / "half.py").write_text("import torch\ndef model(): ...\n")
    (tmp_path / "false.pt2").write_text("not a program")
    (tmp_path / "there.cgb").mkdir()
    (tmp_path / "there.cgb/manifest.json").write_text("{}")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("raise AssertionError('the package was imported')\n")
    (tmp_path / "package/models.py").write_text(MODEL)
    return tmp_path


BOTH = ("--sizes", "batch=1,4", "--sizes", "seq=8")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("build", "nosuch.py"), 2, "nosuch.py: no such file"),
        (("build", "package"), 2, "package: a directory without config.json, and no model file"),
        (("build", "nonsense"), 2, "nonsense: no such model"),
        (("build", "nosuch:model"), 2, "nosuch:model: no module 'nosuch'"),
        (("build", "package.models:other", *BOTH), 2, "module 'package.models' has no attribute 'other'"),
        (("build", "package.models:model.part", "--sizes", "8"), 2, "the model declares 2 dimensions (batch, seq): name each"),
        (("build", "nosuch.pt2"), 2, "nosuch.pt2: no such file"),
        (("build", "false.pt2"), 1, "false.pt2: not a zip archive, as a saved program is"),
        (("build", "broken.py", "--sizes", "1"), 1, "broken.py:1: invalid syntax: import torch; def"),
        (("build", "half.py", "--sizes", "1"), 1, "half.py: it has no inputs()"),
        (("build", "model.py", "--sizes", "batch=0", "--sizes", "seq=8"), 2, "batch=0 is not a positive whole number"),
        (("build", "model.py", "--sizes", "batch=1"), 2, "no size for dimension 'seq'"),
        (("build", "model.py", "--sizes", "rows=1"), 2, "there is no declared dimension 'rows' (declared: batch, seq)"),
        (("build", "model.py"), 2, "no size for dimensions 'batch' and 'seq'"),
        (("build", "model.py", *BOTH, "--allow", "host_scalr"), 2, "allow 'host_scalr': no such rule (did you mean host-scalar"),
        (("build", "model.py", *BOTH, "--force", "--alow", "x"), 2, "no such option: --alow (did you mean --allow?)"),
        (("build", "model.py", *BOTH, "--max-keys", "1"), 2, "makes 2 int_keys, more than 1"),
        (("build", "model.py", *BOTH, "-o", "there.cgb"), 2, "there.cgb: exists"),
        (("build", "model.py", *BOTH, "-o", "missing/new.cgb"), 2, "/missing does not exist"),
        (("build", "model.py", *BOTH, "-o", "there.cgb", "--target", "sm_999"), 2, "target 'sm_999': no such architecture"),
        (("build", "model.py", *BOTH, "--target", "cpu", "--lower", "eager"), 2, "the cpu target has one lowering"),
        (("check", "nosuch.py"), 2, "nosuch.py: no such file"),
        (("check", "model.py", "--sizes", "batch=x"), 2, "'x' is not a whole number"),
        (("check", "model.py", "--target", "sm_999"), 2, "target 'sm_999': no such architecture"),
        (("inspect", "nosuch.cgb"), 2, "nosuch.cgb: no such bundle"),
        (("verify", "nosuch.cgb"), 2, "nosuch.cgb: no such bundle"),
        (("run", "nosuch.cgb"), 2, "nosuch.cgb: no such bundle"),
        (("bench", "nosuch.cgb"), 2, "nosuch.cgb: no such bundle"),
        (("diff", "a.cgb", "b.cgb"), 2, "a.cgb: no such bundle"),
        (("sign", "nosuch.cgb", "--key", "k"), 2, "k: No such file"),
        (("sizes", "nosuch"), 2, "nosuch: no such file"),
        (("build", "model.py", *BOTH, "--target", "cpu", "--target", "cpu"), 2, "--target takes one value, got 2"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_a_wrong_argument_is_told_at_once(folder: Path, arguments: tuple[str, ...], status: int, said: str) -> None:
    answer = Answer(folder, *arguments)
    first, *rest = answer.err.splitlines()
    assert (answer.status, answer.out) == (status, "") and first.startswith("error: ") and said in first, answer.err
    assert len(rest) <= 1 and all(line.startswith("hint: ") for line in rest)
    assert len(answer.modules) < MOST, sorted(answer.modules)


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("build", "--help"), ("bench", "--help")])
def test_help_and_versions_are_told_at_once(folder: Path, arguments: tuple[str, ...]) -> None:
    answer = Answer(folder, *arguments)
    assert (answer.status, answer.err) == (0, "") and len(answer.modules) < MOST


@pytest.mark.parametrize(
    "line", ["cgcompile b", "cgcompile build --lower m", "cgcompile build --target s", "cgcompile bench --against e"]
)
def test_completion_comes_at_once(folder: Path, line: str) -> None:
    asked = {"_CGCOMPILE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    answer = Answer(folder, **asked)
    assert (answer.status, answer.err) == (0, "") and answer.out and len(answer.modules) < MOST


def test_a_folder_that_cannot_be_written_is_told_at_once(folder: Path) -> None:
    refusing = "import os\nos.access = lambda *asked: False\n"
    answer = Answer(folder, "build", "model.py", *BOTH, "--target", "cpu", before=refusing)
    assert answer.status == 2 and answer.err.startswith(f"error: model.cgb: the folder {folder} cannot be written\nhint: ")


def test_there_is_a_compiler_or_it_is_told_at_once(folder: Path) -> None:
    answer = Answer(folder, "build", "model.py", *BOTH, "--target", "cpu", CXX="no-such-compiler")
    assert answer.status == 1 and answer.err.startswith("error: no C++ compiler: 'no-such-compiler' is not on the PATH\n")


@pytest.mark.parametrize("target", ["auto", "cuda", "sm_90"])
def test_a_machine_with_a_driver_does_not_ask_torch_for_its_gpu_in_silence(folder: Path, target: str) -> None:
    driver = "import cgcompile.targets.choice as choice\nchoice.has_driver = lambda: True\n"
    answer = Answer(folder, "build", "model.py", *BOTH, "--target", target, before=driver)
    first, *_, last = answer.err.splitlines()
    assert (first, last) == ("import            ...  torch", "AssertionError: torch is imported")
    answer = Answer(folder, "build", "model.py", *BOTH, "--target", "sm90", before=driver)
    assert answer.err.startswith("error: target 'sm90': no such architecture")


def test_torch_is_announced_before_it_is_imported(folder: Path) -> None:
    answer = Answer(folder, "build", "model.py", *BOTH, "--target", "cpu")
    first, *_, last = answer.err.splitlines()
    assert (first, last) == ("import            ...  torch", "AssertionError: torch is imported")
    assert len(answer.modules) < MOST


ENDS = """
import gc, sys
from cgcompile_cli.main import main
try:
    main()
finally:
    print(gc.get_freeze_count() > 1000, len(gc.get_objects()) < 1000)
"""


@pytest.mark.parametrize("argument", ["--version", "--nothing"])
def test_exit_collects_no_garbage(argument: str) -> None:
    """When the interpreter exits, its garbage collection traverses all objects that are not frozen: with torch's objects this takes
    1.6 s."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "cli"), str(ROOT / "bundles")])
    command = [sys.executable, "-c", ENDS, argument]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "True True", done.stderr
