"""Runs tests under AddressSanitizer: what crosses from Python into C here is memory that ctypes copies, maps and hands on.

    python -m tests.sanitize                   the tests of everything that passes addresses on: minutes
    python -m tests.sanitize tests/cpu -k x    others, with pytest's options

The sanitizer of the compiler that builds need anyway (gcc) is loaded into Python, whose own allocator is off, so that every object
lies between red zones: a copy beyond an end, a use after a free and a second free end the process with a report.  What only the
compiled code of a model reads or writes is not seen: tests/cpu/call/test_guard_pages.py puts its inputs between forbidden pages.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.helpers.places import ROOT

TESTS = (
    "tests/pure/tensors", "tests/pure/call", "tests/pure/session", "tests/pure/tables", "tests/pure/program",
    "tests/pure/test_self_test.py", "tests/pure/test_golden.py::test_the_self_test_of_a_cpu_golden_passes_here",
    "tests/pure/format/test_safetensors.py", "tests/cpu/call", "tests/cpu/session",
)  # fmt: skip

OVERRUN = "import ctypes; ctypes.memmove(ctypes.create_string_buffer(64), bytes(80), 80)"
"""Must be found: 16 bytes beyond an object."""


def environment() -> dict[str, str]:
    """Raises SystemExit where there is no sanitizer."""
    library = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(library):
        raise SystemExit("gcc has no libasan.so here: install its sanitizers (libasan)")
    options = "detect_leaks=0:allocator_may_return_null=1:abort_on_error=0:exitcode=97"
    paths = [str(ROOT), str(ROOT / "cli"), str(ROOT / "bundles")]
    return os.environ | {
        "LD_PRELOAD": library, "PYTHONMALLOC": "malloc", "ASAN_OPTIONS": options, "PYTHONPATH": os.pathsep.join(paths),
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    env = environment()
    planted = subprocess.run([sys.executable, "-c", OVERRUN], env=env, capture_output=True, text=True, check=False)
    if planted.returncode != 97 or "heap-buffer-overflow" not in planted.stderr:
        print(f"the sanitizer does not see an overrun that was planted: {planted.stderr[-300:]}", file=sys.stderr)
        return 2
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    return subprocess.run([*command, *(arguments or TESTS)], cwd=ROOT, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
