"""Imports `cgcompile.capture.worker.regions` even without cuda-bindings. Tests that import it here call no driver."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

if importlib.util.find_spec("cuda") is None:
    sys.modules["cuda"], sys.modules["cuda.bindings"] = ModuleType("cuda"), ModuleType("cuda.bindings")
    sys.modules["cuda.bindings"].driver = ModuleType("cuda.bindings.driver")  # type: ignore[attr-defined]
    from cgcompile.capture.worker import regions

    del sys.modules["cuda"], sys.modules["cuda.bindings"]
else:
    from cgcompile.capture.worker import regions

__all__ = ["regions"]
