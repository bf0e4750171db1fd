"""Every invariant of a call's signature: dimensions, inputs and outputs, and which calls may be cut or padded."""

from __future__ import annotations

from collections.abc import Sequence

from ..format import limits, pytree
from ..format.schema import Dimension, EntrySpec, TensorSpec
from ..format.size_expressions import linear, names
from . import require, require_whole_calls


def check_signature(entry: EntrySpec) -> None:
    """Raises entry-invalid unless the signature is sound in itself."""
    _check_dimensions(entry.dimensions)
    known = {dimension.name for dimension in entry.dimensions}
    _check_specs("inputs", entry.inputs, known)
    _check_specs("outputs", entry.outputs, known)
    solved = {rule[0] for spec in entry.inputs for size in spec.shape if (rule := linear(size))}
    for dimension in entry.dimensions:
        require(dimension.name in solved, "dimensions", f"{dimension.name} is the size of no input's axis")
    _check_cuts(entry)
    _check_mutated(entry)
    pytree.check_call(entry.call, len(entry.inputs))
    _check_parameters(entry)
    _check_data_sizes(entry)
    pytree.check(entry.result, "result", len(entry.outputs) - len({row.count for row in entry.data_sizes}))


def _check_dimensions(dimensions: Sequence[Dimension]) -> None:
    require(len(dimensions) <= limits.DIMENSIONS, "dimensions", f"{len(dimensions)}, more than the limit of {limits.DIMENSIONS}")
    require(len({dimension.name for dimension in dimensions}) == len(dimensions), "dimensions", "a name stands twice")
    for index, dimension in enumerate(dimensions):
        where = f"dimensions[{index}]"
        require(dimension.name.isidentifier(), f"{where}.name", f"{dimension.name!r} is no name")
        require(bool(dimension.sizes), f"{where}.sizes", "no size")
        require(list(dimension.sizes) == sorted(set(dimension.sizes)), f"{where}.sizes", "not ascending")
        require(dimension.sizes[0] >= 1, f"{where}.sizes", f"{dimension.sizes[0]} is below 1")


def _check_specs(where: str, specs: Sequence[TensorSpec], known: set[str]) -> None:
    require(len({spec.name for spec in specs}) == len(specs), where, "a name stands twice")
    for index, spec in enumerate(specs):
        at = f"{where}[{index}]"
        if spec.range is not None:
            sound = where == "inputs" and spec.range[0] < spec.range[1] and "int" in spec.dtype
            require(sound, f"{at}.range", f"{list(spec.range)} is no range of indices")
        require(sorted(spec.order) == list(range(len(spec.shape))), f"{at}.order", "is not an order of the axes")
        for axis, size in enumerate(spec.shape):
            unknown = sorted(names(size) - known)
            require(not unknown, f"{at}.shape[{axis}]", f"unknown dimension {unknown[:1]}")
            fits = isinstance(size, int) or where == "outputs" or linear(size) is not None
            require(fits, f"{at}.shape[{axis}]", "an input's size must be scale * dimension + offset")


def _check_cuts(entry: EntrySpec) -> None:
    """A call is cut only where its parts can be told apart in every input, and joined in every output."""
    for index, dimension in enumerate(entry.dimensions):
        if dimension.chunk:
            for kind, specs in (("inputs", entry.inputs), ("outputs", entry.outputs)):
                for place, spec in enumerate(specs):
                    rules = [linear(size) for size in spec.shape if dimension.name in names(size)]
                    whole = all(rule is not None and rule[2] == 0 for rule in rules) and (len(rules) == 1 or kind == "inputs")
                    require(whole, f"dimensions[{index}].chunk", f"{kind}[{place}] cannot be chunked along {dimension.name}")


def _check_mutated(entry: EntrySpec) -> None:
    """The inputs that a call changes stand once each.  No call is padded or chunked: a part of the caller's tensor would be
    left as it was, or be changed twice."""
    mutated = entry.mutated_inputs
    require(list(mutated) == sorted(set(mutated)), "mutated_inputs", "not ascending, or a position stands twice")
    require(all(0 <= place < len(entry.inputs) for place in mutated), "mutated_inputs", "no such input")
    if mutated:
        require_whole_calls(entry, "calls write to their inputs")


def _check_data_sizes(entry: EntrySpec) -> None:
    """An axis of an output stands once, and its count is int64 of no axes, behind the outputs of the model.  No call is padded or
    cut: what is selected from would be larger."""
    rows, outputs = entry.data_sizes, entry.outputs
    places = [(row.output, row.axis) for row in rows]
    require(places == sorted(set(places)), "data_sizes", "not ascending, or an axis stands twice")
    counts = sorted({row.count for row in rows})
    own = len(outputs) - len(counts)
    require(counts == list(range(own, len(outputs))), "data_sizes", "the counts are not the last outputs")
    for index, row in enumerate(rows):
        where = f"data_sizes[{index}]"
        require(row.output < own and row.axis < len(outputs[row.output].shape), where, "no such axis of an output")
        count = outputs[row.count]
        require(count.dtype == "int64" and not count.shape, f"{where}.count", f"{count.name!r} is not an int64 of no axes")
    shared = {alias.output for alias in entry.aliases}
    require(not shared & {*counts, *[row.output for row in rows]}, "data_sizes", "an output that shares memory")
    if rows:
        require_whole_calls(entry, "the sizes of outputs depend on data")


def _check_parameters(entry: EntrySpec) -> None:
    """A parameter for every argument of the call, those by name last, and defaults that are constants."""
    found = entry.parameters
    require(len(found) == len(entry.call["call"]), "parameters", "are not those of the call")
    for index, parameter in enumerate(found):
        if parameter.default is not None:
            pytree.check(parameter.default, f"parameters[{index}].default", 0)
        late = index and found[index - 1].keyword and not parameter.keyword
        require(not late, f"parameters[{index}].keyword", "a parameter by position follows one by name")
