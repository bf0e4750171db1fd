"""Names of a bundle's entries and files, and the tensors that a self-test compares. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..errors import CallError, EntryMissing, did_you_mean
from .records import dataclass
from .schema import EntrySpec, Manifest, Program, TensorSpec, Weight

FORWARD = "forward"  # the entry of a model that names none; calls of the program itself go to it
MANIFEST = "manifest.json"
SIGNATURE, SIGNATURE_BYTES = "manifest.json.sig", 96
PROGRAM, PROGRAMS = "program.pt2", "programs/"
WEIGHTS, TABLES = "weights.safetensors", "tables.safetensors"
SELF_TEST = "exam.safetensors"
GRAPHS, KERNELS, HOST, RANKS = "graphs/", "kernels/", "host/", "ranks/"
OWN_FOLDERS = tuple([folder.rstrip("/") for folder in (PROGRAMS, GRAPHS, KERNELS, HOST)])
"""Folders that a bundle may have without a file in them: builds of earlier versions left some."""


def weight_files(manifest: Manifest) -> dict[str, list[Weight]]:
    """The weights by the file that stores them: WEIGHTS, and TABLES if the bundle has computed tables."""
    stored = [weight for weight in manifest.weights if not weight.zeros]
    tables = [weight for weight in stored if weight.computed]
    return {WEIGHTS: [weight for weight in stored if not weight.computed], **({TABLES: tables} if tables else {})}


def rank_folder(number: int) -> str:
    return f"{RANKS}{number}/"


def folders(path: str) -> list[str]:
    """All parent folders of a file's path: `ranks`, `ranks/1`."""
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def kernel_images(manifest: Manifest) -> set[str]:
    return {file.path.removeprefix(KERNELS) for file in manifest.files if file.path.startswith(KERNELS)}


def self_test_entry(key: Sequence[int], kind: str, index: int, entry: str = FORWARD) -> str:
    """The name of a self-test tensor: `8x128/input/0`, `-/output/0` without dimensions, `decode/8x128/input/0` for another entry
    than forward. `kind`: input, output, or mutated (an input after the call)."""
    return f"{_folder(entry)}{'x'.join(map(str, key)) or '-'}/{kind}/{index}"


def program_file(key: Sequence[int], entry: str = FORWARD) -> str:
    """The exported program of one int_key: `programs/8x128.pt2`, `programs/decode/8x128.pt2`."""
    return f"{PROGRAMS}{_folder(entry)}{'x'.join(map(str, key))}.pt2"


def whole_program_file(entry: str = FORWARD) -> str:
    """The exported program for all int_keys: `program.pt2`, `programs/decode.pt2`."""
    return PROGRAM if entry == FORWARD else f"{PROGRAMS}{entry}.pt2"


def program_files(manifest: Manifest) -> tuple[str, ...]:
    """The files of the exported programs: for each entry one for all int_keys, or one for each."""
    paths: list[str] = []
    for entry in manifest.entries:
        keys = [program.key for program in entry.programs]
        whole = not per_size(manifest, entry)
        paths += [whole_program_file(entry.name)] if whole else [program_file(key, entry.name) for key in keys]
    return tuple(paths)


def per_size(manifest: Manifest, entry: EntrySpec) -> bool:
    paths = {program_file(program.key, entry.name) for program in entry.programs}
    return any(file.path in paths for file in manifest.files)


def _folder(entry: str) -> str:
    return "" if entry == FORWARD else f"{entry}/"


# --- entries --------------------------------------------------------------------------------------------------------


def entry_named(manifest: Manifest, name: str = "") -> EntrySpec:
    """An entry, by default the first. Raises entry-missing, and bundle-kind for the graphs of an engine."""
    if manifest.engine is not None:
        raise CallError("bundle-kind", "the bundle holds graphs of an engine, not a program")
    entry = next((entry for entry in manifest.entries if entry.name == name), None) if name else manifest.entries[0]
    if entry is None:
        raise missing_entry(name, [entry.name for entry in manifest.entries])
    return entry


