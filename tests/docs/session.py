"""Runs the Python blocks of a page in one process and one namespace.

Reads lines of JSON from stdin, {"code": ..., "name": ...}. Answers each with a line on stdout, {"output": ..., "failed": ...}: the
output of the block and, if it raised, the last line of the traceback.
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
        request = json.loads(line)
        printed, failed = io.StringIO(), ""
        with redirect_stdout(printed):
            try:
                exec(compile(request["code"], request["name"], "exec"), names)
            except Exception as error:  # noqa: BLE001 (a page may show any error)
                failed = "".join(traceback.format_exception_only(error)).strip()
                traceback.print_exc()
        answers.write(json.dumps({"output": printed.getvalue(), "failed": failed}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
