"""Finds out what a model's name refers to and what its file defines.  Parses the file, but does not run it and does not import
torch."""

from __future__ import annotations

import ast
import difflib
import os
import tokenize
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BuildError, ModelError

DYNAMIC = frozenset({"exec", "eval", "globals", "locals", "vars", "setattr", "modules", "global"})
"""Names whose use can add module attributes that the top-level statements do not show."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Definitions:
    """The `names` that the top level of a file binds.  The value of a name is None, unless its only binding is a function without
    decorator and outside of other statements.  `whole`: no other names are defined."""

    names: dict[str, ast.FunctionDef | None]
    whole: bool

    def lacks(self, name: str) -> bool:
        """Returns whether the file certainly does not define the name."""
        return self.whole and name not in self.names

    def parameters(self, name: str) -> tuple[str, ...] | None:
        """Returns the names of a function's parameters, or None if they are unknown or cannot all be passed by keyword."""
        function = self.names.get(name)
        if function is None or function.args.posonlyargs or function.args.vararg or function.args.kwarg:
            return None
        return tuple([argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)])


def kind_of(label: str) -> str:
    """Returns the kind of a model's name: "saved" (a .pt2), "folder" (with config.json), "file" or "attribute" (of a module).
    Raises source-missing."""
    if label.endswith(".pt2"):
        return "saved"
    if os.path.isfile(os.path.join(label, "config.json")):
        return "folder"
    if label.endswith(".py") or os.path.exists(label):
        return "file"
    if ":" in label:
        return "attribute"
    remedy = "give a model.py, package.module:attribute, a saved program.pt2, a folder with config.json, or a .gguf file"
    raise BuildError("source-missing", f"{label}: no such model", remedy)


def name_of(label: str) -> str:
    """Returns the default name of model and bundle: the stem of the file, or the attribute.  Raises source-missing."""
    kind = kind_of(label)
    if kind == "folder":
        return Path(label).resolve().name
    return label.rpartition(":")[2].rpartition(".")[2] if kind == "attribute" else Path(label).stem


def check_arguments(model: Any, inputs: Any) -> None:
    """Raises source-invalid if `model` is not a model, or `inputs` does not fit it."""
    if isinstance(model, str | os.PathLike):
        if inputs is not None:
            raise ModelError(
                "source-invalid",
                f"inputs is given, but {os.fspath(model)} has its own inputs()",
                "leave inputs out, or give the module itself: build(model, inputs)",
            )
    elif isinstance(model, type) or not hasattr(model, "forward"):
        kind = f"the class {model.__name__}" if isinstance(model, type) else _described(model)
        raise ModelError(
            "source-invalid", f"model is {kind}, expected a torch.nn.Module, or the path of a model file", "build(Net(), inputs)"
        )
    elif inputs is None:
        raise ModelError("source-invalid", "inputs is missing: a function from the sizes to example inputs", EXAMPLE)
    elif not callable(inputs) and not isinstance(inputs, Mapping):
        raise ModelError(
            "source-invalid", f"inputs is {_described(inputs)}, expected a function from the sizes to example inputs", EXAMPLE
        )


EXAMPLE = "for example: def inputs(batch): return (torch.randn(batch, 16),)"


def _described(value: Any) -> str:
    """Describes a value: `a tuple of 2 Tensors`, `a Tensor`."""
    name = type(value).__name__
    if isinstance(value, tuple | list | dict) and value:
        kinds = {type(member).__name__ for member in (value.values() if isinstance(value, dict) else value)}
        members = f"{kinds.pop()}{'' if len(value) == 1 else 's'}" if len(kinds) == 1 else "values"
        return f"a {name} of {len(value)} {members}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def check_file(label: str) -> Path:
    """Returns the file of a label.  Raises source-missing."""
    path = Path(label)
    if not path.is_file():
        problem = "a directory without config.json, and no model file" if path.is_dir() else "no such file"
        raise BuildError("source-missing", f"{label}: {problem}")
    return path


SAVE = "give the unchanged file that torch.export.save(torch.export.export(model, args), path) wrote"
LOAD = "write a model.py whose model() loads it, or save torch.export.export(model, args) with torch.export.save"


