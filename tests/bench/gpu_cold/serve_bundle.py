"""Child process: `serve_bundle.py HOW BUNDLE OUTPUT INPUT` serves one call of a CUDA bundle without torch and NumPy, and prints
times.

HOW is `plain` or `watched`; the latter times the stages of loading. After all measurements it loads the bundle a second time for
the self-test.
"""

from __future__ import annotations

import sys

from tests.bench.common import serving

TYPE_CHECKING = False  # see cgbundle/__init__.py
if TYPE_CHECKING:
    from typing import Any

BANNED = ("torch", "numpy", "triton", "cgcompile")


def main(how: str, bundle: str, output: str, text: str) -> None:
    """Prints {seconds, laps, ...} as JSON."""
    laps = serving.Laps()
    before = set(sys.modules)
    laps.mark("interpreter")
    stopwatch = None
    if how == "watched":
        from tests.bench.gpu_cold import load_stages

        stopwatch = load_stages.Stopwatch()
        stopwatch.install()
        laps.mark("watching")
    import cgbundle

    laps.mark("import cgbundle")
    if stopwatch is not None:
        stopwatch.seconds.clear()
    program = cgbundle.load(bundle)
    laps.mark("load")
    stages = dict(stopwatch.seconds) if stopwatch is not None else {}
    (value,) = serving.plain_inputs([text])
    laps.mark("input")
    data = program(value).tobytes()
    laps.mark("first call")
    numbers: dict[str, Any] = {
        "seconds": laps.total,
        "laps": laps.seconds,
        "stages": stages,
        "banned": [name for name in BANNED if name in sys.modules],
        "foreign": serving.foreign(before),
    }
    with open(output, "wb") as file:
        file.write(data)

    import json

    from cgbundle.self_test import replay_self_test

    with cgbundle.load(bundle) as second:
        numbers["self-test"] = [row.exact for row in replay_self_test(second)]
    if stopwatch is not None:
        numbers["addresses"] = [list(memories.bases) for memories in stopwatch.seen.get("memories", [])]
    program.close()
    print(json.dumps(numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
