"""Explanations of findings and errors as rows, from the docstrings of rules and the catalogues of errors.  Also the reasons why a
dimension is not padded.  Rules are functions over programs of torch.  Their source is read, not imported, so that an explanation
needs no torch.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from cgbundle import errors as runtime_errors
from cgbundle.errors import Cause

from .. import errors
from .padding_reasons import ALWAYS, HEADLINE, REASONS

RULES = ("checks", "offline/lower/coverage.py")
"""Where the rules are, below this package: a folder of files, and a file."""

ALLOWABLE = "tensors/self_test_tensors.py"
"""The file in cgbundle with the rule of the self-test."""

LABELS = {"What it looks for": "what", "Effect": "effect", "Fix": "fix", "Source": "source"}
"""The first words of a paragraph in a rule's docstring, and its field; "Why ..." is `why`."""

CLEARLY = 0.05
"""A name is not suggested if its similarity, from 0 to 1, is lower by this than that of the nearest name."""

SEVERITIES = {"REFUSE": "refuse", "HOST": "host", "NOTE": "note"}
"""The constants of checks/context.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A finding, an error or `padding`: its name, a headline, and more fields in order, such as ("fix", "...").  `kind`: "finding",
    "error", or "padding", whose fields are the printed reasons.  `severities` of a finding: refuse, host, note; () for one that
    only explains another.  `package`, `error` and `exit_code` of an error: who raises it, as which class, and what the command
    returns.
    """

    name: str
    kind: str
    headline: str
    fields: tuple[tuple[str, str], ...]
    severities: tuple[str, ...] = ()
    package: str = ""
    error: str = ""
    exit_code: int = 0


def explanations(more: Mapping[str, Mapping[str, Cause]] | None = None) -> tuple[Explanation, ...]:
    """All explanations: findings by name, `padding`, then the errors of each catalogue in its order.  A few names belong to a
    finding and to an error.

    `more`: further catalogues of errors, by the package that raises them.
    """
    catalogues = {"cgcompile": errors.CATALOGUE, "cgbundle": runtime_errors.CATALOGUE, **(more or {})}
    entries = sorted(_findings(), key=lambda explanation: explanation.name)
    entries.append(_padding())
    entries += [_error(package, code, cause) for package, catalogue in catalogues.items() for code, cause in catalogue.items()]
    return tuple(entries)


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The names most similar to a mistyped one, the nearest first; only one if it is clearly the nearest."""
    wanted = spelled(name)
    close = difflib.get_close_matches(wanted, sorted(set(known)), n=3)
    likeness = [difflib.SequenceMatcher(None, candidate, wanted).ratio() for candidate in close]
    return [candidate for candidate, like in zip(close, likeness, strict=True) if like > likeness[0] - CLEARLY]


def spelled(name: str) -> str:
    """A name as the catalogues have it: `InputDtype`, as `error.kind` spells it, and `input_dtype` are input-dtype."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name.strip()).replace("_", "-").lower()


def _error(package: str, code: str, cause: Cause) -> Explanation:
    return Explanation(
        name=code, kind="error", headline=cause.meaning, fields=(("fix", cause.hint),), package=package,
        error=cause.error.__name__, exit_code=cause.exit_code,
    )  # fmt: skip


def _padding() -> Explanation:
    reasons = [(reason.printed, f"{reason.meaning}. To do: {reason.cure}") for reason in REASONS]
    return Explanation(name="padding", kind="padding", headline=HEADLINE, fields=(("fix", ALWAYS), *reasons))


# --- rules --------------------------------------------------------------------------------------------------------


def _findings() -> Iterator[Explanation]:
    package_root = files(__package__.partition(".")[0])
    for place in RULES:
        yield from _of_place(package_root.joinpath(place))
    yield from _of_place(files(runtime_errors.__package__).joinpath(ALLOWABLE))


def _of_place(place: Traversable) -> Iterator[Explanation]:
    for file in sorted(place.iterdir(), key=lambda child: child.name) if place.is_dir() else [place]:
        if file.name.endswith(".py"):
            yield from _of_source(ast.parse(file.read_text(encoding="utf-8")))


def _of_source(tree: ast.Module) -> Iterator[Explanation]:
    """Explanations from functions with a rule's docstring, and from constants with such a text after them."""
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef) and _is_rule(text := ast.get_docstring(node) or ""):
            yield _finding(_name(node), text, _severities(node) or _severities(tree))  # the file's, where a helper makes it
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(after, ast.Expr):
            below = after.value.value if isinstance(after.value, ast.Constant) else ""
            if isinstance(below, str) and _is_rule(below):
                yield _finding(str(node.value.value), below, ())


def _is_rule(text: str) -> bool:
    return "\nWhat it looks for: " in text


def _name(rule: ast.FunctionDef) -> str:
    """The function's name as users type it; `operators_without_...` becomes the singular of the finding."""
    return rule.name.replace("operators_", "operator_").replace("_", "-")


def _severities(tree: ast.AST) -> tuple[str, ...]:
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return tuple([said for name, said in SEVERITIES.items() if name in named])


def _finding(name: str, text: str, severities: tuple[str, ...]) -> Explanation:
    headline, _, rest = text.strip().partition("\n\n")
    fields: list[tuple[str, str]] = []
    for line in rest.splitlines():
        label, colon, said = line.strip().partition(": ")
        if colon and (label in LABELS or label.startswith("Why")):
            fields.append((LABELS.get(label, "why"), said))
        elif fields and line.strip():
            fields[-1] = (fields[-1][0], f"{fields[-1][1]} {line.strip()}")
    return Explanation(
        name=name, kind="finding", headline=" ".join(headline.split()), fields=tuple(fields), severities=severities
    )  # fmt: skip
