"""The models of the benchmarks and their bundles, which are built if they are missing or older than the code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.bench.common import children


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """`sizes` are the build's `--sizes` and `key` the sizes of the first call. With `own_weights`, `model()` loads its weights
    itself. `options` are further options of the build."""

    name: str
    sizes: tuple[str, ...]
    key: tuple[int, ...]
    own_weights: bool = False
    options: tuple[str, ...] = ()

    @property
    def source(self) -> Path:
        """Returns the path of the model file."""
        return children.ROOT / "examples" / f"{self.name}.py"


GPT = Case(name="gpt", sizes=("1,8",), key=(1,))
MINILM = Case(name="minilm", sizes=("batch=1,8", "seq=32,128"), key=(1, 32), own_weights=True)
MLP = Case(name="mlp", sizes=("1,8",), key=(1,))
CASES = {case.name: case for case in (GPT, MINILM, MLP)}


def bundle(case: Case, cache: Path) -> Path:
    """Returns the path of the case's bundle. Raises ChildFailed if its build fails. The build's progress is shown."""
    path = cache / f"{case.name}.cgb"
    manifest = path / "manifest.json"
    if manifest.exists() and manifest.stat().st_mtime > newest(case):
        return path
    line = [sys.executable, "-m", "cgcompile_cli", "build", str(case.source), "--target", "cpu", "-o", str(path), "--force"]
    line += case.options
    for sizes in case.sizes:
        line += ["--sizes", sizes]
    if subprocess.run(line, env=children.environment(), stdout=subprocess.DEVNULL, check=False).returncode or not manifest.exists():
        raise children.ChildFailed(f"cannot build {case.source}")
    return path


def newest(case: Case) -> float:
    """Returns the time of the last change to the code that the bundle depends on."""
    return max(os.path.getmtime(file) for file in [case.source, *sources()])


def sources() -> Iterable[Path]:
    """Returns every module of the compiler and the runtime."""
    for package in ("cgcompile", "bundles/cgbundle"):
        yield from (children.ROOT / package).rglob("*.py")


def inputs(case: Case, cache: Path) -> list[str]:
    """Returns the inputs of the first call as `file:dtype:shape`."""
    folder = cache / f"{case.name}.inputs"
    folder.mkdir(parents=True, exist_ok=True)
    return children.run("common/make_inputs.py", case.source, folder, *case.key)
