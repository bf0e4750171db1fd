"""`python -m tests.gpu.helpers.rank_process BUNDLE RANK MEETING DEVICE CALLS [KEY]`: one rank of `rank_bundles` in its own process.

It makes CALLS calls with CPU inputs and prints `ready` after the first. At the end it prints `right`, or the error code, the
seconds of the failed call, and the number of right calls before it.
"""

from __future__ import annotations

import sys
import time
from array import array

import cgbundle
from cgbundle.errors import CgbundleError
from cgbundle.tensors.tensor import from_bytes
from tests.helpers.bundles.rank_bundles import FLOATS, expected, inputs


def main(path: str, rank: str, meeting: str, device: str, calls: str, key: str = "4") -> None:
    began, size, number = time.monotonic(), int(key), 0
    try:
        with cgbundle.load(path, rank=int(rank), rendezvous=meeting, device=int(device), timeout=3.0) as program:
            for number in range(int(calls)):
                began = time.monotonic()
                values = inputs(size, number % 7)
                output = program(from_bytes(values.tobytes(), "float32", (size, FLOATS)))
                if not number:
                    print("ready", flush=True)
                assert array("f", output.tobytes()) == expected(values), number
        print("right", flush=True)
    except CgbundleError as error:
        print(f"{error.code} {time.monotonic() - began:.1f} {number} {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
