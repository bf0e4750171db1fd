"""The exported programs of a model: one for all int_keys, or one for each int_key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from cgbundle.format.schema import IntKey

from ..util.raw_bytes import raw
from ..util.tolerance import tolerance
from .torch_program import with_graph
from .weights import weight_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Programs:
    """The program of every int_key, in the order of the keys; at least one.

    `dynamic`: all keys share one program, whose declared dimensions are symbols; otherwise each key has its own, with constant
    sizes.  `reason`: why they are not dynamic, or "".  Programs share weights: a name means the same tensor in all of them.
    """

    by_key: Mapping[IntKey, ExportedProgram]
    dynamic: bool
    reason: str = ""

    def at(self, key: IntKey) -> ExportedProgram:
        return self.by_key[key]

    @property
    def first(self) -> ExportedProgram:
        """The program of the smallest int_key."""
        return next(iter(self.by_key.values()))

    @property
    def distinct(self) -> tuple[tuple[IntKey, ExportedProgram], ...]:
        """Every distinct program, with its first int_key."""
        by_id: dict[int, tuple[IntKey, ExportedProgram]] = {}
        for key, program in self.by_key.items():
            by_id.setdefault(id(program), (key, program))
        return tuple(by_id.values())

    def changed(self, change: Callable[[ExportedProgram], ExportedProgram]) -> Programs:
        """Returns the programs after `change`, which is called once for every distinct program."""
        by_id = {id(program): change(program) for _, program in self.distinct}
        return Programs(
            by_key={key: by_id[id(program)] for key, program in self.by_key.items()}, dynamic=self.dynamic, reason=self.reason
        )

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the parameters, buffers and constants of all programs, by their names in the programs."""
        return {name: value for _, program in self.distinct for name, value in weight_tensors(program).items()}


def coarsest(programs: Programs) -> float:
    """Returns the largest tolerance of the floating dtypes in the programs: intermediate values have no bound of their own."""
    nodes = [node for _, program in programs.distinct for node in program.graph.nodes]
    values = [leaf for node in nodes for leaf in tree_leaves(node.meta.get("val"))]
    return max((tolerance(value.dtype) for value in values if isinstance(value, torch.Tensor)), default=0.0)


def with_shared_constants(program_sets: Sequence[Programs]) -> tuple[Programs, ...]:
    """Renames constants so that a name means the same tensor in all programs; equal constants become one tensor.

    torch.export numbers the literals of every program from 0, so different programs use the same names.
    """
    programs = [program for one in program_sets for _, program in one.distinct]
    tensors: dict[str, torch.Tensor] = {name: value for program in programs for name, value in program.state_dict.items()}

    def named(program: ExportedProgram) -> ExportedProgram:
        constants, renamed = {}, {}
        for name, value in program.constants.items():
            if isinstance(value, torch.Tensor):
                new = _name(name, value, tensors)
                tensors.setdefault(new, value)
                renamed[name], constants[new] = new, tensors[new]
            else:
                constants[name] = value
        return _renamed(program, renamed, constants)

    return tuple([one.changed(named) for one in program_sets])


def _name(name: str, value: torch.Tensor, used: Mapping[str, torch.Tensor]) -> str:
    """Returns the first of `name`, `name_1`, `name_2`, ... that is free or names an equal tensor."""
    number, new = 0, name
    while new in used and not _same(used[new], value):
        number += 1
        new = f"{name}_{number}"
    return new


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other or (one.data_ptr() == other.data_ptr() and one.numel()):
        return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    same_form = (one.shape, one.stride(), one.dtype, one.device) == (other.shape, other.stride(), other.dtype, other.device)
    return same_form and torch.equal(raw(one), raw(other))


def _renamed(program: ExportedProgram, renamed: Mapping[str, str], constants: Mapping[str, object]) -> ExportedProgram:
    specs = [
        replace(spec, target=renamed[spec.target]) if spec.target in renamed else spec
        for spec in program.graph_signature.input_specs
    ]
    return with_graph(program, program.graph_module, {}, input_specs=specs, constants=constants)
