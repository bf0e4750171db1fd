"""Every invariant of a call's signature: dimensions, inputs and outputs, and which calls may be cut or padded."""

from __future__ import annotations

from collections.abc import Sequence

from ..format import limits, pytree
from ..format.schema import DTYPES, Dimension, Manifest, TensorSpec
from ..format.size_expressions import linear, names
from .require import require, require_whole_calls


def check_signature(manifest: Manifest) -> None:
    """Raises manifest-invalid unless the signature is sound in itself."""
    _check_dimensions(manifest.dimensions)
    known = {dimension.name for dimension in manifest.dimensions}
    _check_specs("inputs", manifest.inputs, known)
    _check_specs("outputs", manifest.outputs, known)
    solved = {rule[0] for spec in manifest.inputs for size in spec.shape if (rule := linear(size))}
    for dimension in manifest.dimensions:
        require(dimension.name in solved, "dimensions", f"{dimension.name} is the size of no input's axis")
    _check_cuts(manifest)
    _check_written(manifest)
    pytree.check_call(manifest.call, len(manifest.inputs))
    _check_parameters(manifest)
    _check_data_sizes(manifest)
    pytree.check(manifest.result, "result", len(manifest.outputs) - len({row.count for row in manifest.data_sizes}))


def _check_dimensions(dimensions: Sequence[Dimension]) -> None:
    require(len(dimensions) <= limits.DIMENSIONS, "dimensions", f"{len(dimensions)}, more than the limit of {limits.DIMENSIONS}")
    require(len({dimension.name for dimension in dimensions}) == len(dimensions), "dimensions", "a name stands twice")
    for index, dimension in enumerate(dimensions):
        where = f"dimensions[{index}]"
        require(dimension.name.isidentifier(), f"{where}.name", f"{dimension.name!r} is no name")
        require(bool(dimension.sizes), f"{where}.sizes", "no size")
        require(list(dimension.sizes) == sorted(set(dimension.sizes)), f"{where}.sizes", "not ascending")
        require(dimension.sizes[0] >= 1, f"{where}.sizes", f"{dimension.sizes[0]} is below 1")
        require(dimension.pad in ("rows", "zeros", "no"), f"{where}.pad", f"unknown kind {dimension.pad!r}")


def _check_specs(where: str, specs: Sequence[TensorSpec], known: set[str]) -> None:
    require(len({spec.name for spec in specs}) == len(specs), where, "a name stands twice")
    for index, spec in enumerate(specs):
        at = f"{where}[{index}]"
        require(spec.dtype in DTYPES, f"{at}.dtype", f"unknown dtype {spec.dtype!r}")
        ranged = not spec.range or (where == "inputs" and len(spec.range) == 2 and spec.range[0] < spec.range[1])
        require(ranged and (not spec.range or "int" in spec.dtype), f"{at}.range", f"{list(spec.range)} is no range of indices")
        require(sorted(spec.order) == list(range(len(spec.shape))), f"{at}.order", "is not an order of the axes")
        for axis, size in enumerate(spec.shape):
            unknown = sorted(names(size) - known)
            require(not unknown, f"{at}.shape[{axis}]", f"unknown dimension {unknown[:1]}")
            fits = isinstance(size, int) or where == "outputs" or linear(size) is not None
            require(fits, f"{at}.shape[{axis}]", "an input's size must be scale * dimension + offset")


def _check_cuts(manifest: Manifest) -> None:
    """A call is cut only where its parts can be told apart in every input, and joined in every output."""
    for index, dimension in enumerate(manifest.dimensions):
        if dimension.chunk:
            for kind, specs in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
                for place, spec in enumerate(specs):
                    rules = [linear(size) for size in spec.shape if dimension.name in names(size)]
                    whole = all(rule is not None and rule[2] == 0 for rule in rules) and (len(rules) == 1 or kind == "inputs")
                    require(whole, f"dimensions[{index}].chunk", f"{kind}[{place}] cannot be cut along {dimension.name}")


def _check_written(manifest: Manifest) -> None:
    """The inputs that a call changes stand once each.  No call is padded or cut: a part of the caller's tensor would be left as it
    was, or be changed twice."""
    written = manifest.written
    require(list(written) == sorted(set(written)), "written", "not ascending, or a position stands twice")
    require(all(0 <= place < len(manifest.inputs) for place in written), "written", "no such input")
    if written:
        require_whole_calls(manifest, "calls write to their inputs")


def _check_data_sizes(manifest: Manifest) -> None:
    """An axis of an output stands once, and its count is int64 of no axes, behind the outputs of the model.  No call is padded or
    cut: what is selected from would be larger."""
    rows, outputs = manifest.data_sizes, manifest.outputs
    places = [(row.output, row.axis) for row in rows]
    require(places == sorted(set(places)), "data_sizes", "not ascending, or an axis stands twice")
    counts = sorted({row.count for row in rows})
    own = len(outputs) - len(counts)
    require(counts == list(range(own, len(outputs))), "data_sizes", "the counts are not the last outputs")
    for index, row in enumerate(rows):
        where = f"data_sizes[{index}]"
        require(0 <= row.output < own and 0 <= row.axis < len(outputs[row.output].shape), where, "no such axis of an output")
        count = outputs[row.count]
        require(count.dtype == "int64" and not count.shape, f"{where}.count", f"{count.name!r} is not an int64 of no axes")
    shared = {alias.output for alias in manifest.aliases}
    require(not shared & {*counts, *[row.output for row in rows]}, "data_sizes", "an output that shares memory")
    if rows:
        require_whole_calls(manifest, "the sizes of outputs depend on data")


def _check_parameters(manifest: Manifest) -> None:
    """A parameter for every argument of the call, those by name last, and defaults that are constants."""
    found = manifest.parameters
    if manifest.format >= 4:
        require(len(found) == len(manifest.call["call"]), "parameters", "are not those of the call")
    for index, parameter in enumerate(found):
        require(len(parameter.default) <= 1, f"parameters[{index}].default", "expected one tree at most")
        for tree in parameter.default:
            pytree.check(tree, f"parameters[{index}].default", 0)
        late = index and found[index - 1].keyword and not parameter.keyword
        require(not late, f"parameters[{index}].keyword", "a parameter by position follows one by name")
