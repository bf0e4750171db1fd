"""Loads the model: from a model.py, `package.module:attribute`, a saved .pt2 program, or a module in memory."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

import torch

from cgbundle.errors import did_you_mean
from cgbundle.format.file_names import FORWARD

from ..errors import ModelError
from ..util.model_file import check_arguments, check_file, kind_of, missing_attribute, missing_module, name_of, undefined
from ..util.raw_bytes import is_zero
from .declared_sizes import Inputs
from .quantization.plain_model import plain_model
from .source import DonationNames, Recipe, Source, StateRows
from .tracing.wrapped_modules import unwrapped
from .user_code import call_user, definition, plain_errors

ROWS_EXAMPLE = 'for example {"keys_*": "pages"}, or {"keys_*": ("pages", 4096)} with the maximum number of rows'


def load_source(model: str | os.PathLike[str] | torch.nn.Module, inputs: Callable[..., Any] | None = None) -> Source:
    """Loads a model with one entry.  Raises like `load_sources`."""
    return load_sources(model, inputs)[0]


def load_sources(
    model: str | os.PathLike[str] | torch.nn.Module | Recipe, inputs: Inputs | None = None, share: tuple[int, int] | None = None
) -> tuple[Source, ...]:
    """Loads a model.  Returns a source for each entry, `forward` first.  `share` is (rank, world) if each of several GPUs gets a
    share of the model.  Raises source-missing or source-invalid, with the user's file and line if their code failed."""
    if isinstance(model, Recipe):
        with plain_errors():
            instance = model.model()
        sources = _sources(model.name, model.label, model.code, instance, model.entries, owned=True)
        return with_rows(sources, model.state)
    check_arguments(model, inputs)
    if isinstance(model, torch.nn.Module) and inputs is not None:
        name, path = type(model).__name__.lower(), type(model).__module__
        origin = f"{path}.{type(model).__qualname__}"
        code = "" if path == "__main__" else path
        sources = _sources(name, origin, code, model, inputs)
        return tuple([replace(source, label=definition(source.inputs) or origin, origin=origin) for source in sources])
    label = os.fspath(model)
    kind = kind_of(label)
    if kind == "saved":
        from .pt2 import load_saved

        return (load_saved(label),)
    if kind == "file":
        module = _load_file(label)
        sources = _from_module(
            name_of(label), label, label, label, _member(module, "model", label), _inputs_of(module, label), share
        )
        return _with_declarations(sources, module, label)
    if kind == "folder":
        raise ModelError("source-invalid", f"{label}: the folder of a language model, expected a model file")
    path, _, attribute = label.partition(":")
    module = _import(path, label)
    sources = _from_module(
        name_of(label), label, path, path, _attribute(module, attribute, label), _inputs_of(module, label), share
    )
    return _with_declarations(sources, module, label)


def checked_donations(answer: Any, label: str) -> tuple[DonationNames, ...]:
    """Checks the result of donations(): pairs of strings.  Raises source-invalid."""
    pairs = [tuple(pair) if isinstance(pair, tuple | list) else () for pair in answer] if isinstance(answer, tuple | list) else [()]
    if not all(len(pair) == 2 and all(isinstance(name, str) for name in pair) for pair in pairs):
        raise ModelError(
            "source-invalid", f"{label}: donations: expected pairs of an output and an input, got {answer!r}"[:200],
            'for example [("prefill.hidden", "decode.hidden")]',
        )  # fmt: skip
    return tuple([(source, target) for source, target in pairs])


def with_rows(sources: tuple[Source, ...], state: Any) -> tuple[Source, ...]:
    """Returns the sources with the result of state().  Raises source-invalid, state-refused."""
    rows = declared_rows(state, sources[0].model, sources[0].label)
    return tuple([replace(source, rows=rows) for source in sources])


