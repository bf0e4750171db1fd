"""cgbundle: the runtime of cgcompile.

    import cgbundle
    program = cgbundle.load("gpt.cgb")
    logits = program(ids)

Needs the standard library only.  A GPU bundle needs the CUDA driver, and some CPU bundles need torch's shared libraries as files.
torch is never imported.  `load` imports the other modules.  The package is typed; the type of a call's result is Any, because it
depends on the model.
"""

from __future__ import annotations

from .errors import (
    BundleError,
    CallError,
    CgbundleError,
    EntryMissing,
    MachineError,
    OutOfMemory,
    ProgramClosed,
    SessionBusy,
    StateMissing,
)

TYPE_CHECKING = False  # importing `typing` would take as long as all other work before a GPU's context is started
if TYPE_CHECKING:
    from typing import Any

    from .call.entry import Entry
    from .call.outputs import View
    from .call.profile import Profile
    from .call.structure import Record
    from .format.schema import Manifest, TensorSpec
    from .gpu.attached import AttachedGraph, AttachedGraphs, attach
    from .loader import load
    from .program import Program
    from .program.replicas import Replicas, ReplicatedEntry
    from .program.state import State
    from .tensors.tensor import Tensor

__all__ = [
    "AttachedGraph", "AttachedGraphs", "BundleError", "CallError", "CgbundleError", "Entry", "EntryMissing", "MachineError",
    "Manifest", "OutOfMemory", "Profile", "Program", "ProgramClosed", "Record", "Replicas", "ReplicatedEntry", "SessionBusy",
    "State", "StateMissing", "Tensor", "TensorSpec", "View", "attach", "load",
]  # fmt: skip

_MODULES = {
    "load": "loader", "Program": "program", "Entry": "call.entry", "Profile": "call.profile", "Tensor": "tensors.tensor",
    "View": "call.outputs", "Record": "call.structure", "State": "program.state", "Manifest": "format.schema",
    "attach": "gpu.attached", "AttachedGraph": "gpu.attached", "AttachedGraphs": "gpu.attached",
    "TensorSpec": "format.schema", "Replicas": "program.replicas", "ReplicatedEntry": "program.replicas",
}  # fmt: skip


if not TYPE_CHECKING:  # a type checker that saw `__getattr__` would accept every name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'cgbundle' has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
