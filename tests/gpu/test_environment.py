"""The output of `cgcompile doctor` on a machine with a GPU agrees with torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

import torch

from cgcompile.tools.environment import environment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_gpu_is_the_one_that_torch_sees() -> None:
    machine = environment()
    major, minor = torch.cuda.get_device_capability(0)
    first = machine.gpus[0]
    assert len(machine.gpus) == torch.cuda.device_count() and machine.gpus_missing == ""
    assert (first.name, first.arch) == (torch.cuda.get_device_name(0), f"sm_{major}{minor}")
    assert abs(first.memory - torch.cuda.get_device_properties(0).total_memory) < 1 << 30
    targets = {target.name: target for target in machine.targets}
    assert targets["cuda"].recorder == targets[first.arch].recorder == "capture"
    assert (targets["cuda"].not_built, targets[first.arch].not_run) == ("", "")


def test_it_is_seen_without_torch() -> None:
    code = "import sys\nfrom cgcompile.tools.environment import environment\nprint(len(environment().gpus), 'torch' in sys.modules)"
    words = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert words == [str(torch.cuda.device_count()), "False"]
