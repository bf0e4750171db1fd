"""Times the stages of loading a bundle without changes to cgbundle: wraps its functions as soon as their module is imported."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from tests.bench.common import serving

WATCHED = {
    "cgbundle.format.archive": (("read_manifest", "manifest"),),
    "cgbundle.validate.contents": (("check_loaded", "checks and hashes"),),
    "cgbundle.validate.recordings": (("check_recording", "checks of the tables"),),
    "cgbundle.process": (("ContextFuture.take", "waiting for the context"),),
    "cgbundle.cuda.driver": (("Context.__init__", "context"),),
    "cgbundle.cuda.memory": (("Memories.__init__", "memories"),),
    "cgbundle.cuda.upload": (("Upload.__init__", "start of the weights"), ("Upload.wait", "waiting for the weights")),
    "cgbundle.cuda.kernels": (("Modules.function", "modules"),),
    "cgbundle.cuda.graph_executor": (("GraphExecutor.__init__", "graphs"),),
}
"""Module -> (function, label of its time)."""

IMPORTS = "imports"
BESIDE = "beside: "
"""Prefix of labels for other threads, whose times overlap with the first thread's."""


class Stopwatch:
    """Seconds of the watched functions, by label; if watched calls are nested, the time counts only for the inner function.

    `seen` holds the first argument of every call. `install` watches the modules that are imported later.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.seen: dict[str, list[Any]] = {}
        self._thread = threading.get_ident()
        self._local = threading.local()

    def install(self) -> None:
        """Starts watching imports."""
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Called by the import system: returns the usual module, with a timed execution and wrapped functions."""
        if name.partition(".")[0] not in ("cgbundle", "cuda"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            self.timed(execute, IMPORTS)(module)
            for function, label in WATCHED.get(name, ()):
                self._replace(module, function, label)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _replace(self, module: Any, function: str, label: str) -> None:
        owner, _, name = function.rpartition(".")
        place = getattr(module, owner) if owner else module
        setattr(place, name, self.timed(getattr(place, name), label))

    def timed(self, original: Callable[..., Any], label: str) -> Callable[..., Any]:
        """Wraps `original`: a call adds its time to the label's seconds."""

        def call(*args: Any, **options: Any) -> Any:
            beside = threading.get_ident() != self._thread
            inner = self._local.__dict__.setdefault("inner", [])
            self.seen.setdefault(label, []).append(args[0] if args else None)
            start = serving.now()
            inner.append(0.0)
            try:
                return original(*args, **options)
            finally:
                spent = serving.now() - start
                stage = BESIDE + label if beside else label
                self.seconds[stage] = self.seconds.get(stage, 0.0) + spent - inner.pop()
                if inner:
                    inner[-1] += spent

        return call
