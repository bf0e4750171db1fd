"""Writes output of commands: data to stdout, everything else to stderr.

On a terminal Rich fits text to its width and colours it unless NO_COLOR is set.  Elsewhere there are no control codes, and lines
are neither wrapped nor truncated, except in drawings and some tables.  Use `safe` for every text from a bundle, because a hostile
name could contain terminal control codes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from cgcompile.util.disk_space import size as size  # the same format as in messages of a build

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    Field = tuple[str, RenderableType | Sequence[str]]
    """A name and its contents: text, lines, or a renderable of Rich."""

UNBROKEN = 100_000
"""Columns of output that is not a terminal: enough that no line is wrapped."""

SHOWN = 12
"""Maximum rows of a list, so that a small bundle fits on an 80-column screen."""


def safe(text: object) -> str:
    """Returns `text` on one line, with all unprintable characters (control characters, line breaks, direction marks) escaped."""
    return "".join([c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)])


def console(stream: IO[str], width: int = UNBROKEN) -> Console:
    """Returns a console on `stream`, which has `width` columns if it is not a terminal.  The console is not cached, because tests
    and redirections replace sys.stdout and sys.stderr."""
    from rich.console import Console

    terminal = stream.isatty()
    colour = terminal and not os.environ.get("NO_COLOR")
    return Console(
        file=stream, force_terminal=terminal, color_system="auto" if colour else None, width=None if terminal else width,
        markup=False, highlight=False, emoji=False,
    )  # fmt: skip


def show(renderable: RenderableType, stream: IO[str] | None = None, width: int = UNBROKEN) -> None:
    """Writes a renderable of Rich to `stream` (default: stdout), in lines of `width` characters if it is not a terminal."""
    target = console(stream or sys.stdout, width)
    if target.is_terminal:
        target.print(renderable)
        return
    with target.capture() as text:
        target.print(renderable)
    target.file.write("".join([f"{line.rstrip()}\n" for line in text.get().splitlines()]))


@contextmanager
def stdout_kept() -> Iterator[None]:
    """Redirects output to stderr during the block: of Python, C, and child processes.

    If sys.stdout is the stream that Python created, file descriptor 1 stays redirected after the block, because model code may
    print at exit.  sys.stdout then writes to the original stdout."""
    stdout, duplicate = sys.stdout, None
    if stdout is sys.__stdout__:
        with suppress(OSError, ValueError):  # stdout or stderr is closed
            sys.stdout.flush()
            duplicate = os.dup(1)
            os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = stdout
        if duplicate is not None:
            with suppress(OSError, ValueError):
                sys.__stdout__.flush()  # type: ignore[union-attr]  # text that the block wrote to it
            sys.stdout = open(duplicate, "w", encoding=stdout.encoding, errors=stdout.errors, closefd=True)  # noqa: SIM115


def say(text: str) -> None:
    """Writes a message: one line to stderr."""
    sys.stderr.write(safe(text) + "\n")


LONGEST = 800
"""Maximum characters of an error's text or hint: ten lines of a terminal.  --json has the full text."""


def folded(text: str) -> str:
    """Returns `text` on one line, truncated to LONGEST characters."""
    words = " ".join(text.split())
    more = len(words) - LONGEST
    return words if more <= 0 else f"{words[:LONGEST].rstrip()} ... and {more} more characters (--json has all)"


def complain(message: str, hint: str) -> None:
    """Writes an error and its hint to stderr, one line each.  Does not use Rich, because importing it takes longer
    than finding most errors."""
    colour = coloured(sys.stderr)
    for label, code, text in (("error: ", RED, message), ("hint: ", CYAN, hint)):
        if text:
            head = f"\x1b[{code}m{label}\x1b[0m" if colour else label
            sys.stderr.write(f"{head}{safe(folded(text))}\n")


RED, CYAN = "1;31", "1;36"
"""Bold red and bold cyan in ECMA-48."""


def coloured(stream: IO[str]) -> bool:
    """Returns whether `stream` is a terminal with colours, and the user allows them."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


def write_json(value: Any) -> None:
    """Writes `value` as JSON to stdout.  It is ASCII, so that no name can contain terminal control codes."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Makes a table without lines; a head that begins with ">" is right-aligned.  Cells pass through `safe`."""
    from rich.table import Table

    headed = any(head.strip(">") for head in heads)
    rich_table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=headed, header_style="dim")
    for head in heads:
        rich_table.add_column(head.removeprefix(">"), justify="right" if head.startswith(">") else "left", overflow="fold")
    for row in rows:
        rich_table.add_row(*[safe(cell) for cell in row])
    return rich_table


def record(fields: Iterable[Field]) -> Table:
    """Makes a row per field: its name and its contents.  Text passes through `safe`."""
    from rich.table import Table

    rich_table = Table.grid(padding=(0, 2, 0, 0))
    rich_table.add_column(style="bold", no_wrap=True)
    rich_table.add_column(overflow="fold")
    for name, value in fields:
        lines = [value] if isinstance(value, str) else value
        rich_table.add_row(name, "\n".join(map(safe, lines)) if isinstance(lines, Sequence) else lines)
    return rich_table


def shortened(rows: Sequence[Any], limit: int = SHOWN) -> tuple[Sequence[Any], int]:
    """Returns the rows to show, and the number of hidden rows, which is never 1."""
    return (rows, 0) if len(rows) <= limit + 1 else (rows[:limit], len(rows) - limit)


def first_lines(lines: Sequence[str], limit: int = SHOWN) -> list[str]:
    """Returns the lines to show, then a line with the number of hidden lines."""
    shown, hidden = shortened(lines, limit)
    return [*shown, *([f"and {hidden} more"] if hidden else [])]


def first_rows(rows: Sequence[Sequence[object]], counted: int = 0) -> list[Sequence[object]]:
    """Returns the rows to show, then a row with the number of hidden rows in column `counted`."""
    shown, hidden = shortened(rows)
    last_row = [f"and {hidden} more" if column == counted else "" for column in range(len(rows[0]) if hidden else 0)]
    return [*shown, *([last_row] if last_row else [])]


def listed(words: Sequence[object], limit: int = SHOWN) -> str:
    """Formats a list: `1, 8, 32, and 40 more`."""
    shown, hidden = shortened(words, limit)
    return ", ".join(map(str, shown)) + (f", and {hidden} more" if hidden else "")


def count(number: int, thing: str) -> str:
    """Formats a count: `1 file`, `5 files`."""
    return f"{number} {thing}" + ("" if number == 1 else "s")


def duration(seconds: float) -> str:
    """Formats seconds: `35 us`, `1.2 ms`, `0.21 s`, `24.3 s`, `2 min 05 s`."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
