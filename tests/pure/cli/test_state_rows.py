"""How inspect and diff show state whose number of rows a load chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cgcompile.tools.diff.manifests import compare
from cgcompile_cli.summary import state
from tests.helpers.bundles import rows_bundle


def test_inspect_shows_what_a_load_chooses(tmp_path: Path) -> None:
    lines = state(rows_bundle.write(tmp_path, most=50))
    assert lines[0] == "3 buffers that calls change, 104 B at least in every session"
    assert lines[-2] == 'rows: 4 rows or more, chosen by load(..., state={"rows": N}); at most 50 by default, 24 B each'
    assert not any("number" in line for line in lines[1:-2])


def test_diff_shows_other_dimensions(tmp_path: Path) -> None:
    one = rows_bundle.write(tmp_path, most=50)
    (row,) = one.state_dimensions
    (difference,) = compare(one, replace(one, state_dimensions=(replace(row, most=60),)))
    assert "rows of state rows" in str(difference) and "50" in str(difference) and "60" in str(difference)