def declared_rows(state: Any, model: torch.nn.Module, label: str) -> tuple[StateRows, ...]:
    """Checks the result of state(): a dict from names or patterns of buffers to dimensions.  A value is the name of a dimension, or
    a pair of this name and the maximum number of rows.  Raises source-invalid, state-refused."""
    if not isinstance(state, Mapping):
        text = f"{label}: state: expected a dict from buffers to dimensions, got {type(state).__name__}"
        raise ModelError("source-invalid", text, ROWS_EXAMPLE)
    by_name = dict(model.named_buffers(remove_duplicate=False))
    by_dimension: dict[str, list[str]] = {}
    maximums: dict[str, int] = {}
    for pattern, value in state.items():
        name, limit = value if isinstance(value, tuple | list) and len(value) == 2 else (value, None)
        if not (isinstance(pattern, str) and isinstance(name, str) and name.isidentifier() and type(limit) in (int, type(None))):
            raise ModelError("source-invalid", f"{label}: state: {pattern!r}: {value!r} is not a dimension", ROWS_EXAMPLE)
        matches = [buffer for buffer in by_name if fnmatchcase(buffer, pattern)]
        if not matches:
            raise ModelError(
                "state-refused", f"{label}: state: the model has no buffer {pattern!r}{did_you_mean(pattern, by_name)}"
            )
        names = by_dimension.setdefault(name, [])
        names += [buffer for buffer in matches if buffer not in names]
        if limit is not None:
            maximums[name] = max(limit, maximums.get(name, 0))
    state_rows = [_checked(name, sorted(buffers), maximums.get(name), by_name, label) for name, buffers in by_dimension.items()]
    twice = [name for name in by_name if sum(name in row.buffers for row in state_rows) > 1]
    if twice:
        raise ModelError("state-refused", f"{label}: state: {twice[0]!r} has two dimensions")
    return tuple(state_rows)


def _checked(name: str, buffers: Sequence[str], maximum: int | None, by_name: Mapping[str, torch.Tensor], label: str) -> StateRows:
    number = by_name[buffers[0]].shape[0] if by_name[buffers[0]].dim() else 0
    for buffer in buffers:
        value = by_name[buffer]
        if not value.numel() or value.shape[0] != number:
            text = f"has shape {list(value.shape)}, but buffers with {name!r} need the same first axis ({buffers[0]!r}: {number})"
        elif not value.is_contiguous():
            text = f"is not contiguous: its strides are {list(value.stride())}"
        elif any(other is not value and _shares(other, value) for other in by_name.values()):
            text = "shares memory with another buffer"
        elif not is_zero(value):
            text = "has values other than zero, but a load fills the buffer with zeros"
        else:
            continue
        raise ModelError("state-refused", f"{label}: state: buffer {buffer!r} {text}")
    if maximum is not None and maximum < number:
        text = f"{label}: state: the maximum of {name!r} is {maximum}, but the model has {number} rows"
        raise ModelError("state-refused", text, "let model() make fewer rows: a load cannot choose fewer than model() makes")
    return StateRows(name=name, buffers=tuple(buffers), number=number, most=maximum)


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _with_declarations(sources: tuple[Source, ...], module: ModuleType, label: str) -> tuple[Source, ...]:
    """Returns the sources with the results of donations() and state(), if the module defines them."""
    if hasattr(module, "donations"):
        pairs = checked_donations(call_user(module.donations, "donations()", label), label)
        sources = tuple([replace(source, donations=pairs) for source in sources])
    if hasattr(module, "state"):
        sources = with_rows(sources, call_user(module.state, "state()", label))
    return sources


def load_code(code: str) -> None:
    """Imports the files and modules in `code`, one per line, because they may register operators.  Does not create the model.
    Raises source-missing, source-invalid."""
    for line in code.splitlines():
        if line.endswith(".py"):
            _load_file(line)
        else:
            _import(line, line)


def _sources(name: str, label: str, code: str, model: Any, inputs: Inputs, owned: bool = False) -> tuple[Source, ...]:
    if not isinstance(model, torch.nn.Module):
        raise ModelError("source-invalid", f"{label}: the model is a {type(model).__name__}, expected a torch.nn.Module")
    bare, notes = unwrapped(model, label)
    plain = plain_model(bare, label)
    makers = dict(inputs) if isinstance(inputs, Mapping) else {FORWARD: inputs}
    _check_entries(makers, plain, label)
    return tuple(
        [
            Source(
                name=name, label=label, code=code, model=plain, inputs=makers[entry], dimensions=_dimensions(makers[entry], label),
                owned=owned, entry=entry, notes=notes,
            )
            for entry in sorted(makers, key=lambda entry: entry != FORWARD)
        ]
    )  # fmt: skip


def _check_entries(makers: Mapping[Any, Any], model: torch.nn.Module, label: str) -> None:
    """Raises source-invalid unless each entry is a method of the model with a function for its inputs."""
    if not makers:
        raise ModelError("source-invalid", f"{label}: entries() returned an empty dict, expected methods of the model")
    for entry, maker in makers.items():
        if not isinstance(entry, str) or not entry.isidentifier() or entry.startswith("_"):
            raise ModelError("source-invalid", f"{label}: entries(): {entry!r} is not the name of a method")
        if entry != FORWARD and not inspect.ismethod(getattr(model, entry, None)):
            raise ModelError("source-invalid", f"{label}: entries(): {type(model).__name__} has no method {entry!r}")
        if not callable(maker):
            where = "inputs" if entry == FORWARD else f"entries(): {entry!r}"
            raise ModelError("source-invalid", f"{label}: {where}: expected a function, got {type(maker).__name__}")


