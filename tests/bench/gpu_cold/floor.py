"""Child process: `floor.py` only creates a CUDA context with cuda-bindings, and prints the seconds from process start until
then."""

from __future__ import annotations

from tests.bench.common import serving


def main() -> None:
    """Prints {seconds, laps} as JSON. Raises SystemExit on a driver error."""
    laps = serving.Laps()
    laps.mark("interpreter")
    from cuda.bindings import driver

    laps.mark("import cuda-bindings")
    if driver.cuInit(0)[0]:
        raise SystemExit("cuInit failed")
    laps.mark("cuInit")
    error, device = driver.cuDeviceGet(0)
    if error or driver.cuDevicePrimaryCtxRetain(device)[0]:
        raise SystemExit("no context")
    laps.mark("context")
    import json

    print(json.dumps({"seconds": laps.total, "laps": laps.seconds}))


if __name__ == "__main__":
    main()