def missing_entry(name: str, entries: Collection[str]) -> EntryMissing:
    near = did_you_mean(name, entries) if isinstance(name, str) else ""
    return EntryMissing("entry-missing", f"the bundle has no entry {name!r}{near}, but {', '.join(entries)}")


def missing_attribute(owner: object, name: str, entries: Collection[str]) -> AttributeError:
    """The error for an unknown attribute of an object that has entries as attributes."""
    problem = f"no attribute {name!r}{did_you_mean(name, entries)}, and the bundle no entry but {', '.join(entries)}"
    return AttributeError(f"{type(owner).__name__!r} object has {problem}")


def all_programs(manifest: Manifest) -> tuple[Program, ...]:
    return tuple([program for entry in manifest.entries for program in entry.programs])


def recordings(manifest: Manifest) -> set[str]:
    """The files of all recordings: of the entries' programs, or of an engine's graphs."""
    files = {step.file for program in all_programs(manifest) for step in program.steps if step.file}
    return files | {graph.file for graph in manifest.engine.graphs} if manifest.engine is not None else files


def host_regions(entry: EntrySpec) -> set[int]:
    return {step.region for program in entry.programs for step in program.steps if step.kind == "host"}


# --- the tensors that a self-test compares --------------------------------------------------------------------------------


WAIVER = "mismatched-integers"
"""Integers or booleans that differ from eager PyTorch's, because they depend on rounded floats.

What it looks for: outputs of such a dtype that differ when the build compares the bundle with eager PyTorch.  Indices of floats
that are equal within tolerance do not count.
Why: compiled code rounds less often than eager PyTorch, and that can change a comparison or a conversion.
Effect: the build fails with proof-failed.  With --allow, the fraction that differed is stored as the output's bound.
Fix: return the floats instead, or build with --allow mismatched-integers.
Source: the comparison in cgbundle/tensors/comparison.py.
"""

NEAR_TIES = "near-ties"
"""Indices that another processor may select differently, because their floats are equal within tolerance.

What it looks for: indices of `argmax`, `topk`, `sort`, `multinomial` and similar operators in the self-test, if another element is
within tolerance of the selected one.
Why: kernels of another processor round differently, and may select the other element.
Effect: the fraction of such indices is stored as the output's bound, and `cgcompile verify --run` allows this fraction to differ.
Fix: none needed; if the indices must be those of eager PyTorch, select among floats of a wider dtype.
Source: cgcompile/transforms/near_ties.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedTensor:
    """`kind`: output, mutated (an input) or state; `index`: its position in the signature or the weights."""

    kind: str
    index: int
    name: str
    dtype: str

    @property
    def title(self) -> str:
        """`output logits (bfloat16)`."""
        return f"{'input' if self.kind == 'mutated' else self.kind} {self.name} ({self.dtype})"


def self_test_tensors(manifest: Manifest, entry: EntrySpec) -> list[ComparedTensor]:
    """Outputs, mutated inputs, and state weights, in this order."""
    tensors = [_compared("output", index, spec) for index, spec in enumerate(entry.outputs)]
    mutated = [(index, entry.inputs[index]) for index in entry.mutated_inputs]
    tensors += [_compared("mutated", index, spec) for index, spec in mutated]
    state = [(index, weight) for index, weight in enumerate(manifest.weights) if weight.memory == "state"]
    return tensors + [_compared("state", index, weight) for index, weight in state]


def _compared(kind: str, index: int, row: TensorSpec | Weight) -> ComparedTensor:
    return ComparedTensor(kind=kind, index=index, name=row.name, dtype=row.dtype)


def is_exact(dtype: str) -> bool:
    """Whether values have to be equal: integers and booleans."""
    return not dtype.startswith(("float", "bfloat", "complex"))
