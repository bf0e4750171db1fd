"""A sample of the fuzzer (`make fuzz` runs it longer): mutated goldens of every version are refused or give right answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import Tally, batch, run
from tests.fuzz.worker import KILLED
from tests.helpers.places import GOLDEN

GOLDENS = sorted(GOLDEN.glob("v*/*.cgb"))
CASES = {"cuda": 400, "cpu": 200}
"""A CPU second for every golden; CPU goldens are also called."""


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_mutated_bundle_is_refused_or_answers_rightly(golden: Path) -> None:
    count = CASES["cpu" if golden.stem.startswith("cpu") else "cuda"]
    tally = batch(golden, 0, count)
    assert not tally.finds, "\n".join(tally.finds[:10])
    assert sum(tally.outcomes.values()) == sum(tally.kinds.values()) == count
    assert len(tally.kinds) >= 7 and tally.outcomes["manifest-invalid"] > count / 10


def test_what_kills_a_process_is_found_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KILLED, "3,5")
    tally = batch(GOLDENS[0], 0, 8)
    name = f"{GOLDENS[0].parent.name}/{GOLDENS[0].stem}"
    assert [find.rpartition("--replay ")[2] for find in tally.finds] == [f"{name} 3", f"{name} 5"]
    assert all("crashed: status -9" in find for find in tally.finds)
    assert sum(tally.outcomes.values()) == 8 and tally.outcomes["crashed"] == 2


def test_the_time_is_kept() -> None:
    tally = run(GOLDENS[:1], 0, 1 << 40, 1, until=1.0)
    assert tally == Tally()
