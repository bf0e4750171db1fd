"""The Python blocks of a page: one process, one namespace.

A line of JSON on stdin is {"code": ..., "name": ...}, the answer on stdout a line {"output": ..., "failed": ...}: what the block
printed, and where it raised, the last line of the traceback.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from contextlib import redirect_stdout
from typing import Any


def main() -> None:
    """Answers until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    names: dict[str, Any] = {"__name__": "__main__"}
    for line in sys.stdin:
        asked = json.loads(line)
        printed, failed = io.StringIO(), ""
        with redirect_stdout(printed):
            try:
                exec(compile(asked["code"], asked["name"], "exec"), names)
            except Exception as error:  # noqa: BLE001 (a page may show any)
                failed = "".join(traceback.format_exception_only(error)).strip()
                traceback.print_exc()
        answers.write(json.dumps({"output": printed.getvalue(), "failed": failed}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
