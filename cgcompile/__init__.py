"""cgcompile: an ahead-of-time compiler from PyTorch models to bundles.

    import cgcompile
    cgcompile.check(model, inputs)
    cgcompile.build(model, inputs, sizes=[1, 8, 32], out="gpt.cgb", target="auto")
    cgcompile.sign("gpt.cgb", "private.pem")
    cgcompile.save_graphs(graphs, tensors, "engine.cgb")  # CUDA graphs that another program captured

Importing this module is cheap: torch is imported when a model is built or checked.  The package is typed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cgbundle.format.schema import Finding

    from .bundle.sign import Signed, sign
    from .capture.engine.observe import observe
    from .capture.engine.save import SavedGraphs, save_graphs
    from .errors import BuildError, ModelError
    from .pipeline.api import build, check
    from .pipeline.records import Built, RegionReport, Report
    from .tools.model_repository import model_repository
    from .tools.transfer import Transferred, pull, push
    from .util.progress import Event

from .util.version import VERSION as __version__

__all__ = [
    "BuildError", "Built", "Event", "Finding", "ModelError", "RegionReport", "Report", "SavedGraphs", "Signed", "Transferred",
    "__version__", "build", "check", "model_repository", "observe", "pull", "push", "save_graphs", "sign",
]  # fmt: skip

_MODULES = {
    "BuildError": "errors", "ModelError": "errors", "Finding": "pipeline.records",
    "build": "pipeline.api", "check": "pipeline.api",
    "Built": "pipeline.records", "Report": "pipeline.records", "RegionReport": "pipeline.records",
    "Event": "util.progress", "Signed": "bundle.sign", "sign": "bundle.sign",
    "observe": "capture.engine.observe", "save_graphs": "capture.engine.save", "SavedGraphs": "capture.engine.save",
    "Transferred": "tools.transfer", "model_repository": "tools.model_repository",
    "pull": "tools.transfer", "push": "tools.transfer",
}  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # with a visible __getattr__, a type checker accepts every name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'cgcompile' has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
