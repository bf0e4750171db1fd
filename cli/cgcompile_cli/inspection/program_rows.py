"""Rows for every int_key of a bundle: steps, memory, verification, speed.  Pure functions."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from cgbundle.format.file_names import self_test_tensors
from cgbundle.format.schema import EntrySpec, Manifest, Program

from ..int_keys import spell
from ..output import first_lines, shortened, size, table

if TYPE_CHECKING:
    from rich.table import Table

    from ..output import Field


def steps(program: Program) -> str:
    """Counts the steps by kind: `2 graph, 1 host`."""
    kinds = Counter(step.kind for step in program.steps)
    return ", ".join([f"{number} {kind}" for kind, number in kinds.items()])


def programs(entry: EntrySpec) -> Table:
    """Makes a row per int_key: steps, memory, verification.  If there are many rows, shows the first ones and the last one."""
    names = " x ".join([dimension.name for dimension in entry.dimensions]) or "int_key"
    heads = (names, "steps", ">arena", ">inputs", "proof", ">error", ">bound", *distance_head(entry))
    rows = program_rows(entry)
    if all(step.kind == "host" for program in entry.programs for step in program.steps):  # no graphs
        heads, rows = _without_graphs(heads), [_without_graphs(row) for row in rows]
    shown, hidden = shortened(rows[:-1])
    return table(heads, [*shown, *([(f"{hidden} more", *[""] * (len(heads) - 1))] if hidden else []), *rows[-1:]])


def lowering_fields(entry: EntrySpec, of: str = "") -> list[Field]:
    """Returns the times of the tried lowerings by int_key, in microseconds, and why other lowerings were skipped; [] for a bundle
    with one lowering.  `of`: a suffix of the field's name."""
    tried = [(program.key, program.lowerings) for program in entry.programs if program.lowerings]
    if not tried:
        return []
    names = list(dict.fromkeys([lowering.name for _, candidates in tried for lowering in candidates if lowering.microseconds]))
    heads = (" x ".join([dimension.name for dimension in entry.dimensions]) or "int_key", *[f">{name}" for name in names], "")
    rows = []
    for key, candidates in tried:
        times = {lowering.name: f"{sum(lowering.microseconds):.1f} us" for lowering in candidates if lowering.microseconds}
        chosen = next(lowering.name for lowering in candidates if lowering.chosen)
        rows.append((spell(key) or "()", *[times.get(name, "") for name in names], chosen))
    shown, hidden = shortened(rows[:-1])
    more = [(f"{hidden} more", *[""] * (len(heads) - 1))] if hidden else []
    fields: list[Field] = [(f"lowerings{of}", table(heads, [*shown, *more, *rows[-1:]]))]
    reasons = dict.fromkeys([f"{row.name}: {row.reason}" for _, candidates in tried for row in candidates if row.reason])
    return fields + ([(f"left out{of}", first_lines(list(reasons)))] if reasons else [])


def _without_graphs(cells: tuple[str, ...]) -> tuple[str, ...]:
    return cells[:1] + cells[4:]


def distance_head(entry: EntrySpec) -> tuple[str, ...]:
    """Returns the title of the additional column of `program_rows`, () if there is none."""
    return (">from recording",) if near_recording(entry) else ()


def near_recording(entry: EntrySpec) -> bool:
    """Returns whether replays are compared with a recording within a tolerance.  Then a column shows the difference."""
    return entry.self_test.expected == "recording" and entry.self_test.compare == "tolerance"


def self_test_rows(manifest: Manifest, entry: EntrySpec) -> list[tuple[str, str, str]]:
    """Returns (tensor, largest error against eager PyTorch, bound) of the tensors in the self-test, if there are several."""
    self_test = entry.self_test
    if len(self_test.bounds) < 2:
        return []
    errors = [proof.errors for proof in self_test.proofs if proof.errors]
    return [
        (tensor.title, f"{max([row[index] for row in errors]):.1e}" if errors else "", bound_text(bound))
        for index, (tensor, bound) in enumerate(zip(self_test_tensors(manifest, entry), self_test.bounds, strict=True))
    ]


def bound_text(bound: float) -> str:
    """Formats a bound: `1.0e-04`; `equal` for 0."""
    return f"{bound:.1e}" if bound else "equal"


def program_rows(entry: EntrySpec) -> list[tuple[str, ...]]:
    """Returns (int_key, steps, arena, inputs, method of the proof, error, bound) of every program, and the distance from the
    recording if `near_recording`.  Error and bound are those of the tensor nearest to its bound."""
    rows: list[tuple[str, ...]] = []
    for program, proof in zip(entry.programs, entry.self_test.proofs, strict=True):
        bound = "same bits" if entry.self_test.compare == "bits" else bound_text(proof.tolerance)
        proved: tuple[str, ...] = (proof.method, "" if proof.method == "none" else f"{proof.error:.1e}", bound)
        if near_recording(entry):
            proved = (*proved, "" if proof.method == "none" else f"{proof.distance:.1e}")
        rows.append((spell(program.key), steps(program), size(program.arena), size(program.static), *proved))
    return rows
