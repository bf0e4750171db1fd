"""A loaded model, and its example inputs at given sizes."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cgbundle.format.file_names import FORWARD
from cgbundle.format.schema import Parameter, Tree

from ..errors import ModelError
from ..util.model_file import closest
from ..util.raw_bytes import moved
from .class_fields import fields_of
from .declared_sizes import SavedDimension
from .pytree import NamedTensor, constant, contexts, describe, located
from .user_code import call_user, definition, mismatch

SEED = 0
"""torch's seed for example inputs, so that two builds of one model have the same self-test."""

SELF_TEST_SEED, OTHER_SEED = 1, 2
"""Seeds of inputs that neither the export nor a recording uses: for the self-test, and for calls between those of the self-test."""

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

DonationNames = tuple[str, str]
"""An output, and the input that takes over its memory, each as `entry.name`."""


ROWS = "cgcompile_rows_"
"""Prefix of the names of buffers that hold the number of rows of state, which is chosen at the load."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRows:
    """A dimension of the state.  `buffers` are the names in the model of the buffers whose first axis has this size.  `number` is
    the number of rows at the build.  `most` is the maximum that a load chooses by itself, or None for no maximum."""

    name: str
    buffers: tuple[str, ...]
    number: int
    most: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A model, one of its methods, and a function that creates inputs for it.

    `name` is the bundle's name.  `label` is what the user typed, or the file and line of `inputs` for a module.  The manifest has
    `origin` instead, unless it is "".  `code` is the file or module that defines the model, "" if other processes cannot import it.
    `entry` is the method; the sources of several entries share one `model`.  `dimensions` are the parameters of `inputs`.  `owned`:
    the model was created for this build, which may change it.  `device` is the device of the model, and `target_device` that of the
    bundle.  The model's code sees `target_device` as the device of its tensors, with this compute `capability`.  `saved` has the
    dimensions of a saved program, None for other models.  `donations` are those of all entries.  `rows` is the state whose number
    of rows is chosen at the load.  `notes` name wrappers that were removed.
    """

    name: str
    label: str
    code: str
    model: torch.nn.Module
    inputs: Callable[..., Any]
    dimensions: tuple[str, ...]
    owned: bool = False
    device: torch.device = CPU
    target_device: torch.device = CUDA
    capability: tuple[int, int] = (8, 0)
    saved: tuple[SavedDimension, ...] | None = None
    entry: str = FORWARD
    origin: str = ""
    donations: tuple[DonationNames, ...] = ()
    rows: tuple[StateRows, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A model that the compiler itself can create, without Python code of the user.

    `name` is the bundle's name, `label` is what the user typed.  `code` is the module that defines the model and registers its
    operators.  `model` creates it, always with the same weights.  `entries` maps its methods to functions that create their inputs.
    `state` has the form of the result of state().
    """

    name: str
    label: str
    code: str
    model: Callable[[], torch.nn.Module]
    entries: Mapping[str, Callable[..., Any]]
    state: Mapping[str, Any] = field(default_factory=dict)


def entry_method(model: torch.nn.Module, entry: str) -> Callable[..., Any]:
    """Returns the method of an entry.  For `forward` it is the module, which calls torch's hooks."""
    method: Callable[..., Any] = model if entry == FORWARD else getattr(model, entry)
    return method


def written_method(model: torch.nn.Module, entry: str) -> Callable[..., Any]:
    """Returns the method as the user wrote it."""
    method: Callable[..., Any] = getattr(model, entry)
    return method


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The inputs at one size: the call's arguments, tree and parameters, and its tensors with their paths.  The tensors of `leaves`
    are detached and on the source's device.  Those in `args` and `kwargs` are the ones that inputs() created.  `contexts` are the
    other attributes of instances among the arguments (see `pytree.contexts`)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: Tree
    parameters: tuple[Parameter, ...]
    leaves: tuple[NamedTensor, ...]
    contexts: tuple[Any, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple([tensor for _, tensor in self.leaves])


def sample(source: Source, sizes: Mapping[str, int], seed: int = SEED) -> Sample:
    """Creates the inputs at `sizes`, with torch's seed `seed`, and moves them to the source's device.  Raises source-invalid if
    inputs() fails or has another type, structure-unsupported and dtype-unsupported for unsupported values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        answer = call_user(
            source.inputs, f"inputs({', '.join(f'{name}={size}' for name, size in sizes.items())})", source.label, **sizes
        )
    args, kwargs = _arguments(source, answer)
    leaves: list[NamedTensor] = []
    bound = _bind(source, args, kwargs)
    with located(f"{definition(source.inputs) or source.label}: inputs() gives "):
        call = {"call": [[name, describe(value, name, leaves)] for name, value, _ in bound]}
        context_rows = [context for name, value, _ in bound for context in contexts(value, name)]
    for path in [path for path, tensor in leaves if tensor.is_meta]:
        where = definition(source.inputs) or source.label
        text = f"{where}: {_creator(source)} gives {path} on the meta device, without values"
        raise ModelError("dtype-unsupported", text, "make it on the CPU")
    return Sample(
        args=args, kwargs=kwargs, call=call, parameters=tuple([parameter for _, _, parameter in bound]),
        leaves=tuple([(path, moved(tensor.detach(), source.device)) for path, tensor in leaves]), contexts=tuple(context_rows),
    )  # fmt: skip


def _arguments(source: Source, answer: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns (args, kwargs) of a result of inputs(): a tuple of arguments, a dict of them, (args, kwargs), or the only argument.
    A tuple of a tuple and a dict is (args, kwargs) if these match forward(), as in `((ids,), {"attention_mask": mask})`, or would
    match if a name were spelled correctly.  Raises source-invalid."""
    if isinstance(answer, tuple) and len(answer) == 2 and type(answer[0]) is tuple and type(answer[1]) is dict:
        args, kwargs = answer
        if all(type(name) is str for name in kwargs) and _is_args_kwargs(source, args, kwargs):
            return args, kwargs
    if isinstance(answer, tuple | list):
        return tuple(answer), {}
    if isinstance(answer, Mapping):
        return (), dict(answer)
    if isinstance(answer, torch.Tensor) or fields_of(answer):
        return (answer,), {}
    raise ModelError(
        "source-invalid",
        f"{source.label}: {_creator(source)} gave {type(answer).__name__}, "
        "expected a tuple (positional), a dict (by name) or (args, kwargs)",
    )


def _creator(source: Source) -> str:
    """Returns the name of the function that creates the inputs, for messages."""
    return "inputs()" if source.entry == FORWARD else f"the inputs function of entry {source.entry!r}"


def _is_args_kwargs(source: Source, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    signature = inspect.signature(written_method(source.model, source.entry))
    if not args or not mismatch(signature, args, kwargs):
        return True
    names = list(signature.parameters)
    return any(name not in names and closest(name, names) for name in kwargs)


def _bind(source: Source, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any, Parameter]]:
    """Returns (name, value, parameter of forward) for every argument, in the order of the call.  An omitted argument has its
    default value.  It is not returned if a bundle cannot describe this default, because no call can pass another value."""
    signature = inspect.signature(written_method(source.model, source.entry))
    if problem := mismatch(signature, args, kwargs):
        formals = ", ".join([str(parameter.replace(annotation=parameter.empty)) for parameter in signature.parameters.values()])
        raise ModelError(
            "source-invalid",
            f"{definition(source.inputs) or source.label}: {_creator(source)} does not fit {source.entry}({formals}): {problem}",
            f"a dict names the arguments of {source.entry}(), a tuple gives them in its order",
        )
    bound = signature.bind(*args, **kwargs)
    passed_names = set(bound.arguments)
    bound.apply_defaults()
    entries: list[tuple[str, Any, Parameter]] = []
    for name, value in bound.arguments.items():
        formal = bound.signature.parameters[name]
        default = None if formal.default is formal.empty else constant(formal.default)
        if formal.kind is formal.VAR_POSITIONAL:
            entries += [(f"{name}_{index}", item, Parameter()) for index, item in enumerate(value)]
        elif formal.kind is formal.VAR_KEYWORD:
            entries += [(key, item, Parameter(keyword=True)) for key, item in value.items()]
        elif name in passed_names or default is not None:
            entries.append((name, value, Parameter(keyword=formal.kind is formal.KEYWORD_ONLY, default=default)))
    names = [name for name, _, _ in entries]
    for name in names:
        if names.count(name) > 1:
            raise ModelError("source-invalid", f"{source.label}: two arguments of {source.entry}() have the name {name!r}")
    return entries


def all_keys(sizes: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns the int_keys: the product of the sizes, in declared order."""
    return list(itertools.product(*sizes.values()))
