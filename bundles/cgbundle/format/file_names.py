"""What the files of a bundle are called, and the tensors of its self-test.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from .entries import FORWARD
from .schema import EntrySpec, Manifest, Weight

MANIFEST = "manifest.json"
SIGNATURE, SIGNATURE_BYTES = "manifest.json.sig", 96
PROGRAM, PROGRAMS = "program.pt2", "programs/"
WEIGHTS, TABLES = "weights.safetensors", "tables.safetensors"
SELF_TEST = "exam.safetensors"
GRAPHS, KERNELS, HOST, RANKS = "graphs/", "kernels/", "host/", "ranks/"
OWN_FOLDERS = tuple([folder.rstrip("/") for folder in (PROGRAMS, GRAPHS, KERNELS, HOST)])
"""Folders that a bundle may have without a file in them: builds of earlier versions left some."""


def weight_files(manifest: Manifest) -> dict[str, list[Weight]]:
    """The weights by the file that holds their tensors, as far as one does: WEIGHTS, and TABLES where there are any."""
    stored = [weight for weight in manifest.weights if not weight.zeros]
    tables = [weight for weight in stored if weight.computed]
    return {WEIGHTS: [weight for weight in stored if not weight.computed], **({TABLES: tables} if tables else {})}


def rank_folder(number: int) -> str:
    """Where the bundle of a rank other than 0 lies: `ranks/1/`."""
    return f"{RANKS}{number}/"


def folders(path: str) -> list[str]:
    """The folders that a file's path goes through: `ranks`, `ranks/1`."""
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def kernel_images(manifest: Manifest) -> set[str]:
    """The SHA-256 of every kernel image."""
    return {file.path.removeprefix(KERNELS) for file in manifest.files if file.path.startswith(KERNELS)}


def self_test_entry(key: Sequence[int], kind: str, index: int, entry: str = FORWARD) -> str:
    """The name of a self-test tensor: `8x128/input/0`; the key of a model without dimensions is `-`.  `kind`: input, output, or
    mutated, which is what the input of that number holds after the call.  Of another entry than `forward`:
    `decode/8x128/input/0`."""
    return f"{_folder(entry)}{'x'.join(map(str, key)) or '-'}/{kind}/{index}"


def program_file(key: Sequence[int], entry: str = FORWARD) -> str:
    """The exported program of an int_key, where each has its own: `programs/8x128.pt2`, `programs/decode/8x128.pt2`."""
    return f"{PROGRAMS}{_folder(entry)}{'x'.join(map(str, key))}.pt2"


def whole_program_file(entry: str = FORWARD) -> str:
    """The exported program that is for all int_keys: `program.pt2`, `programs/decode.pt2`."""
    return PROGRAM if entry == FORWARD else f"{PROGRAMS}{entry}.pt2"


def program_files(manifest: Manifest) -> tuple[str, ...]:
    """The files of the exported programs: of each entry one for all int_keys, or one for each."""
    found: list[str] = []
    for entry in manifest.entries:
        keys = [program.key for program in entry.programs]
        whole = not per_size(manifest, entry)
        found += [whole_program_file(entry.name)] if whole else [program_file(key, entry.name) for key in keys]
    return tuple(found)


def per_size(manifest: Manifest, entry: EntrySpec) -> bool:
    """Whether every int_key of the entry has an exported program of its own."""
    own = {program_file(program.key, entry.name) for program in entry.programs}
    return any(file.path in own for file in manifest.files)


def _folder(entry: str) -> str:
    return "" if entry == FORWARD else f"{entry}/"
