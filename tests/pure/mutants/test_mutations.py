"""The mutations that `python -m tests.mutants` draws are of every kind and the same in every run. Each of them changes the
program."""

from __future__ import annotations

import ast

from tests.mutants.__main__ import EQUIVALENT, draw, equivalents
from tests.mutants.modules import ALL, MODULES
from tests.mutants.mutations import Mutation, apply, edits
from tests.mutants.trials import ROOT

SOURCE = '''
def found(rows: list[int], limit: int = 3) -> int:
    """Not 1 and not 2."""
    require(limit >= 0, f"{limit + 1}")
    for row in rows[1:]:
        if row == 0 or not row:
            continue
        check(row, limit)
        if -row * 2 in rows:
            raise ValueError("no", 7)
    return len([row for row in rows if row])
'''

KINDS = {
    "- def found(rows: list[int], limit: int = 3) -> int:": {"= 4", "= 2"},
    '- require(limit >= 0, f"{limit + 1}")': {
        "require((limit > 0),", "require((limit <= 0),", "require(limit >= 1,", "require(limit >= -1,", "pass",
        "require(f'{limit + 1}', limit >= 0)",
    },
    "- for row in rows[1:]:": {"rows[2:]", "rows[0:]", "rows[:]"},
    "- if row == 0 or not row:": {
        "row != 0", "row == 1", "row == -1", "row == 0 and (not row)", "if (row == 0)", "if (not row)", "or row:",
        "if (not (row == 0 or not row)):",
    },
    "- continue": {"break"},
    "- check(row, limit)": {"check(limit, row)", "pass"},
    "- if -row * 2 in rows:": {"not in", "-row + 2", "-row // 2", "if row * 2", "-row * 3", "-row * 1", "not -row * 2 in rows"},
    '- raise ValueError("no", 7)': {"pass"},
    "- return len([row for row in rows if row])": {"return None", "if (not row)"},
}  # fmt: skip


def mutations() -> list[Mutation]:
    return [mutation for edit in edits("a.py", SOURCE) if (mutation := apply(edit, SOURCE))]


def test_every_kind_of_edit_is_made_and_no_word_of_an_error_is_touched() -> None:
    replacements: dict[str, list[str]] = {}
    for mutation in mutations():
        assert len(mutation.removed) == len(mutation.added) == 1 and mutation.within == "found"
        replacements.setdefault(f"- {mutation.removed[0]}", []).append(mutation.added[0])
    assert replacements.keys() == KINDS.keys()
    for line, parts in KINDS.items():
        assert len(replacements[line]) == len(parts), replacements[line]
        for part in parts:
            assert any(part in added for added in replacements[line]), (part, replacements[line])


def test_every_mutation_is_another_program() -> None:
    trees = [ast.dump(ast.parse(mutation.source)) for mutation in mutations()]
    assert ast.dump(ast.parse(SOURCE)) not in trees


def test_a_seed_draws_the_same_again_and_none_twice() -> None:
    sources = {"a.py": SOURCE, "b.py": SOURCE}
    for count in (1, 10, 1000):
        drawn = draw(sources, count, 5)
        assert drawn == draw(sources, count, 5)
        assert len({(mutation.path, mutation.source) for mutation in drawn}) == len(drawn) == min(count, 2 * len(mutations()))
    assert draw(sources, 10, 6) != draw(sources, 10, 5)


def test_what_is_listed_is_there() -> None:
    for path, tests in MODULES.items():
        assert (ROOT / path).is_file()
        assert all((ROOT / test).exists() for test in (*tests, *ALL))
    for (path, _, removed, added), reason in equivalents(EQUIVALENT.read_text(encoding="utf-8")).items():
        assert path in MODULES and removed and added and reason
