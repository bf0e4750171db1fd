"""Decides operator by operator whether padding a declared dimension changes what a program computes.

The program runs at a short size and, padded, at a long one, side by side.  After every operator, the call's part of the result must
be the same in both.  It must stay the same for other input values: the call's elements are moved below and above all padded ones,
and set to zero.  The padded elements are moved too, unless no input of the call can change them, as after a mask.  So a sum over
rows is accepted if padded addends are always zero, a softmax if scores are masked, a maximum if padded elements are -inf.  A sum
that padding changes is refused, even if later operators hide the change.

Assumptions: integers have the range that inputs() draws.  A mask by a large number, such as -10000, is large enough for the model's
scores.  No mask hides a whole row of the call.  Padded rows are finite if they are finite for the drawn inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter

from ...errors import ModelError
from ...export.export import export
from ...model.devices.index_guard import FAILURES
from ...model.flat_module import PREFIX, traced_per_size
from ...model.source import Source, sample
from ..prepared import Prepared
from .padded_call import ChangedByPadding
from .padded_run import PaddedRun, operators
from .padded_values import PaddedDimension

SEED = 0
"""The seed of the values with which operators are tried, so that every build gets the same result."""

SMALL = 8
"""The largest size in trials of a program for all sizes, if the model accepts such sizes.  Such a program computes the same at all
sizes, and large sizes are slow."""


@dataclass(frozen=True, slots=True)
class TwoSizes:
    """A program at a short and a long size of the dimension `name`, with inputs that `inputs()` draws.  If `modules` are programs
    of two int_keys, they have the same operators."""

    name: str
    sizes: tuple[int, int]
    modules: tuple[GraphModule, GraphModule]
    short: Sequence[torch.Tensor]
    long: Sequence[torch.Tensor]


Functional = Callable[[ExportedProgram], GraphModule]
"""`functional`, or a function that caches its modules."""


def two_sizes(prepared: Prepared, name: str, lookup: Functional) -> tuple[TwoSizes, ...]:
    """Returns comparisons for the dimension `name`, with other dimensions at their smallest sizes.  `lookup`: `functional`, cached.

    If each int_key has its own program, the program of each size is compared with that of the next size.  If there is only one
    size, the model is exported at another size too.  Returns () if the operators differ.
    """
    source, values = prepared.source, prepared.sizes[name]
    others = {other: other_sizes[0] for other, other_sizes in prepared.sizes.items()}
    if prepared.programs.dynamic:
        module = lookup(prepared.programs.first)
        declared = next((size for size in values if size > 1), 2)
        return (_small(source, module, others, name, declared) or _at(source, module, others, name, declared),)
    by_size = _by_size(prepared, name)
    values, programs = tuple(by_size), list(by_size.values())
    modules = [lookup(program) for program in programs]
    if any(operators(module) != operators(modules[0]) for module in modules):
        return ()
    drawn = [sample(source, {**others, name: size}).tensors for size in values]
    return tuple(
        [
            TwoSizes(name, (values[at], values[at + 1]), (modules[at], modules[at + 1]), drawn[at], drawn[at + 1])
            for at in range(len(values) - 1)
        ]
    )


def _by_size(prepared: Prepared, name: str) -> dict[int, ExportedProgram]:
    """Returns size -> program.  If there is only one size, exports the model at this size and a neighbouring one."""
    programs, sizes = prepared.programs, prepared.sizes
    others, values = {other: values[:1] for other, values in sizes.items()}, sizes[name]
    if len(values) == 1:
        values = (values[0] - 1, values[0]) if values[0] > 1 else (1, 2)
        try:
            elsewhere = {buffer.removeprefix(PREFIX) for buffer in prepared.state}
            programs = export(prepared.source, {**others, name: values}, elsewhere=elsewhere).programs
        except ModelError:
            return {}
    keys = [tuple([size if dimension == name else others[dimension][0] for dimension in sizes]) for size in values]
    return {size: programs.at(key) for size, key in zip(values, keys, strict=True)}


def _at(source: Source, module: GraphModule, others: Mapping[str, int], name: str, long: int) -> TwoSizes:
    short = min(long - 1, max(2, long // 3))
    drawn = [sample(source, {**others, name: size}).tensors for size in (short, long)]
    return TwoSizes(name, (short, long), (module, module), *drawn)


def _small(source: Source, module: GraphModule, others: Mapping[str, int], name: str, declared: int) -> TwoSizes | None:
    """Returns a dynamic program at sizes smaller than declared, or None if the declared ones are small or the model rejects
    them."""
    if max(declared, *others.values(), 0) <= SMALL:
        return None
    try:
        comparison = _at(source, module, {other: min(size, SMALL) for other, size in others.items()}, name, min(declared, SMALL))
        with torch.no_grad(), traced_per_size():
            for drawn in (comparison.short, comparison.long):  # skips the module's own checks: its declared sizes are larger
                Interpreter(module).run(*drawn, enable_io_processing=False)
    except (*FAILURES, ModelError):
        return None
    return comparison


def changed(compared: TwoSizes, fixed: bool, last: bool = False) -> str:
    """Returns "" if padding changes nothing that the outputs need, else a sentence about the operator that it changes.

    The call's elements come first in the padded inputs, or last with `last`.  `fixed`: pads with zeros, else with any values.
    """
    device = next((tensor.device for tensor in compared.short), torch.device("cpu"))
    along = PaddedDimension(compared.name, compared.sizes, last, torch.Generator(device).manual_seed(SEED))
    with torch.no_grad(), traced_per_size():
        frame = [torch.zeros_like(tensor) for tensor in compared.long] if fixed else compared.long
        inputs = [along.framed(inner, outer, fixed) for inner, outer in zip(compared.short, frame, strict=True)]
        try:
            outputs = PaddedRun(along).graphs(*compared.modules, inputs)
        except ChangedByPadding as sentence:
            return str(sentence)
    for value in outputs:
        if value.why:
            return value.why
        if not value.spot:
            continue
        for spot, small, large in zip(value.spot, value.short.shape, value.long.shape, strict=True):
            start = large - small if last else 0
            if small != large and (isinstance(spot, torch.Tensor) or spot != slice(start, start + small)):
                return f"an output does not begin with the elements along {compared.name}"
    return ""


def functional(program: ExportedProgram) -> GraphModule:
    """Returns the program as a module whose operators write to none of their inputs."""
    parts = [module for module in program.graph_module.modules() if isinstance(module, GraphModule)]
    targets = {node.target for part in parts for node in part.graph.nodes}
    if any(isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable for target in targets):
        program = program.run_decompositions({})
    functional_module: GraphModule = program.module(check_guards=False)
    return functional_module
