"""Imports Inductor's library of Triton functions without `import torch`, which takes two seconds.

Private interface (torch 2.11 to 2.13): `torch._inductor.runtime.triton_helpers`, which Inductor's kernels use.  The import of this
module and of `triton_compat` needs only Triton.  If another torch version needs more, all of torch is imported.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import suppress
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

RUNTIME = "torch._inductor.runtime"


@cache
def triton_helpers() -> Any:
    """The module with its real name and file, because Triton writes both into its output."""
    name = f"{RUNTIME}.triton_helpers"
    if name not in sys.modules:
        with suppress(ImportError, AttributeError):  # raised if the module needs more of torch
            return _alone(name)
    return import_module(name)


def _alone(name: str) -> Any:
    """Imports the module with empty packages for the parent packages that are not imported yet.  Restores `sys.modules`
    afterwards."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ImportError("no torch")
    loaded = set(sys.modules)
    parts = RUNTIME.split(".")
    try:
        for depth in range(1, len(parts) + 1):
            package = ModuleType(".".join(parts[:depth]))
            package.__path__ = [os.path.join(os.path.dirname(spec.origin), *parts[1:])] if package.__name__ == RUNTIME else []
            sys.modules.setdefault(package.__name__, package)
        return import_module(name)
    finally:
        for module_name in [module for module in sys.modules if module.partition(".")[0] == "torch" and module not in loaded]:
            del sys.modules[module_name]
