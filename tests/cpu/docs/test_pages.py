"""Every block of every page runs and prints what the page shows. One bundle is built for all pages (`Runner`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import blocks, pages
from tests.docs.run import Runner
from tests.helpers.places import ROOT

pytest.importorskip("torch")

RUN = {"python", "console"}
OTHERS = {"text", "sh", "dockerfile", "yaml", ""}
"""Languages that are neither commands nor Python; `sh` blocks contain installations, and are skipped."""

PAGES = [page for page in pages() if any(block.language in RUN for block in blocks(page.read_text(encoding="utf-8")))]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(tmp_path_factory.mktemp("docs") / "pages") as page_runner:
        yield page_runner


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs_and_prints_what_is_shown(page: Path, runner: Runner) -> None:
    runner.page(page)


def test_no_block_escapes_its_test() -> None:
    """Commands must be in console blocks and Python in python blocks. Skipped blocks may only install something, or are tested
    elsewhere."""
    for page in pages():
        for block in blocks(page.read_text(encoding="utf-8")):
            place = f"{page.relative_to(ROOT)}:{block.line}"
            assert block.language in RUN | OTHERS, place
            if block.language == "sh":
                assert block.words == ("skip",), place
            if block.language == "" and "cli/docs/reference" not in place:
                assert not any(line.startswith(("$ ", "import ", "cgcompile ", "pip ")) for line in block.text.splitlines()), place
