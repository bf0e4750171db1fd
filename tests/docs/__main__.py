"""Writes the reference (`make docs`), or runs the code blocks of pages.

python -m tests.docs                              writes cli/docs/reference
python -m tests.docs run cli/docs/tutorial.md     runs a page as the tests do
python -m tests.docs run --slow PAGE              also runs its slow blocks (--gpu: blocks that need a GPU)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.docs.reference import FOLDER, written


def main() -> None:
    """Returns 1 if a block fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs", description="Write the reference, or run pages.")
    commands = parser.add_subparsers(dest="command")
    running = commands.add_parser("run", help="run the blocks of pages")
    running.add_argument("pages", nargs="+", type=Path)
    running.add_argument("--slow", action="store_true", help="run what is too dear for every run")
    running.add_argument("--gpu", action="store_true", help="run what needs a GPU")
    args = parser.parse_args()
    if args.command is None:
        FOLDER.mkdir(exist_ok=True)
        for name, text in written().items():
            (FOLDER / name).write_text(text, encoding="utf-8")
        return
    from tests.docs.run import run_pages

    run_pages([page.resolve() for page in args.pages], whole={word for word in ("slow", "gpu") if getattr(args, word)})


if __name__ == "__main__":
    main()
