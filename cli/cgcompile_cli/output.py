"""What commands write: data on stdout, everything else on stderr.

On a terminal Rich fits text to its width and colours it unless NO_COLOR is set.  Elsewhere there are no control codes, and a line
is neither broken nor cut, but for drawings and tables that say so.  `safe` is for every text that comes from a bundle: a hostile
name must not drive the terminal.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from cgcompile.util.disk_space import size as size  # the same words as a build's

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    Field = tuple[str, RenderableType | Sequence[str]]
    """A name and what stands behind it."""

UNBROKEN = 100_000
"""Columns of an output that is no terminal."""

SHOWN = 12
"""Rows of a list that are shown before the rest is counted: an 80-column screen should hold a small bundle."""


def safe(text: object) -> str:
    """`text` on one line, with everything that is not printable (control characters, line breaks, direction marks) escaped."""
    return "".join([c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)])


def console(stream: IO[str], width: int = UNBROKEN) -> Console:
    """A console on `stream` as it is now: tests and redirections replace sys.stdout and sys.stderr.  `width`: its columns where it
    is no terminal."""
    from rich.console import Console

    terminal = stream.isatty()
    colour = terminal and not os.environ.get("NO_COLOR")
    return Console(
        file=stream, force_terminal=terminal, color_system="auto" if colour else None, width=None if terminal else width,
        markup=False, highlight=False, emoji=False,
    )  # fmt: skip


def show(renderable: RenderableType, stream: IO[str] | None = None, width: int = UNBROKEN) -> None:
    """Writes something of Rich's to `stream` (default: stdout), in lines of `width` characters where that is no terminal."""
    target = console(stream or sys.stdout, width)
    if target.is_terminal:
        target.print(renderable)
        return
    with target.capture() as text:
        target.print(renderable)
    target.file.write("".join([f"{line.rstrip()}\n" for line in text.get().splitlines()]))


@contextmanager
def stdout_kept() -> Iterator[None]:
    """While it lasts, all that is printed goes to stderr: by Python, by C, and by processes that are started.

    In the command's own process (where sys.stdout is Python's) file descriptor 1 stays stderr's to the end: what a model's code
    prints at exit is no data either.  sys.stdout has the real one then."""
    before, data = sys.stdout, None
    if before is sys.__stdout__:
        with suppress(OSError, ValueError):  # one of them is closed
            sys.stdout.flush()
            data = os.dup(1)
            os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = before
        if data is not None:
            with suppress(OSError, ValueError):
                sys.__stdout__.flush()  # type: ignore[union-attr]  # what was printed through it
            sys.stdout = open(data, "w", encoding=before.encoding, errors=before.errors, closefd=True)  # noqa: SIM115


def say(text: str) -> None:
    """A message: one line on stderr."""
    sys.stderr.write(safe(text) + "\n")


LONGEST = 800
"""Characters of an error's text, or of a hint: ten lines of a terminal.  --json has all of it."""


def folded(text: str) -> str:
    """`text` on one line, cut at the end where it is too long to be read."""
    words = " ".join(text.split())
    more = len(words) - LONGEST
    return words if more <= 0 else f"{words[:LONGEST].rstrip()} ... and {more} more characters (--json has all)"


def complain(message: str, hint: str) -> None:
    """An error: one line on stderr, and one with what to do where there is something.  Without Rich, which would take longer to
    import than most errors to find."""
    colour = coloured(sys.stderr)
    for label, code, text in (("error: ", RED, message), ("hint: ", CYAN, hint)):
        if text:
            head = f"\x1b[{code}m{label}\x1b[0m" if colour else label
            sys.stderr.write(f"{head}{safe(folded(text))}\n")


RED, CYAN = "1;31", "1;36"
"""Bold red and bold cyan, as terminals number them (ECMA-48)."""


def coloured(stream: IO[str]) -> bool:
    """Whether `stream` is a terminal that shows colours, whose user wants them."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


def write_json(value: Any) -> None:
    """`value` as JSON on stdout: ASCII, so that no name in it can drive a terminal."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Rows under heads, without lines; a head that begins with ">" is that of numbers.  Cells are made safe."""
    from rich.table import Table

    headed = any(head.strip(">") for head in heads)
    rich_table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=headed, header_style="dim")
    for head in heads:
        rich_table.add_column(head.removeprefix(">"), justify="right" if head.startswith(">") else "left", overflow="fold")
    for row in rows:
        rich_table.add_row(*[safe(cell) for cell in row])
    return rich_table


def record(fields: Iterable[Field]) -> Table:
    """Named fields one below the other, each a line or lines of text (made safe) or something of Rich's."""
    from rich.table import Table

    rich_table = Table.grid(padding=(0, 2, 0, 0))
    rich_table.add_column(style="bold", no_wrap=True)
    rich_table.add_column(overflow="fold")
    for name, value in fields:
        lines = [value] if isinstance(value, str) else value
        rich_table.add_row(name, "\n".join(map(safe, lines)) if isinstance(lines, Sequence) else lines)
    return rich_table


def shortened(rows: Sequence[Any], limit: int = SHOWN) -> tuple[Sequence[Any], int]:
    """The rows that are shown, and how many are not: never hides a single one."""
    return (rows, 0) if len(rows) <= limit + 1 else (rows[:limit], len(rows) - limit)


def first_lines(lines: Sequence[str], limit: int = SHOWN) -> list[str]:
    """The lines that are shown, then how many are not."""
    shown, hidden = shortened(lines, limit)
    return [*shown, *([f"and {hidden} more"] if hidden else [])]


def first_rows(rows: Sequence[Sequence[object]], counted: int = 0) -> list[Sequence[object]]:
    """The rows that are shown, then one that says in column `counted` how many are not."""
    shown, hidden = shortened(rows)
    rest = [f"and {hidden} more" if column == counted else "" for column in range(len(rows[0]) if hidden else 0)]
    return [*shown, *([rest] if rest else [])]


def listed(words: Sequence[object], limit: int = SHOWN) -> str:
    """`1, 8, 32, and 40 more`."""
    shown, hidden = shortened(words, limit)
    return ", ".join(map(str, shown)) + (f", and {hidden} more" if hidden else "")


def count(number: int, thing: str) -> str:
    """`1 file`, `5 files`."""
    return f"{number} {thing}" + ("" if number == 1 else "s")


def duration(seconds: float) -> str:
    """`35 us`, `1.2 ms`, `0.21 s`, `24.3 s`, `2 min 05 s`."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
