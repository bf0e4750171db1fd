"""Where the model comes from: a model.py, `package.module:attribute`, a saved .pt2 program, or a module in memory."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from cgbundle.format.schema import Tree

from ..errors import BuildError, ModelError
from .pytree import Leaf, describe

SEED = 0
"""Inputs are drawn after seeding torch with this, so that two builds of one model have the same exam."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A model and how to make inputs for it.  `name` is the bundle's name, `label` what the user typed, `code` the file or module
    that defines the model ("" where no other process can import it), `dimensions` the parameters of `inputs`."""

    name: str
    label: str
    code: str
    model: torch.nn.Module
    inputs: Callable[..., Any]
    dimensions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The inputs at one size: the call's arguments, its structure, and its tensors with their paths."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: Tree
    leaves: tuple[Leaf, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple([tensor for _, tensor in self.leaves])


def load_source(model: str | os.PathLike[str] | torch.nn.Module, inputs: Callable[..., Any] | None = None) -> Source:
    """Raises source-missing or source-invalid, with the user's file and line where it is their code that failed."""
    if isinstance(model, torch.nn.Module):
        if inputs is None:
            raise ModelError(
                "source-invalid", "build(model, inputs): inputs, a function from the sizes to example inputs, is missing"
            )
        name = type(model).__name__.lower()
        home = type(model).__module__
        return _source(name, f"{home}.{type(model).__qualname__}", "" if home == "__main__" else home, model, inputs)
    label = os.fspath(model)
    if label.endswith(".pt2"):
        from .pt2 import load_saved

        return load_saved(label)
    if label.endswith(".py") or os.path.exists(label):
        module = _load_file(label)
        return _from_module(
            Path(label).stem, label, label, label, _member(module, "model", label), _member(module, "inputs", label)
        )
    if ":" in label:
        path, _, attribute = label.partition(":")
        module = _import(path, label)
        return _from_module(
            attribute.rpartition(".")[2], label, path, path, _attribute(module, attribute, label), _member(module, "inputs", label)
        )
    raise BuildError(
        "source-missing", f"{label}: no such model", "give a model.py, package.module:attribute, or a saved program.pt2"
    )


def load_code(code: str) -> None:
    """Imports `Source.code`, which may register operators, without making the model: for processes that load the exported program.
    Raises source-missing, source-invalid."""
    if code.endswith(".py"):
        _load_file(code)
    elif code:
        _import(code, code)


def sample(source: Source, sizes: Mapping[str, int], seed: int = SEED) -> Sample:
    """The inputs at `sizes`, drawn after seeding torch with `seed`.  Raises source-invalid when inputs() fails or gives
    something that is no input."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        given = _call(
            source.inputs, f"inputs({', '.join(f'{name}={size}' for name, size in sizes.items())})", source.label, **sizes
        )
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(given, torch.Tensor):
        args = (given,)
    elif isinstance(given, tuple | list):
        args = tuple(given)
    elif isinstance(given, Mapping):
        kwargs = dict(given)
    else:
        raise ModelError(
            "source-invalid",
            f"{source.label}: inputs() gave {type(given).__name__}, expected a tuple (positional) or a dict (by name)",
        )
    leaves: list[Leaf] = []
    call = {"call": [[name, describe(value, name, leaves)] for name, value in _bind(source, args, kwargs)]}
    return Sample(args=args, kwargs=kwargs, call=call, leaves=tuple(leaves))


def user_line(error: BaseException, label: str) -> str:
    """`model.py:12` of the innermost frame of the traceback that lies in the user's code, or "" """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_user_file(frame.filename):
            return f"{os.path.relpath(frame.filename) if os.path.exists(frame.filename) else label}:{frame.lineno}"
    return ""


