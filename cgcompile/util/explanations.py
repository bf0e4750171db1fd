"""Explains findings, errors, and why a dimension is not padded.  The texts come from the docstrings of rules and the catalogues of
errors.  Modules of rules import torch.  So their source is parsed, not imported: an explanation needs no torch.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from cgbundle import catalogue as runtime_catalogue
from cgbundle.catalogue import Cause

from .. import errors
from .padding_reasons import ALWAYS, HEADLINE, REASONS

RULES = ("checks", "offline/lower/coverage.py")
"""Paths of the rules in the package: a folder of files, and a file."""

ALLOWABLE = "format/file_names.py"
"""The file in cgbundle with the rules of the self-test."""

LABELS = {"What it looks for": "what", "Effect": "effect", "Fix": "fix", "Source": "source"}
"""Maps the first words of a paragraph in a rule's docstring to its field.  The field of "Why ..." is `why`."""

CLEARLY = 0.05
"""A name is not suggested if its similarity (0 to 1) is less than that of the most similar name by this amount."""

SEVERITIES = {"REFUSE": "refuse", "HOST": "host", "NOTE": "note"}
"""The severity for each constant of checks/context.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A finding, an error or `padding`: its name, a headline, and more fields in order, such as ("fix", "...").  `kind`: "finding",
    "error", or "padding", whose fields are the printed reasons.  `severities` of a finding: refuse, host, note; or () for a rule
    that is a constant.  For an error: the `package` that raises it, its class `error`, and the command's `exit_code`."""

    name: str
    kind: str
    headline: str
    fields: tuple[tuple[str, str], ...]
    severities: tuple[str, ...] = ()
    package: str = ""
    error: str = ""
    exit_code: int = 0


def explanations(more: Mapping[str, Mapping[str, Cause]] | None = None) -> tuple[Explanation, ...]:
    """Returns all explanations: findings by name, `padding`, then the errors of each catalogue in its order.  A few names belong to
    both a finding and an error.

    `more` has other catalogues of errors, by the package that raises them.
    """
    catalogues = {"cgcompile": errors.CATALOGUE, "cgbundle": runtime_catalogue.CATALOGUE, **(more or {})}
    entries = sorted(_findings(), key=lambda explanation: explanation.name)
    entries.append(_padding())
    entries += [_error(package, code, cause) for package, catalogue in catalogues.items() for code, cause in catalogue.items()]
    return tuple(entries)


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Returns the names most similar to a mistyped name, the most similar first.  Omits names that are clearly less similar."""
    spelling = spelled(name)
    candidates = difflib.get_close_matches(spelling, sorted(set(known)), n=3)
    ratios = [difflib.SequenceMatcher(None, candidate, spelling).ratio() for candidate in candidates]
    return [candidate for candidate, ratio in zip(candidates, ratios, strict=True) if ratio > ratios[0] - CLEARLY]


def spelled(name: str) -> str:
    """Converts a name to the spelling of the catalogues: `InputDtype` (from `error.kind`) and `input_dtype` become input-dtype."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name.strip()).replace("_", "-").lower()


def _error(package: str, code: str, cause: Cause) -> Explanation:
    return Explanation(
        name=code, kind="error", headline=cause.meaning, fields=(("fix", cause.hint),), package=package,
        error=cause.error, exit_code=cause.exit_code,
    )  # fmt: skip


def _padding() -> Explanation:
    reasons = [(reason.printed, f"{reason.meaning}. To do: {reason.cure}") for reason in REASONS]
    return Explanation(name="padding", kind="padding", headline=HEADLINE, fields=(("fix", ALWAYS), *reasons))


# --- rules --------------------------------------------------------------------------------------------------------


def _findings() -> Iterator[Explanation]:
    package_root = files(__package__.partition(".")[0])
    for place in RULES:
        yield from _explanations_at(package_root.joinpath(place))
    yield from _explanations_at(files(runtime_catalogue.__package__).joinpath(ALLOWABLE))


def _explanations_at(place: Traversable) -> Iterator[Explanation]:
    for file in sorted(place.iterdir(), key=lambda child: child.name) if place.is_dir() else [place]:
        if file.name.endswith(".py"):
            yield from _explanations_in(ast.parse(file.read_text(encoding="utf-8")))


def _explanations_in(tree: ast.Module) -> Iterator[Explanation]:
    """Yields the explanations of functions and constants that have the docstring of a rule."""
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef) and _is_rule(text := ast.get_docstring(node) or ""):
            yield _finding(_name(node), text, _severities(node) or _severities(tree))  # a helper function may set the severity
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(following, ast.Expr):
            text_below = following.value.value if isinstance(following.value, ast.Constant) else ""
            if isinstance(text_below, str) and _is_rule(text_below):
                yield _finding(str(node.value.value), text_below, ())


def _is_rule(text: str) -> bool:
    return "\nWhat it looks for: " in text


def _name(rule: ast.FunctionDef) -> str:
    """Returns the rule's name as users type it: `operator-without-...` for the function `operators_without_...`."""
    return rule.name.replace("operators_", "operator_").replace("_", "-")


def _severities(tree: ast.AST) -> tuple[str, ...]:
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return tuple([severity for name, severity in SEVERITIES.items() if name in named])


def _finding(name: str, text: str, severities: tuple[str, ...]) -> Explanation:
    headline, _, rest = text.strip().partition("\n\n")
    fields: list[tuple[str, str]] = []
    for line in rest.splitlines():
        label, colon, content = line.strip().partition(": ")
        if colon and (label in LABELS or label.startswith("Why")):
            fields.append((LABELS.get(label, "why"), content))
        elif fields and line.strip():
            fields[-1] = (fields[-1][0], f"{fields[-1][1]} {line.strip()}")
    return Explanation(
        name=name, kind="finding", headline=" ".join(headline.split()), fields=tuple(fields), severities=severities
    )  # fmt: skip
