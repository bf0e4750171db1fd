"""Compares cgcompile's verdicts with PyTorch's on a corpus of small models; `python -m tests.parity` prints the table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cgcompile.checks import findings
from tests.parity.case import RULES, Case
from tests.parity.compare import AGREE, LOOSER, Row, compare, table
from tests.parity.corpus import CASES
from tests.parity.differences import DIFFERENCES, ELSEWHERE, TORCH
from tests.parity.pytorch_says import pytorch_says
from tests.parity.recorded import is_of_this_torch, is_recorded, pytorch_said

each_case = pytest.mark.parametrize("case", CASES, ids=[f"{case.kind.replace(' ', '-')}-{case.name}" for case in CASES])


@pytest.fixture(scope="module")
def row() -> Callable[[Case], Row]:
    """Returns a function that computes both verdicts on a case once."""
    known: dict[str, Row] = {}

    def ask(case: Case) -> Row:
        if case.name not in known:
            known[case.name] = compare(case)
        return known[case.name]

    return ask


@each_case
def test_the_rules_that_fire_are_those_expected(case: Case, row: Callable[[Case], Row]) -> None:
    ours = row(case).ours
    assert ours.rules == case.expected, ours.error or ours.findings


@pytest.mark.skipif(not torch.__version__.startswith(TORCH), reason=f"the differences are listed for torch {TORCH}")
@each_case
def test_whatever_pytorch_flags_we_flag_but_for_listed_differences(case: Case, row: Callable[[Case], Row]) -> None:
    comparison = row(case)
    assert (comparison.outcome != AGREE) == (case.name in DIFFERENCES), (
        comparison.outcome,
        comparison.missed,
        comparison.ours.rules,
    )


recorded_torch = pytest.mark.skipif(not is_of_this_torch(), reason="the verdicts of another torch are recorded")


@recorded_torch
def test_what_pytorch_says_of_every_case_is_recorded() -> None:
    assert [case.name for case in CASES if not is_recorded(case)] == [], "python -m tests.parity record"


@recorded_torch
@pytest.mark.parametrize("case", CASES[3::20], ids=lambda case: case.name)
def test_pytorch_says_what_is_recorded(case: Case) -> None:
    assert pytorch_says(case) == pytorch_said(case)


@each_case
def test_findings_have_all_their_parts(case: Case, row: Callable[[Case], Row]) -> None:
    for finding in row(case).ours.findings:
        assert finding.rule in RULES and finding.severity in ("refuse", "host", "note")
        assert finding.message and finding.effect and finding.fix
        assert not finding.where or finding.source, finding


@pytest.mark.parametrize(
    ("name", "rule"), [("sum-item", "host_scalar"), ("map-rows", "control_flow"), ("masked-select", "data_dependent_shape")]
)
def test_a_rule_that_is_taken_away_is_missed(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = [case for case in CASES if case.name == name]
    monkeypatch.setattr(findings, "RULES", tuple([check for check in findings.RULES if check.__name__ != rule]))
    comparison = compare(case)
    assert comparison.outcome == LOOSER and comparison.missed
    assert "NOT LISTED" in table([comparison], DIFFERENCES)


def test_every_rule_is_hit_and_passed_by_a_little() -> None:
    hit = {rule for case in CASES for rule in case.expected}
    passed = {rule for case in CASES for rule in case.near}
    assert set(RULES) - hit == set(ELSEWHERE)
    assert set(RULES) - passed <= set(ELSEWHERE)
    assert [case.name for case in CASES if case.near & case.expected] == []


def test_the_corpus_is_large_and_its_names_are_unique() -> None:
    assert len(CASES) >= 80
    assert len({case.name for case in CASES}) == len(CASES)
    assert DIFFERENCES.keys() <= {case.name for case in CASES}
    assert all(reason.strip() for reason in DIFFERENCES.values())


def test_the_table_counts_every_model_once_and_names_what_is_not_listed(row: Callable[[Case], Row]) -> None:
    rows = [row(case) for case in CASES]
    differing = [comparison.case.name for comparison in rows if comparison.outcome != AGREE]
    printed = table(rows, DIFFERENCES)
    assert f"{len(rows)} models, {len(rows) - len(differing)} agreements, {len(differing)} differences" in printed
    assert "NOT LISTED" not in printed
    assert table(rows, {}).count("NOT LISTED") == len(differing)
