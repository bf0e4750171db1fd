"""Every invariant of the tensors in the file of the self-test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ..errors import BundleError
from ..format import file_names
from ..format.archive import Archive
from ..format.safetensors import Entry
from ..format.schema import STATE, EntrySpec, IntKey, Manifest, Program
from ..tensors import condensed


def check_self_test(bundle: Archive) -> None:
    """Raises weights-invalid unless the file holds the inputs, outputs and what calls change of every int_key, and nothing else."""
    if bundle.manifest.engine is not None:
        return  # the process that saved it had the tensors: its graphs were verified there
    manifest, entries = bundle.manifest, bundle.tensors(file_names.SELF_TEST)
    expected = set()
    for entry in manifest.entries:
        for program in entry.programs:
            expected |= _check_state(manifest, entry, program.key, entries)
            expected |= _check_values(entry, program, entries)
    for name in sorted(entries.keys() - expected):
        raise BundleError("weights-invalid", f"{file_names.SELF_TEST}: tensor {name!r} belongs to no int_key")


def _check_values(spec: EntrySpec, program: Program, entries: Mapping[str, Entry]) -> set[str]:
    """The names of the tensors of a program's inputs and outputs, and of what the inputs that a call changes hold after it."""
    mutated = [(index, program.inputs[index]) for index in spec.mutated_inputs]
    names = set()
    for kind, positions in (("input", enumerate(program.inputs)), ("output", enumerate(program.outputs)), ("mutated", mutated)):
        for index, position in positions:
            name, value = file_names.self_test_entry(program.key, kind, index, spec.name), program.values[position]
            if kind != "input" and (endings := condensed.stand_in(entries, name)):
                names |= _check_condensed(entries, name, endings, value.dtype, prod(value.shape))
                continue
            names.add(name)
            entry = _entry(entries, name)
            if (entry.dtype, entry.shape) != (value.dtype, value.shape):
                actual, wanted = f"{entry.dtype} {list(entry.shape)}", f"{value.dtype} {list(value.shape)}"
                raise BundleError("weights-invalid", f"{file_names.SELF_TEST}: tensor {name!r} is {actual}, expected {wanted}")
    return names


def _check_state(manifest: Manifest, spec: EntrySpec, key: IntKey, entries: Mapping[str, Entry]) -> set[str]:
    """Names of the tensors about the state after a call with `key`.  `state-at` are pairs [first element, number of elements] of
    what changed, in memory order; `state` has these elements, one after the other."""
    names = set()
    for index, weight in enumerate(manifest.weights):
        if weight.memory == STATE:
            for kind, dtype, rank in (("state", weight.dtype, 1), ("state-at", "int64", 2)):
                name = file_names.self_test_entry(key, kind, index, spec.name)
                if kind == "state" and (endings := condensed.stand_in(entries, name)):
                    names |= _check_condensed(entries, name, endings, dtype, None)
                    continue
                names.add(name)
                entry = _entry(entries, name)
                if entry.dtype != dtype or len(entry.shape) != rank or (rank == 2 and entry.shape[1] != 2):
                    raise BundleError(
                        "weights-invalid", f"{file_names.SELF_TEST}: tensor {name!r} is {entry.dtype} {list(entry.shape)}"
                    )
    return names


def _check_condensed(entries: Mapping[str, Entry], name: str, endings: Sequence[str], dtype: str, count: int | None) -> set[str]:
    """The names of what takes the place of a tensor of `count` elements; None where a replay shows how many there are."""
    for shapes in condensed.expected_shapes(name, dtype, count or 0):
        if shapes.keys() == {name + ending for ending in endings}:
            for tensor_name, (kind, shape) in shapes.items():
                row = _entry(entries, tensor_name)
                fits = row.shape == shape if count is not None else (len(row.shape), row.shape[1:]) == (len(shape), shape[1:])
                if row.dtype != kind or not fits:
                    raise BundleError(
                        "weights-invalid", f"{file_names.SELF_TEST}: tensor {tensor_name!r} is {row.dtype} {list(row.shape)}"
                    )
            return set(shapes)
    raise BundleError("weights-invalid", f"{file_names.SELF_TEST}: tensor {name!r}: a part of what takes its place is missing")


def _entry(entries: Mapping[str, Entry], name: str) -> Entry:
    if name not in entries:
        raise BundleError("weights-invalid", f"{file_names.SELF_TEST}: tensor {name!r} is missing")
    return entries[name]
