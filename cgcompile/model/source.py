"""A model and its example inputs: what loading gives, and the inputs at given sizes."""

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
"""Inputs are drawn after seeding torch with this, so that two builds of one model have the same self-test."""

SELF_TEST_SEED, OTHER_SEED = 1, 2
"""Those of inputs that neither the export nor a recording has seen: of the self-test, and of calls between these."""

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

DonationNames = tuple[str, str]
"""An output and the input that takes it where it lies, each as `entry.name`."""


ROWS = "cgcompile_rows_"
"""How buffers begin that hold numbers of rows of state, which a load chooses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRows:
    """A dimension of the state.  `buffers`: by their names in the model, those whose first axis has `number` rows where it is
    built.  `most`: with more rows nothing is gained, None where nobody knows."""

    name: str
    buffers: tuple[str, ...]
    number: int
    most: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A model, one of its methods, and how to make inputs for that.  `name` is the bundle's name, `label` what the user typed, for
    a module the file and line of `inputs`.  `origin`: what the manifest says instead, "" for the label.

    `entry` is the method; the sources of a model with several entries have one and the same `model`.  `code` is the file or module
    that defines the model, "" where no other process can import it.  `dimensions` are the parameters of `inputs`.  `owned`: the
    model was made for this build, which may do with it what it likes.  `device`: where it lives.  `target_device`: where the bundle
    will run; the model's code is told that its tensors are there, and the compute `capability` of that GPU.  `saved` is what a
    saved program says of its dimensions, None where the model is none.  `donations` are those of the whole model, `rows` its state
    whose number of rows a load chooses, `notes` what was taken off it.
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
    """A model that the compiler itself knows how to make, where the user names no Python.

    `name` is the bundle's, `label` what the user typed, `code` the module that defines the model and registers its operators.
    `model` makes it, with the same weights every time; `entries` maps its methods that are called to what makes their inputs;
    `state` is as state() gives it."""

    name: str
    label: str
    code: str
    model: Callable[[], torch.nn.Module]
    entries: Mapping[str, Callable[..., Any]]
    state: Mapping[str, Any] = field(default_factory=dict)


def entry_method(model: torch.nn.Module, entry: str) -> Callable[..., Any]:
    """A method of the model that is an entry: `forward` with what torch does around it, hooks above all."""
    method: Callable[..., Any] = model if entry == FORWARD else getattr(model, entry)
    return method


def written_method(model: torch.nn.Module, entry: str) -> Callable[..., Any]:
    """The method as the user wrote it."""
    method: Callable[..., Any] = getattr(model, entry)
    return method


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The inputs at one size: the call's arguments, its structure, its parameters, and its tensors with their paths.

    The tensors of `leaves` are on the source's device and need no gradients, those in `args` and `kwargs` where inputs() made them.
    `contexts` are what instances among the arguments hold besides (see `pytree.contexts`).
    """

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
    """The inputs at `sizes`, drawn after seeding torch with `seed`, then moved.

    Raises source-invalid when inputs() fails or gives none, structure-unsupported and dtype-unsupported for what no bundle takes.
    """
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
        kept = [context for name, value, _ in bound for context in contexts(value, name)]
    for path in [path for path, tensor in leaves if tensor.is_meta]:
        where = definition(source.inputs) or source.label
        text = f"{where}: {_maker(source)} gives {path} on the meta device, without values"
        raise ModelError("dtype-unsupported", text, "make it on the CPU")
    return Sample(
        args=args, kwargs=kwargs, call=call, parameters=tuple([parameter for _, _, parameter in bound]),
        leaves=tuple([(path, moved(tensor.detach(), source.device)) for path, tensor in leaves]), contexts=tuple(kept),
    )  # fmt: skip


def _arguments(source: Source, answer: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of what inputs() gave: a tuple of arguments, a dict of them by name, (args, kwargs), or the only argument.

    A tuple is (args, kwargs) where it has two parts, a tuple and a dict, and forward() takes the one by position and the other
    by name, `((ids,), {"attention_mask": mask})`, or would but for a misspelt name.  Raises source-invalid.
    """
    if isinstance(answer, tuple) and len(answer) == 2 and type(answer[0]) is tuple and type(answer[1]) is dict:
        args, kwargs = answer
        if all(type(name) is str for name in kwargs) and _by_name(source, args, kwargs):
            return args, kwargs
    if isinstance(answer, tuple | list):
        return tuple(answer), {}
    if isinstance(answer, Mapping):
        return (), dict(answer)
    if isinstance(answer, torch.Tensor) or fields_of(answer):
        return (answer,), {}
    raise ModelError(
        "source-invalid",
        f"{source.label}: {_maker(source)} gave {type(answer).__name__}, "
        "expected a tuple (positional), a dict (by name) or (args, kwargs)",
    )


def _maker(source: Source) -> str:
    """What the user calls the function that makes the inputs."""
    return "inputs()" if source.entry == FORWARD else f"what makes the inputs of {source.entry!r}"


def _by_name(source: Source, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether these are meant as (args, kwargs), and not as two arguments."""
    signature = inspect.signature(written_method(source.model, source.entry))
    if not args or not mismatch(signature, args, kwargs):
        return True
    names = list(signature.parameters)
    return any(name not in names and closest(name, names) for name in kwargs)


def _bind(source: Source, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any, Parameter]]:
    """(name, value, parameter of forward) for every argument, in the order of the call.

    What inputs() leaves out is there with its default.  A default that is no constant cannot be described: nobody can pass
    another.
    """
    signature = inspect.signature(written_method(source.model, source.entry))
    if wrong := mismatch(signature, args, kwargs):
        taken = ", ".join([str(parameter.replace(annotation=parameter.empty)) for parameter in signature.parameters.values()])
        raise ModelError(
            "source-invalid",
            f"{definition(source.inputs) or source.label}: {_maker(source)} does not fit {source.entry}({taken}): {wrong}",
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
    """The int_keys: the product of the sizes, in declared order."""
    return list(itertools.product(*sizes.values()))
