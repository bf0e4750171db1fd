"""The Markdown pages as text: blocks, headings and links, as GitHub shows them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.places import ROOT

USERS = ROOT / "cli/docs"
"""Folder of the users' pages. Maintainers' pages are the README.md of the folder that they explain."""

SKIPPED = {".git", ".venv", ".cache", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "dist"}
"""Top-level folders without pages of this project."""

FENCE = re.compile(r"^(`{3,})(.*)$")
AFTER = re.compile(r"^<!-- after: (\S+) -->$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block: its language, the words after it, its text, and the line of the page where the text begins."""

    language: str
    words: tuple[str, ...]
    text: str
    line: int


def pages() -> list[Path]:
    """Returns every page of the repository."""
    paths = (path for path in ROOT.rglob("*.md") if not SKIPPED & set(path.relative_to(ROOT).parts))
    return sorted(paths)


def blocks(text: str) -> Iterator[Block]:
    """Yields the fenced blocks, in order."""
    fence, opened, lines = "", (), []
    for number, line in enumerate(text.splitlines(), 1):
        fence_match = FENCE.match(line)
        if not fence and fence_match:
            fence, opened, lines = fence_match[1], (number, fence_match[2]), []
        elif fence and line == fence:
            language, *words = opened[1].split() or [""]
            yield Block(language=language, words=tuple(words), text="\n".join([*lines, ""]), line=opened[0] + 1)
            fence = ""
        elif fence:
            lines.append(line)
    assert not fence, f"a block that begins at line {opened[0]} has no end"


def begins_after(text: str) -> list[str]:
    """Returns the pages whose folders are copied to this page's folder before it runs."""
    return [after_match[1] for line in text.splitlines() if (after_match := AFTER.match(line))]


def prose(text: str) -> str:
    """Returns the text without its blocks."""
    kept, fence = [], ""
    for line in text.splitlines():
        fence_match = FENCE.match(line)
        if not fence and fence_match:
            fence = fence_match[1]
        elif line == fence:
            fence = ""
        elif not fence:
            kept.append(line)
    return "\n".join(kept)


def anchors(text: str) -> set[str]:
    """Returns the anchors (`#...`) of a page: its headings, as GitHub spells them."""
    names: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE):
        name = plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", heading)).strip().lower().replace(" ", "-")
        count = 0
        while name in names:
            count += 1
            name = f"{plain}-{count}"
        names.add(name)
    return names


def links(text: str) -> list[str]:
    """Returns the targets of all links of a page, in order, except those in `code`."""
    return re.findall(r"]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose(text)))