def check_saved(label: str) -> None:
    """Checks the names in the archive of a saved program.  Raises source-missing, source-invalid."""
    path = check_file(label)
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.partition("/")[2] or name for name in archive.namelist()]  # without the archive's root folder
    except zipfile.BadZipFile:
        problem = "not a zip archive, as a saved program is" if path.stat().st_size else "an empty file"
        raise ModelError("source-invalid", f"{label}: {problem}", SAVE) from None
    if any(name.startswith("models/") or name == OLDER for name in names):
        return
    if "data.pkl" in names:
        writer = "torch.jit.save" if "constants.pkl" in names else "torch.save"
        raise ModelError("source-invalid", f"{label}: a file of {writer} is not an exported program", LOAD)
    raise ModelError("source-invalid", f"{label}: a zip archive without an exported program", SAVE)


OLDER = "serialized_exported_program.json"
"""The file that torch.export.save wrote before torch 2.8, instead of a folder `models`."""


def definitions(path: Path, label: str) -> Definitions:
    """Parses a file.  Raises source-invalid if it is not valid Python."""
    try:
        with tokenize.open(path) as file:  # uses the file's encoding declaration, as the importer does
            text = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the import will show them
            tree = ast.parse(text, os.fspath(path))
            compile(tree, os.fspath(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise not_python(error, label) from None
    except (UnicodeDecodeError, ValueError) as error:
        raise ModelError("source-invalid", f"{label}: not a Python file: {error}") from None
    bound_names: dict[str, ast.FunctionDef | None] = {}
    for name, function in _bound(tree.body, plain=True):
        bound_names[name] = None if name in bound_names else function
    used = {name for node in ast.walk(tree) for name in _dynamic(node)}
    return Definitions(names=bound_names, whole="*" not in bound_names and "__getattr__" not in bound_names and not used & DYNAMIC)


def missing_module(path: str, label: str) -> BuildError:
    """Returns the error for a missing module."""
    return BuildError("source-missing", f"{label}: no module {path!r}")


def missing_attribute(path: str, attribute: str, label: str) -> BuildError:
    """Returns the error for a module without the attribute of the model's name."""
    return BuildError("source-missing", f"{label}: module {path!r} has no attribute {attribute!r}")


def undefined(name: str, label: str) -> ModelError:
    """Returns the error for a model file without a required function."""
    return ModelError("source-invalid", f"{label}: it has no {name}()", f"a model file defines {EXAMPLES[name]}")


EXAMPLES = {"model": "def model() -> torch.nn.Module", "inputs": "def inputs(batch: int) -> tuple[torch.Tensor, ...]"}


def _dynamic(node: ast.AST) -> Iterator[str]:
    """Yields the names in `node` that may be in DYNAMIC."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Global):
        yield "global"


def not_python(error: SyntaxError, label: str) -> ModelError:
    """Returns the error for a file with a syntax error, with the line."""
    where = f"{os.path.relpath(error.filename)}:{error.lineno}" if error.filename else label
    return ModelError("source-invalid", f"{where}: {error.msg}: {(error.text or '').strip()}")


def _bound(body: list[ast.stmt], plain: bool) -> Iterator[tuple[str, ast.FunctionDef | None]]:
    """Yields the names that statements bind, also in branches, loops and `with`.  Their functions are None without `plain`, or if
    decorated."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            yield statement.name, statement if plain and not statement.decorator_list else None
        elif isinstance(statement, ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, None
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                yield alias.asname or alias.name.partition(".")[0], None
        else:
            nested = [node for node in ast.iter_child_nodes(statement) if not isinstance(node, ast.stmt)]
            for child in nested:
                for node in ast.walk(child):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                        yield node.id, None
            blocks = (getattr(statement, name, []) for name in ("body", "orelse", "finalbody"))
            handlers = [handler.body for handler in getattr(statement, "handlers", [])]
            cases = [match_case.body for match_case in getattr(statement, "cases", [])]
            for block in (*blocks, *handlers, *cases):
                yield from _bound(block, plain=False)


def closest(name: str, known: Sequence[str]) -> str:
    """Returns the most similar name of `known`, or ""."""
    return next(iter(difflib.get_close_matches(name, known, 1, 0.6)), "")