def _inputs_of(module: ModuleType, label: str) -> Any:
    """Returns inputs(), or the result of entries().  Raises source-invalid for a file with both, or neither."""
    if not hasattr(module, "entries"):
        return _member(module, "inputs", label)
    if hasattr(module, "inputs"):
        raise ModelError("source-invalid", f"{label}: defines both inputs() and entries(), expected one of them")
    makers = call_user(module.entries, "entries()", label)
    if not isinstance(makers, Mapping):
        raise ModelError(
            "source-invalid",
            f"{label}: entries() returned {type(makers).__name__}, expected a dict from methods to functions for their inputs",
        )
    return makers


def _from_module(
    name: str, label: str, code: str, where: str, maker: Any, inputs: Any, share: tuple[int, int] | None
) -> tuple[Source, ...]:
    is_module = isinstance(maker, torch.nn.Module)
    takes_rank = not is_module and _takes_rank(maker)
    if takes_rank and share is None:
        raise ModelError(
            "source-invalid",
            f"{where}: model(rank, world) needs the number of GPUs",
            "for two GPUs: `cgcompile build --world 2`, which also checks the model",
        )
    if is_module:
        model = maker
    elif share is None:
        model = call_user(maker, "model()", label)
    elif takes_rank:
        model = call_user(maker, f"model(rank={share[0]}, world={share[1]})", label, rank=share[0], world=share[1])
    if share is not None and not takes_rank:
        text = f"{where}: model() has no parameters rank and world, so all {share[1]} GPUs would compute the same"
        raise ModelError("source-invalid", text, "define model(rank, world), or leave --world out")
    if not callable(inputs) and not isinstance(inputs, Mapping):
        raise ModelError("source-invalid", f"{where}: inputs is a {type(inputs).__name__}, expected a function")
    return _sources(name, label, code, model, inputs, owned=not is_module)


def _takes_rank(maker: Any) -> bool:
    code = getattr(maker, "__code__", None)
    return code is not None and {"rank", "world"} <= {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}


def _dimensions(inputs: Callable[..., Any], label: str) -> tuple[str, ...]:
    names = []
    for parameter in inspect.signature(inputs).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ModelError(
                "source-invalid",
                f"{label}: the parameter {parameter} of inputs() declares no dimension: name each dimension",
            )
        names.append(parameter.name)
    return tuple(names)


def _load_file(label: str) -> ModuleType:
    path = check_file(label)
    spec = importlib.util.spec_from_file_location(f"cgcompile_model_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ModelError("source-invalid", f"{label}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up their module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # like `python model.py`: the file may import its neighbours
    call_user(spec.loader.exec_module, "importing it", label, module)
    return module


def _import(path: str, label: str) -> ModuleType:
    try:
        importable = importlib.util.find_spec(path) is not None
    except (ModuleNotFoundError, ValueError):
        importable = False
    if not importable:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
            return _import(path, label)
        raise missing_module(path, label)
    module: ModuleType = call_user(importlib.import_module, "importing it", label, path)
    return module


def _member(module: ModuleType, name: str, label: str) -> Any:
    if not hasattr(module, name):
        raise undefined(name, label)
    return getattr(module, name)


def _attribute(module: ModuleType, attribute: str, label: str) -> Any:
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise missing_attribute(module.__name__, attribute, label)
        value = getattr(value, part)
    return value


# --- training mode ----------------------------------------------------------------------------------------------------

EVAL_NOTE = "left in training mode, put into eval() (--train keeps it)"


@contextmanager
def evaluated(source: Source, train: bool) -> Iterator[str]:
    """Puts the model into eval() unless `train`, and restores the modes of its modules at the end.

    Yields a note, or "" if no mode changes.  A model from torch.export has no modes.  Raises source-invalid if the model's eval()
    fails."""
    modes = [(module, module.training) for module in source.model.modules()]
    try:
        yield EVAL_NOTE if not train and put_into_eval(source) else ""
    finally:
        for module, mode in modes:
            module.training = mode


def load_evaluated(model: Any, train: bool) -> tuple[Source, ...]:
    """Loads the model again and puts it into eval() unless `train`."""
    sources = load_sources(model)
    if not train:
        put_into_eval(sources[0])
    return sources


def put_into_eval(source: Source) -> bool:
    """Puts a model in training mode into eval().  Returns whether it was in training mode.  Raises source-invalid."""
    if source.saved is not None or not source.model.training:
        return False
    return bool(call_user(_put, "eval()", source.label, source.model))


def _put(model: torch.nn.Module) -> bool:
    try:
        model.eval()
    except NotImplementedError:  # raised by a module from torch.export
        return False
    return True
