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
    pytree.check(manifest.result, "result", len(manifest.outputs))


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
