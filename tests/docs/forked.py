"""Runs `cgcompile` many times but imports torch once: a process that forks for every command.

Reads lines of JSON from stdin, {"arguments": [...], "folder": ..., "environment": {...}}. Answers each with a line of JSON on
stdout, {"status": ..., "output": ..., "seconds": ...}: the output is stderr and stdout together, the seconds are CPU time.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib import import_module

MODULES = (
    "torch", "torch._dynamo", "torch._inductor", "torch.export", "cgcompile.pipeline.build", "cgcompile.pipeline.check",
    "cgcompile_cli.main",
)  # fmt: skip
"""Modules that the pages' commands import. None of them starts a thread, which a fork would lose."""


def main() -> None:
    """Answers until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in MODULES:
        import_module(module)
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if not child:
                run(request["arguments"], request["folder"], request["environment"], output.fileno())
            _, status, used = os.wait4(child, 0)
            output.seek(0)
            text = output.read().decode(errors="replace")
        seconds = used.ru_utime + used.ru_stime
        answers.write(json.dumps({"status": os.waitstatus_to_exitcode(status), "output": text, "seconds": seconds}) + "\n")
        answers.flush()


def run(arguments: list[str], folder: str, environment: dict[str, str], output: int) -> None:
    """Runs a command in the child and ends the child."""
    import traceback

    from cgcompile_cli.main import main as cgcompile

    status = 70
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(1), "w", buffering=1) for _ in range(2))
        os.chdir(folder)
        os.environ.update(environment)
        sys.argv = ["cgcompile", *arguments]
        cgcompile()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
