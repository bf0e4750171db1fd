"""Rarely used modules are imported when they are used: a process that serves a plain bundle starts without them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.helpers.drivers import failing_gpu
from tests.helpers.imports import modules
from tests.helpers.places import ROOT

MODULES, LINES = 44, 8_500
"""Limits for the modules and lines that a load may import. They include the adapter for the library of the first call's inputs, 290
lines for tensors of cgbundle. Lower the limits where possible. A commit that raises them says why."""

SELDOM = (
    "call.aliasing", "call.profile", "call.structure", "call.update", "call.warmup", "catalogue",
    "cpu", "cpu.host_weights", "cuda.lanes", "cuda.stream_executor", "format.safetensors_files", "format.variants", "gpu.attached",
    "gpu.engine_replay",
    "gpu.fast_path", "gpu.host_steps", "gpu.moves", "gpu.step_times", "gpu.threaded_copies", "gpu.update",
    "program.exchanging", "program.ranks", "program.replicas", "program.state", "signatures",
    "tensors.capsules", "tensors.comparison",
    "tensors.input_errors", "tensors.numbers", "tensors.numpy_arrays", "tensors.torch_tensors", "validate.bundle",
    "validate.engine", "validate.host_code", "validate.module_state", "validate.special_kernels", "validate.state",
)  # fmt: skip


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("plain") / "twice.cgb"
    failing_gpu.write(folder)
    command = [sys.executable, "-m", "tests.helpers.drivers.null_driver", str(folder)]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'bundles'}"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names: list[str] = json.loads(done.stdout)
    return names


def test_a_load_imports_few_modules(imported: list[str]) -> None:
    lines = sum(len(modules()[name].read_text().splitlines()) for name in imported)
    print(f"{len(imported)} modules, {lines} lines")
    assert len(imported) <= MODULES and lines <= LINES


@pytest.mark.parametrize("name", SELDOM)
def test_what_few_programs_use_is_not_imported(name: str, imported: list[str]) -> None:
    assert f"cgbundle.{name}" in modules(), "no such module"
    assert f"cgbundle.{name}" not in imported
