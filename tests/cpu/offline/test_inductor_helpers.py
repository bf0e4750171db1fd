"""Kernels that use Inductor's helper functions are compiled in a process without torch, with the same functions."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cgcompile.offline.compile import inductor_helpers


def test_a_process_that_compiles_does_not_import_torch() -> None:
    code = """
import sys
from cgcompile.offline.compile import worker
from cgcompile.offline.compile.inductor_helpers import triton_helpers
found = triton_helpers()
print(found.__name__, found.max2.fn.__name__, [name for name in sys.modules if name.partition(".")[0] == "torch"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split(maxsplit=2) == ["torch._inductor.runtime.triton_helpers", "max2", "[]\n"], done.stderr


def test_a_torch_that_wants_more_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(inductor_helpers, "_alone", refuse)
    module = inductor_helpers.triton_helpers.__wrapped__()
    assert module is sys.modules[module.__name__] and module.__name__ == "torch._inductor.runtime.triton_helpers"
