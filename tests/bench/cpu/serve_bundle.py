"""Child process: `serve_bundle.py HOW BUNDLE OUTPUT INPUT...` serves one call and prints the times.

HOW is `numpy`, `plain` (without NumPy) or `watched` (the dynamic loader and the model's run are timed separately).
"""

from __future__ import annotations

import sys

from tests.bench.common import serving


def main(how: str, bundle: str, output: str, *inputs: str) -> None:
    """Prints {seconds, laps, foreign packages, ...} as JSON, after all measurements."""
    laps = serving.Laps()
    before = set(sys.modules)
    laps.mark("interpreter")
    watch = None
    if how == "watched":
        # `install` imports ctypes, which `load` would import otherwise: so this import counts as cgbundle's time
        from tests.bench.cpu import library_times

        laps.mark("import ctypes")
        watch = library_times.watch()
        laps.mark("watching")
    make = serving.plain_inputs if how == "plain" else serving.numpy_inputs
    result = serving.serve(bundle, list(inputs), make, laps)
    serving.write(output, result)

    numbers = {"seconds": laps.total, "laps": laps.seconds, "foreign": serving.foreign(before), "torch": "torch" in sys.modules}
    if watch is not None:
        numbers |= {"libraries": watch.libraries, "runs": watch.runs()}
    import json

    print(json.dumps(numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
