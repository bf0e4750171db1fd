"""Every invariant of the exam: its rows in the manifest, and the tensors in its file."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import BundleError
from ..format import file_names
from ..format.archive import Archive
from ..format.entries import each_entry
from ..format.safetensors import Entry
from ..format.schema import IntKey, Manifest, Program
from ..tensors.exam_tensors import NEAR_TIES, WAIVER, exam_tensors, is_exact
from .require import require
from .state import STATE

METHODS = ("replay", "interpret", "none")


def check_exam_rows(manifest: Manifest) -> None:
    """Raises manifest-invalid unless every program has its proof and the exam can be taken."""
    keys = [program.key for program in manifest.programs]
    require([proof.key for proof in manifest.exam.proofs] == keys, "exam.proofs", "do not match the programs")
    require(1 <= manifest.exam.calls <= 16, "exam.calls", f"{manifest.exam.calls} calls")
    require(manifest.exam.compare in ("bits", "tolerance"), "exam.compare", f"unknown comparison {manifest.exam.compare!r}")
    if manifest.format >= 4:
        _check_bounds(manifest)
    for index, proof in enumerate(manifest.exam.proofs):
        where = f"exam.proofs[{index}]"
        require(proof.method in METHODS, f"{where}.method", f"unknown method {proof.method!r}")
        require(proof.tolerance >= 0, f"{where}.tolerance", f"{proof.tolerance} is below 0")
        require(proof.error >= 0, f"{where}.error", f"{proof.error} is below 0")
        require(len(proof.errors) in (0, len(manifest.exam.bounds)), f"{where}.errors", "are not one per bound")
        require(all(error >= 0 for error in proof.errors), f"{where}.errors", "one is below 0")
        recorded = manifest.exam.expected == "recording"
        require(proof.distance == 0 or (recorded and proof.distance > 0), f"{where}.distance", f"{proof.distance} of no recording")


def _check_bounds(manifest: Manifest) -> None:
    exam, compared = manifest.exam, exam_tensors(manifest)
    require(exam.expected in ("eager", "recording"), "exam.expected", f"unknown source {exam.expected!r}")
    require(len(exam.bounds) == len(compared), "exam.bounds", f"{len(exam.bounds)} for {len(compared)} tensors")
    tied = exam.compare == "tolerance" and any(each.rule == NEAR_TIES for each in manifest.findings)
    for index, (tensor, bound) in enumerate(zip(compared, exam.bounds, strict=True)):
        require(bound >= 0, f"exam.bounds[{index}]", f"{bound} is below 0")
        accepted = bound == 0 or (bound <= 1 and (WAIVER in manifest.waivers or tied))
        require(not is_exact(tensor.dtype) or accepted, f"exam.bounds[{index}]", f"{tensor.title} has to be equal, got {bound}")


def check_exam(bundle: Archive) -> None:
    """Raises weights-invalid unless the file holds the inputs, outputs and what calls change of every int_key, and nothing else."""
    manifest, entries = bundle.manifest, bundle.tensors(file_names.EXAM)
    expected = set()
    for own in each_entry(manifest):
        for program in own.programs:
            expected |= _check_state(own, program.key, entries)
            expected |= _check_values(own, program, entries)
    for name in sorted(entries.keys() - expected):
        raise BundleError("weights-invalid", f"{file_names.EXAM}: tensor {name!r} belongs to no int_key")


def _check_values(manifest: Manifest, program: Program, entries: Mapping[str, Entry]) -> set[str]:
    """The names of the tensors of a program's inputs and outputs, and of what the inputs that a call changes hold after it."""
    written = [(index, program.inputs[index]) for index in manifest.written]
    names = set()
    for kind, positions in (("input", enumerate(program.inputs)), ("output", enumerate(program.outputs)), ("written", written)):
        for index, position in positions:
            name, value = file_names.exam_entry(program.key, kind, index, manifest.entry), program.values[position]
            names.add(name)
            entry = _entry(entries, name)
            if (entry.dtype, entry.shape) != (value.dtype, value.shape):
                found, wanted = f"{entry.dtype} {list(entry.shape)}", f"{value.dtype} {list(value.shape)}"
                raise BundleError("weights-invalid", f"{file_names.EXAM}: tensor {name!r} is {found}, expected {wanted}")
    return names


def _check_state(manifest: Manifest, key: IntKey, entries: Mapping[str, Entry]) -> set[str]:
    """Names of the tensors about the state after a call with `key`.  `state-at` are pairs [first element, number of elements] of
    what changed, in memory order; `state` has these elements, one after the other."""
    names = set()
    for index, weight in enumerate(manifest.weights):
        if weight.memory == STATE:
            for kind, dtype, rank in (("state", weight.dtype, 1), ("state-at", "int64", 2)):
                name = file_names.exam_entry(key, kind, index, manifest.entry)
                names.add(name)
                entry = _entry(entries, name)
                if entry.dtype != dtype or len(entry.shape) != rank or (rank == 2 and entry.shape[1] != 2):
                    raise BundleError("weights-invalid", f"{file_names.EXAM}: tensor {name!r} is {entry.dtype} {list(entry.shape)}")
    return names


def _entry(entries: Mapping[str, Entry], name: str) -> Entry:
    if name not in entries:
        raise BundleError("weights-invalid", f"{file_names.EXAM}: tensor {name!r} is missing")
    return entries[name]