def is_user_file(filename: str) -> bool:
    """Whether a file is neither torch's, ours, the standard library's, nor generated."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    library = os.path.dirname(os.__file__)
    torch_home = os.path.dirname(os.path.abspath(torch.__file__))
    full = os.path.abspath(filename)
    if filename.startswith("<") or full.startswith((ours + os.sep, torch_home + os.sep)):
        return False
    return not full.startswith(library + os.sep) or "site-packages" in full


# --- loading ------------------------------------------------------------------------------------------------------


def _source(name: str, label: str, code: str, model: Any, inputs: Callable[..., Any]) -> Source:
    if not isinstance(model, torch.nn.Module):
        raise ModelError("source-invalid", f"{label}: the model is a {type(model).__name__}, expected a torch.nn.Module")
    return Source(name=name, label=label, code=code, model=model, inputs=inputs, dimensions=_dimensions(inputs, label))


def _from_module(name: str, label: str, code: str, where: str, maker: Any, inputs: Any) -> Source:
    made = maker if isinstance(maker, torch.nn.Module) else _call(maker, "model()", label)
    if not callable(inputs):
        raise ModelError("source-invalid", f"{where}: inputs is a {type(inputs).__name__}, expected a function")
    return _source(name, label, code, made, inputs)


def _dimensions(inputs: Callable[..., Any], label: str) -> tuple[str, ...]:
    names = []
    for parameter in inspect.signature(inputs).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ModelError(
                "source-invalid", f"{label}: the parameter {parameter} of inputs() has no name to declare a dimension with"
            )
        names.append(parameter.name)
    return tuple(names)


def _load_file(label: str) -> ModuleType:
    path = Path(label)
    if not path.is_file():
        raise BuildError("source-missing", f"{label}: {'a directory, not a model file' if path.is_dir() else 'no such file'}")
    spec = importlib.util.spec_from_file_location(f"cgcompile_model_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ModelError("source-invalid", f"{label}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python model.py` would: the file may import its neighbours
    _call(spec.loader.exec_module, "importing it", label, module)
    return module


def _import(path: str, label: str) -> ModuleType:
    try:
        found = importlib.util.find_spec(path) is not None
    except (ModuleNotFoundError, ValueError):
        found = False
    if not found:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
            return _import(path, label)
        raise BuildError("source-missing", f"{label}: no module {path!r}")
    module: ModuleType = _call(importlib.import_module, "importing it", label, path)
    return module


def _member(module: ModuleType, name: str, label: str) -> Any:
    if not hasattr(module, name):
        raise ModelError("source-invalid", f"{label}: no {name}() in it", f"a model file defines {_EXAMPLES[name]}")
    return getattr(module, name)


_EXAMPLES = {"model": "def model() -> torch.nn.Module", "inputs": "def inputs(batch: int) -> tuple[torch.Tensor, ...]"}


def _attribute(module: ModuleType, attribute: str, label: str) -> Any:
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise BuildError("source-missing", f"{label}: module {module.__name__!r} has no attribute {attribute!r}")
        value = getattr(value, part)
    return value


def _call(function: Callable[..., Any], what: str, label: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the user's code; whatever it raises becomes one line with the place."""
    try:
        return function(*args, **kwargs)
    except SyntaxError as error:
        where = f"{os.path.relpath(error.filename)}:{error.lineno}" if error.filename else label
        raise ModelError("source-invalid", f"{where}: {error.msg}: {(error.text or '').strip()}") from None
    except Exception as error:
        raise ModelError(
            "source-invalid", f"{user_line(error, label) or label}: {what} failed: {type(error).__name__}: {first_line(error)}"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def _bind(source: Source, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(parameter of forward, value) for every argument, in the order of the call."""
    try:
        bound = inspect.signature(source.model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ModelError("source-invalid", f"{source.label}: inputs() does not fit the model's forward(): {error}") from None
    given = set(bound.arguments)
    bound.apply_defaults()
    pairs: list[tuple[str, Any]] = []
    for name, value in bound.arguments.items():
        if name not in given and not (value is None or isinstance(value, bool | int | float | str)):
            continue  # an empty *args, or a default that a bundle cannot describe: nobody can pass another
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            pairs += [(f"{name}_{index}", item) for index, item in enumerate(value)]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            pairs += list(value.items())
        else:
            pairs.append((name, value))
    return pairs


def all_keys(sizes: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The int_keys: the product of the sizes, in declared order."""
    return list(itertools.product(*sizes.values()))
