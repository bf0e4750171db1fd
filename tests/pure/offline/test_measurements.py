"""Measured configurations: files of the tuner are read as they were written, and the error for a broken file names the file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgcompile.offline.tuning import measurements
from cgcompile.offline.tuning.cost_model import Candidate, Problem, Table, choose, fits
from cgcompile.offline.tuning.split_factors import split_factor, split_problem
from cgcompile.targets.architectures import ARCHES, arch
from tests.helpers.raising import raises

H200 = arch("sm_90")
SMALL = Candidate(block_m=16, block_n=32, block_k=64, stages=4, warps=2, group=8)
LARGE = Candidate(block_m=128, block_n=128, block_k=64, stages=3, warps=8, group=8)
PRODUCT = Problem(kind="mm", batch=1, m=32, n=768, k=3072, dtype="bfloat16", arch="sm_90")

counts = st.integers(1, 1 << 20)
tables = st.dictionaries(
    st.builds(
        Problem, kind=st.sampled_from(["mm", "addmm", "bmm", "baddbmm", "conv"]), batch=counts, m=counts, n=counts, k=counts,
        dtype=st.sampled_from(["float32", "bfloat16"]), arch=st.just("sm_90"),
    ),
    st.lists(
        st.tuples(
            st.builds(Candidate, block_m=counts, block_n=counts, block_k=counts, stages=counts, warps=counts, group=counts),
            st.floats(0.1, 1e6),
        ),
        max_size=4,
    ),
    max_size=4,
)  # fmt: skip


def text(table: Table) -> str:
    """Returns a table's file in the tuner's format: facts about the measurements, then one line per problem."""
    rows = [
        {
            "problem": asdict(problem),
            "measured": [{"candidate": asdict(candidate), "microseconds": time} for candidate, time in measured],
        }
        for problem, measured in table.items()
    ]
    about = {"arch": "sm_90", "gpu": "a GPU", "driver": "580.1", "date": "2026-11-21", "versions": {"torch": "2.11.0"}, "how": "so"}
    return json.dumps(about)[:-1] + ',\n"problems": [\n' + ",\n".join([json.dumps(row) for row in rows]) + "\n]}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sm_90.json"
    path.write_text(text({PRODUCT: [(LARGE, 4.5), (SMALL, 9.0)], split_problem(PRODUCT, 4): [(SMALL, 1.0)]}))
    return path


@given(tables)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, table: Table) -> None:
    path = tmp_path_factory.mktemp("table") / "sm_90.json"
    path.write_text(text(table))
    assert measurements.read_table(path) == table


def test_the_measured_configuration_is_chosen(file: Path) -> None:
    by_model, how = choose(PRODUCT, [LARGE, SMALL], H200)
    assert ([LARGE, SMALL][by_model], how) == (SMALL, "heuristic"), "the model of cost would have it otherwise"
    assert choose(PRODUCT, [SMALL, LARGE], H200, measurements.read_table(file)) == (1, "table")


def test_measured_split_factors_are_used(file: Path) -> None:
    assert split_factor(PRODUCT, H200, measurements.read_table(file)) == 4


def test_a_target_without_measurements_has_no_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "FOLDER", file.parent)
    assert measurements.table_file("sm_90") == file
    assert measurements.table_file("sm_80") is None


@pytest.mark.parametrize(
    "broken",
    [
        lambda whole: "",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: "[]",
        lambda whole: "{}",
        lambda whole: whole.replace('"kind": ', '"sort": ', 1),
        lambda whole: whole.replace('"block_m": 128, ', "", 1),
        lambda whole: whole.replace('"microseconds": 4.5', '"microseconds": "fast"'),
        lambda whole: whole.replace('"microseconds"', '"seconds"', 1),
        lambda whole: whole.replace('"mm"', '["mm"]', 1),
        lambda whole: b"\xff" + whole.encode(),
    ],
    ids=["empty", "half", "list", "nothing", "unknown", "missing", "no-number", "no-time", "no-name", "no-text"],
)  # fmt: skip
def test_a_broken_file_is_named(file: Path, broken) -> None:
    changed = broken(file.read_text())
    assert changed != file.read_text()
    file.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    with raises("measurements-broken") as caught:
        measurements.read_table(file)
    assert str(caught.value).startswith(f"{file}: ") and "\n" not in str(caught.value) and caught.value.hint


@pytest.mark.parametrize("target", [row.name for row in ARCHES if measurements.table_file(row.name)])
def test_the_published_measurements(target: str) -> None:
    """Every measured problem belongs to this target, has a candidate that fits, and lists the fastest first."""
    path = measurements.table_file(target)
    assert path is not None
    about = json.loads(path.read_text())
    assert about["arch"] == target and all(about[name] for name in ("gpu", "driver", "date", "versions", "how"))
    table = measurements.read_table(path)
    assert table
    for problem, measured in table.items():
        assert problem.arch == target
        assert [time for _, time in measured] == sorted(time for _, time in measured)
        assert all(time > 0 for _, time in measured)
        assert any(fits(problem, candidate, arch(target)) for candidate, _ in measured), problem
