"""The mutations of a source file: small edits of its syntax tree, written back as text. Pure, and the same in every run.

Annotations, docstrings, imports, the contents of f-strings and the texts of errors are not mutated: they do not change behaviour.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Add, ast.FloorDiv), ast.FloorDiv: (ast.Mult,), ast.Div: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,), ast.Pow: (ast.Mult,), ast.LShift: (ast.RShift,), ast.RShift: (ast.LShift,), ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,), ast.BitXor: (ast.BitAnd,),
}  # fmt: skip
"""The replacements of each operator."""

ERRORS = ("BundleError", "BuildError", "CallError", "ModelError", "ValueError", "invalid", "_broken", "_overlap")
"""Functions that make errors. Their arguments after the code are messages, which are not mutated."""

MODULE = "module"
"""Name for code outside of functions."""

SYMMETRIC = ("max", "min")
"""Functions for which the order of the arguments does not matter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """`path` from the root, with its `source` after the edit. `removed` and `added` are the lines that differ, without indentation.
    `within` is the function that contains them, "" for module code."""

    path: str
    line: int
    within: str
    kind: str
    source: str
    removed: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def name(self) -> tuple[str, str, tuple[str, ...], tuple[str, ...]]:
        """Returns what identifies the mutation, also when lines are added or removed above it."""
        return self.path, self.within, self.removed, self.added

    def __str__(self) -> str:
        lines = [f"{self.path}:{self.line} ({self.within or MODULE}) {self.kind}"]
        return "\n".join([*lines, *(f"    - {line}" for line in self.removed), *(f"    + {line}" for line in self.added)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """Replaces `node` by `new`."""

    path: str
    within: str
    kind: str
    node: ast.expr | ast.stmt | ast.Slice
    new: ast.AST


def edits(path: str, source: str) -> list[Edit]:
    """Returns all edits of a file, by position."""
    return [
        Edit(path=path, within=within, kind=kind, node=target, new=new)
        for node, within in _nodes(ast.parse(source), "")
        for kind, target, new in _edits(node)
    ]


def apply(edit: Edit, source: str) -> Mutation | None:
    """Applies an edit to a file's `source`. Returns None if the result is not valid Python, or the same program."""
    node, new = edit.node, edit.new
    lines = source.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: (node.end_lineno or 0) - 1])) + (node.end_col_offset or 0)
    text = ast.unparse(ast.fix_missing_locations(new))
    plain = isinstance(node, (ast.stmt, ast.Slice)) or isinstance(new, (ast.Constant, ast.Call, ast.Name))
    data = source.encode()
    mutated = (data[:begin] + (text if plain else f"({text})").encode() + data[end:]).decode()
    try:
        if ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(source)):
            return None
    except SyntaxError:
        return None
    removed, added = _difference(source.splitlines(), mutated.splitlines())
    return Mutation(
        path=edit.path, line=node.lineno, within=edit.within, kind=edit.kind, source=mutated, removed=removed, added=added
    )


def _nodes(node: ast.AST, within: str) -> Iterator[tuple[ast.expr | ast.stmt | ast.Slice, str]]:
    """Yields every node that may be edited, with the function that contains it."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        within = f"{within}.{node.name}".removeprefix(".")
        children: list[ast.AST] = list(node.body)
        if isinstance(node, ast.FunctionDef):
            children = [default for default in (*node.args.defaults, *node.args.kw_defaults) if default is not None] + children
    elif isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom)) or (
        isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ):
        return
    elif isinstance(node, ast.keyword) and node.arg == "strict":
        return  # not `strict` of a zip: lengths are equal wherever zip is used
    elif isinstance(node, ast.AnnAssign):
        children = [node.value] if node.value else []
    elif isinstance(node, ast.Call) and _called(node) in ERRORS:
        yield node, within
        return
    else:
        children = list(ast.iter_child_nodes(node))
    if isinstance(node, (ast.expr, ast.stmt, ast.Slice)):
        yield node, within
    for child in children:
        yield from _nodes(child, within)


def _called(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _edits(node: ast.expr | ast.stmt | ast.Slice) -> Iterator[tuple[str, ast.expr | ast.stmt | ast.Slice, ast.AST]]:
    """Yields the edits that a node allows: kind, node to replace, replacement."""
    for kind, new in _replacements(node):
        yield kind, node, new
    conditions = [node.test] if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)) else []
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        conditions = [condition for generator in node.generators for condition in generator.ifs]
    for condition in conditions:
        yield "condition negated", condition, _not(condition)


def _replacements(node: ast.expr | ast.stmt | ast.Slice) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Compare(ops=ops):
            for index, operator in enumerate(ops):
                for other in COMPARISONS[type(operator)]:
                    yield "comparison", _with(node, "ops", index, other())
        case ast.BinOp(op=operator):
            for another in ARITHMETIC.get(type(operator), ()):
                yield "arithmetic", _changed(node, op=another())
        case ast.AugAssign(op=operator):
            for another in ARITHMETIC.get(type(operator), ()):
                yield "arithmetic", _changed(node, op=another())
        case ast.BoolOp(op=operator, values=values):
            yield "boolean", _changed(node, op=ast.Or() if isinstance(operator, ast.And) else ast.And())
            for index in range(len(values)):
                rest = [value for place, value in enumerate(values) if place != index]
                yield "operand left out", rest[0] if len(rest) == 1 else _changed(node, values=rest)
        case ast.UnaryOp(operand=operand):
            yield "sign or not left out", operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(value=not value)
        case ast.Constant(value=int(value)):
            yield "constant", ast.Constant(value=value + 1)
            yield "constant", ast.Constant(value=value - 1)
        case ast.Continue():
            yield "continue", ast.Break()
        case ast.Break():
            yield "break", ast.Continue()
        case ast.Raise():
            yield "raise left out", ast.Pass()
        case ast.Return(value=value) if value is not None and not _is_none(value):
            yield "returned value", ast.Return(value=ast.Constant(value=None))
        case ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()):
            yield "statement left out", ast.Pass()
        case ast.Slice(lower=lower, upper=upper):
            if lower is not None:
                yield "slice", _changed(node, lower=None)
            if upper is not None:
                yield "slice", _changed(node, upper=None)
        case ast.Call(args=arguments) if _called(node) not in (*ERRORS, *SYMMETRIC):
            places = range(1) if _called(node) == "require" else range(len(arguments) - 1)
            for index in places:
                if len(arguments) > index + 1 and not any(
                    isinstance(argument, ast.Starred) for argument in arguments[index : index + 2]
                ):
                    swapped = [*arguments[:index], arguments[index + 1], arguments[index], *arguments[index + 2 :]]
                    yield "arguments swapped", _changed(node, args=swapped)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _not(test: ast.expr) -> ast.expr:
    return (
        test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else ast.UnaryOp(op=ast.Not(), operand=test)
    )


def _changed(node: ast.AST, **fields: object) -> ast.AST:
    changed_node = copy.copy(node)
    for name, value in fields.items():
        setattr(changed_node, name, value)
    return changed_node


def _with(node: ast.AST, field: str, index: int, value: object) -> ast.AST:
    items = list(getattr(node, field))
    items[index] = value
    return _changed(node, **{field: items})


def _difference(before: list[str], after: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the lines that differ, from the first to the last."""
    first = next(place for place, (one, other) in enumerate(zip(before, after, strict=False)) if one != other)
    last = next(place for place, (one, other) in enumerate(zip(before[::-1], after[::-1], strict=False)) if one != other)
    rows = before[first : len(before) - last], after[first : len(after) - last]
    return tuple([line.strip() for line in rows[0]]), tuple([line.strip() for line in rows[1]])
