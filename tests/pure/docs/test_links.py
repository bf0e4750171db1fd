"""Every link has a target, every page is linked, and no file contains merge markers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import SKIPPED, USERS, anchors, links, pages
from tests.helpers.places import ROOT

PAGES = pages()
README = ROOT / "README.md"
LINES = 130
"""Limit for the README: two screens."""


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and target.is_relative_to(ROOT), f"{named(page)}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{named(page)}: {link}"


def test_the_readme_links_every_page_and_stays_short() -> None:
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links(README.read_text(encoding="utf-8")) if "://" not in link}
    assert sorted({named(page) for page in PAGES} - {named(page) for page in linked} - {"README.md"}) == []
    assert len(README.read_text(encoding="utf-8").splitlines()) <= LINES


def test_users_pages_begin_with_a_title() -> None:
    for page in USERS.rglob("*.md"):
        assert page.read_text(encoding="utf-8").startswith("# "), named(page)


def test_anchors_are_spelled_as_github_does() -> None:
    text = "# A *b* `c()`: d\n## A\n### A\n```\n# none\n```\n## [x](y) & z.py"
    assert anchors(text) == {"a-b-c-d", "a", "a-1", "x--zpy"}
    assert links("[a](b.md#c) `[d](e)` [f](g)\n```\n[h](i)\n```") == ["b.md#c", "g"]


FOLDERS = [*ROOT.glob("cgcompile/**/README.md"), ROOT / "examples/README.md", ROOT / "tests/README.md"]
"""Pages that explain the files of their folder."""

PLACES = (ROOT, ROOT / "cgcompile", ROOT / "bundles", ROOT / "bundles/cgbundle")
"""Folders that names of files are relative to."""

WRITTEN = {"model.py", "name.py"}
"""Files that the reader writes."""


@pytest.mark.parametrize("page", FOLDERS, ids=named)
def test_a_folders_page_names_files_that_are_there(page: Path) -> None:
    for file in set(re.findall(r"[\w./-]+\.py\b", page.read_text(encoding="utf-8"))) - WRITTEN:
        there = any((place / file).is_file() for place in (page.parent, *PLACES))
        assert there or list(page.parent.rglob(file)), f"{named(page)}: {file}"


MARKS = re.compile(r"^(<{7}|>{7}|[|]{7})( |$)", re.MULTILINE)
TEXTS = {".py", ".md", ".toml", ".txt", ".json", ".css", ".js", ".h", ""}


def test_no_file_carries_marks_of_a_merge() -> None:
    assert MARKS.search("a\n<<<<<<< HEAD\n") and not MARKS.search("a <<<<<<< b\n========")
    conflicts = []
    for top in ROOT.iterdir():
        for path in [] if top.name in SKIPPED else [top, *top.rglob("*")]:
            if path.is_file() and path.suffix in TEXTS and path.stat().st_size < 1 << 20:
                conflicts += [named(path)] if MARKS.search(path.read_text(errors="replace")) else []
    assert conflicts == []
