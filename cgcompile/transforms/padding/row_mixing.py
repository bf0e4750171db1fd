"""Whether padding a declared dimension changes what a program computes: decided operator by operator.

The program runs at a short size and, padded, at a long one, side by side.  After every operator what it gives for the call must be
the same in both.  It must stay so when its inputs hold other values: the call's entries are moved below and above all padded ones,
and made zero; the padded ones are moved too, unless no input of the call can change them, as behind a mask.  So a sum over rows is
padded where what is added are zeros whatever the call holds, a softmax where scores are masked, a maximum where padded entries are
-inf.  What the outputs make of a changed sum plays no part.

Premises: integers have the range that inputs() draws; a mask by a large number, such as -10000, is large enough for the model's
scores, and no mask hides a whole row of the call; padded rows are finite where they are for the inputs drawn.
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
"""Of the values that operators are tried with: a verdict is the same in every build."""

SMALL = 8
"""A program for all sizes is run at declared ones up to this, or at this: it computes the same at all, and large ones take long."""


@dataclass(frozen=True, slots=True)
class TwoSizes:
    """A program at a short and a long size of the dimension `name`, with inputs as `inputs()` draws them; programs of their own are
    made of the same operators."""

    name: str
    sizes: tuple[int, int]
    modules: tuple[GraphModule, GraphModule]
    short: Sequence[torch.Tensor]
    long: Sequence[torch.Tensor]


Functional = Callable[[ExportedProgram], GraphModule]
"""`functional`, or what remembers its modules."""


def two_sizes(
    source: Source, prepared: Prepared, sizes: Mapping[str, tuple[int, ...]], name: str, lookup: Functional
) -> tuple[TwoSizes, ...]:
    """What is compared for the dimension `name`, the other dimensions at their smallest sizes; modules are those that are `lookup`.

    Programs of their own are compared with that of the next size, or where there is one size alone, of a smaller one; none where
    their operators differ.
    """
    values = sizes[name]
    others = {other: other_sizes[0] for other, other_sizes in sizes.items()}
    if prepared.programs.dynamic:
        module = lookup(prepared.programs.first)
        declared = next((size for size in values if size > 1), 2)
        return (_small(source, module, others, name, declared) or _at(source, module, others, name, declared),)
    by_size = _by_size(source, prepared, sizes, name)
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


def _by_size(source: Source, prepared: Prepared, sizes: Mapping[str, tuple[int, ...]], name: str) -> dict[int, ExportedProgram]:
    """The programs of the dimension's sizes, and of a smaller one where it has one alone, which is exported for this."""
    others = {other: values[:1] for other, values in sizes.items()}
    programs, values = prepared.programs, sizes[name]
    if len(values) == 1:
        values = (values[0] - 1, values[0]) if values[0] > 1 else (1, 2)
        try:
            elsewhere = {buffer.removeprefix(PREFIX) for buffer in prepared.state}
            programs = export(source, {**others, name: values}, elsewhere=elsewhere).programs
        except ModelError:
            return {}
    keys = [tuple([size if dimension == name else others[dimension][0] for dimension in sizes]) for size in values]
    return {size: programs.at(key) for size, key in zip(values, keys, strict=True)}


def _at(source: Source, module: GraphModule, others: Mapping[str, int], name: str, long: int) -> TwoSizes:
    short = min(long - 1, max(2, long // 3))
    drawn = [sample(source, {**others, name: size}).tensors for size in (short, long)]
    return TwoSizes(name, (short, long), (module, module), *drawn)


def _small(source: Source, module: GraphModule, others: Mapping[str, int], name: str, declared: int) -> TwoSizes | None:
    """A dynamic program at sizes smaller than declared, None where there are none, or the model does not take them."""
    if max(declared, *others.values(), 0) <= SMALL:
        return None
    try:
        comparison = _at(source, module, {other: min(size, SMALL) for other, size in others.items()}, name, min(declared, SMALL))
        with torch.no_grad(), traced_per_size():
            for drawn in (comparison.short, comparison.long):  # without the module's own checks: its declared sizes begin higher
                Interpreter(module).run(*drawn, enable_io_processing=False)
    except (*FAILURES, ModelError):
        return None
    return comparison


def changed(compared: TwoSizes, fixed: bool, last: bool = False) -> str:
    """ "" where padding changes nothing that the outputs need, else a sentence about the operator that it changes.

    The call is the beginning of a larger one, or where `last` its end.  `fixed`: it is padded with zeros; else with anything.
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
    """The program as a module whose operators write to none of their inputs."""
    parts = [module for module in program.graph_module.modules() if isinstance(module, GraphModule)]
    targets = {node.target for part in parts for node in part.graph.nodes}
    if any(isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable for target in targets):
        program = program.run_decompositions({})
    functional_module: GraphModule = program.module(check_guards=False)
    return functional_module
