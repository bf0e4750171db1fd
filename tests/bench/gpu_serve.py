"""Child: `gpu_serve.py HOW BUNDLE OUTPUT INPUT` serves once from a bundle for CUDA, without torch and NumPy, and prints the times.

HOW is `plain`; or `watched`, with the stages of loading timed apart from outside, and a second load beside the first.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import serving

BANNED = ("torch", "numpy", "triton", "cgcompile")


class Stopwatch:
    """Seconds of functions of this thread, by label; what a timed function spends in another timed one counts for that one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.seen: dict[str, list[Any]] = {}
        self._inner: list[float] = []
        self._thread = threading.get_ident()

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Replaces `owner.name` by itself, timed.  Raises SystemExit where there is no such thing: the table would be wrong."""
        original: Callable[..., Any] | None = getattr(owner, name, None)
        if original is None:
            raise SystemExit(f"{owner.__name__} has no {name}: gpu_serve.py has to be brought up to date")

        def timed(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(*args, **options)
            self.seen.setdefault(label, []).append(args[0] if args else None)
            start = serving.now()
            self._inner.append(0.0)
            try:
                return original(*args, **options)
            finally:
                spent = serving.now() - start
                self.seconds[label] = self.seconds.get(label, 0.0) + spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        setattr(owner, name, timed)


def watch() -> Stopwatch:
    """Times the stages of `cgbundle.load`."""
    from cgbundle import loader, verify
    from cgbundle.cuda import device, driver, executors, memory, modules, weights

    stopwatch = Stopwatch()
    for owner, name, label in (
        (loader, "read_manifest", "manifest"),
        (verify, "check_bundle", "checks and hashes"),
        (driver.Context, "__init__", "context"),
        (memory.Memories, "__init__", "memories"),
        (weights.Upload, "__init__", "start of the weights"),
        (weights.Upload, "wait", "waiting for the weights"),
        (modules.Modules, "function", "modules"),
        (device, "check_table", "checks of the tables"),
        (executors.GraphExecutor, "__init__", "graphs"),
    ):
        stopwatch.wrap(owner, name, label)
    return stopwatch


def main(how: str, bundle: str, output: str, text: str) -> None:
    """Prints {seconds, laps, ...} as JSON, when everything is measured."""
    laps = serving.Laps()
    before = set(sys.modules)
    laps.mark("interpreter")
    stopwatch = None
    if how == "watched":
        import cgbundle

        laps.mark("import cgbundle")
        import cuda.bindings.driver  # noqa: F401

        laps.mark("import cuda-bindings")
        stopwatch = watch()
        laps.mark("the rest of cgbundle's imports")
    result = serving.serve(bundle, [text], serving.plain_inputs, laps)
    data = result.tobytes()
    laps.mark("first call")
    found: dict[str, Any] = {
        "seconds": laps.total,
        "laps": laps.seconds,
        "banned": [name for name in BANNED if name in sys.modules],
        "foreign": serving.foreign(before),
    }
    with open(output, "wb") as file:
        file.write(data)

    import json

    import cgbundle
    from cgbundle.exam import sit

    if stopwatch is not None:
        found["stages"] = dict(stopwatch.seconds)
        found["addresses"] = [list(memories.bases) for memories in stopwatch.seen["memories"]]
    with cgbundle.load(bundle) as second:
        found["exam"] = [row.exact for row in sit(bundle, second)]
        if stopwatch is not None:
            found["addresses"] = [list(memories.bases) for memories in stopwatch.seen["memories"]]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
