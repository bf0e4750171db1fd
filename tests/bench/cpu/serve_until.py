"""Child process: `serve_until.py BUNDLE INPUT...` serves one call, prints `ready`, and waits until its standard input ends."""

from __future__ import annotations

import sys

import cgbundle
from tests.bench.common import serving


def main(bundle: str, *inputs: str) -> None:
    """Keeps the program open while it waits, as a server does."""
    with cgbundle.load(bundle) as program:
        program(*serving.numpy_inputs(list(inputs)))
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
