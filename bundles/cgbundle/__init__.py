"""cgbundle: the runtime of cgcompile.

    import cgbundle
    program = cgbundle.load("gpt.cgb")
    logits = program(ids)

Needs the standard library only; a GPU bundle needs the driver, a CPU bundle torch's shared libraries as files.  torch is never
imported.  Everything else is loaded when `load` is called.
"""

from __future__ import annotations

from .errors import BundleError, CallError, CgbundleError, MachineError, OutOfMemory

TYPE_CHECKING = False  # `typing` takes as long to import as all else that stands between `import cgbundle` and a GPU's context
if TYPE_CHECKING:
    from typing import Any

    from .call.entry import Entry
    from .call.views import View
    from .loader import load
    from .program import Program
    from .program.replicas import Replicas, ReplicatedEntry
    from .session.profile import Profile
    from .tensors.tensor import Tensor

__all__ = [
    "BundleError", "CallError", "CgbundleError", "Entry", "MachineError", "OutOfMemory", "Profile", "Program", "Replicas",
    "ReplicatedEntry", "Tensor", "View", "load",
]  # fmt: skip

_MODULES = {
    "load": "loader", "Program": "program", "Entry": "call.entry", "Profile": "session.profile", "Tensor": "tensors.tensor",
    "View": "call.views", "Replicas": "program.replicas", "ReplicatedEntry": "program.replicas",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'cgbundle' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
