"""Texts about a bundle's manifest for `build` and `inspect`, and derived values for `--json`.  Pure functions."""

from __future__ import annotations

import json
import os
import shlex
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cgbundle import signatures
from cgbundle.call.update import updatable
from cgbundle.cpu.host_weights import least_rows
from cgbundle.errors import BundleError
from cgbundle.format import archive, file_names
from cgbundle.format.file_names import FORWARD, entry_named
from cgbundle.format.safetensors import ALIGNMENT, nbytes
from cgbundle.format.schema import Alias, Dimension, EntrySpec, Manifest, Target, TensorSpec, Weight
from cgbundle.format.shapes import axes_text, text
from cgbundle.format.variants import variant_name
from cgcompile.bundle import manifest_text
from cgcompile.bundle.arguments import Constant, constants, nested, spelled
from cgcompile.targets.instruction_sets import LEVELS
from cgcompile.util.padding_reasons import short_cure

from .output import count, first_lines, first_rows, listed, shortened, size, table

if TYPE_CHECKING:
    from rich.table import Table


FEATURES = 3
"""Maximum number of processor features that are listed.  All features of a level count as one."""

UNASKED = {"cx16", "xsave"}
"""Features of levels that compiled code does not use."""

MAIN_FEATURES = ("avx", "amx", "fma", "sve", "asimd")
"""Prefixes of the most important processor features, which are listed first."""

UPDATED = "(updated by the call)"
"""The remark on an input that the model writes to."""

RANDOM = "the seed of the random numbers, and how many calls there were"
"""The name of the state that the manifest calls `random`."""

PADDING = {"rows": "padded with any values", "zeros": "padded with zeros", "no": "never padded"}


FILES = {
    file_names.SELF_TEST: "the self-test: inputs and expected outputs, which `verify --run` and `run` replay",
    file_names.PROGRAM: "the exported program, without weights",
    file_names.TABLES: "constants that the build computed from weights, or for kernels",
}
"""What a file of a bundle is, where its name does not say it."""

OWN_ATTRIBUTES = ("manifest", "name", "int_keys", "inputs", "outputs", "memory", "state")
"""Attributes of a loaded program that are set on the object, so that its class does not have them."""

LISTED = 4
"""Maximum sizes in an example of an option."""

SHOWN = 60
"""Maximum characters of a constant."""

TABLE = "cgcompile.table."
"""Prefix of weights that are not weights of the model; cgcompile/targets/weights.py writes them."""


def plain(path: str, manifest: Manifest) -> dict[str, Any]:
    """Returns the object for `--json`: the stored manifest, and values derived from it.  `entry` to `mutated_buffers` describe the
    first entry, and `entries` describes all of them."""
    rows = [plain_entry(manifest, entry) for entry in manifest.entries]
    names, frozen = updatable(manifest)
    return {
        "path": path,
        "bytes": manifest_text.bundle_bytes(manifest),
        "signature": signature(path),
        **rows[0],
        "entries": rows,
        "weights": {"names": len(manifest.weights), "bytes": weight_bytes(manifest), "tied": ties(manifest)},
        "state": [weight.name for weight in stateful(manifest)],
        "state_rows": {
            row.name: {"least": least_rows(row, manifest.weights), "most": row.most} for row in manifest.state_dimensions
        },
        "world": manifest.world.size if manifest.world else 1,
        "variants": variant_names(path),
        "update": {"names": names, "frozen": frozen},
        "donations": donations(manifest),
        "donated": {row.entry: row.bytes for row in manifest.donated},
        "load": load_lines(path, manifest),
        "manifest": json.loads(manifest_text.encode(manifest)),
    }


def variant_names(path: str) -> list[str]:
    return [variant_name(target) for target in archive.Archive(path).variants.targets()]


def variants(path: str, manifest: Manifest) -> list[tuple[str, str]]:
    """Returns the field of a bundle with several variants: their names, and which one is shown."""
    names = variant_names(path)
    return [("variants", f"{', '.join(names)}; shown is {variant_name(manifest.target)}")] if len(names) > 1 else []


def plain_entry(manifest: Manifest, entry: EntrySpec) -> dict[str, Any]:
    """Returns values derived from an entry."""
    return {
        "entry": entry.name,
        "int_keys": [list(program.key) for program in entry.programs],
        "exported": "per size" if file_names.per_size(manifest, entry) else "dynamic",
        "inputs": [f"{spec.name}: {spec.dtype} {shape(spec.shape)}" for spec in entry.inputs],
        "constants": [constant._asdict() for constant in constants(entry)],
        "mutated_inputs": [entry.inputs[index].name for index in entry.mutated_inputs],
        "outputs": [f"{spec.name}: {spec.dtype} {sizes}" for spec, sizes in returned(entry)],
        "mutated_buffers": mutated_buffers(manifest, entry),
    }


def plain_programs(manifest: Manifest, entry: EntrySpec) -> list[dict[str, Any]]:
    """Returns the programs of an entry as they are stored."""
    entries = json.loads(manifest_text.encode(manifest))["entries"]
    rows: list[dict[str, Any]] = next(row["programs"] for row in entries if row["name"] == entry.name)
    return rows


def signature(path: str) -> dict[str, str] | None:
    """Returns the key of the signature (64 digits, not checked), or the error; None without a signature."""
    try:
        claim = signatures.read(archive.Archive(path))
    except BundleError as error:
        return {"error": str(error)}
    return {"key": claim.key.hex()} if claim else None


def signed(path: str) -> str:
    """Describes the signature: `by key d75a98... (not checked)`, `no`, or its error."""
    claim = signature(path)
    return "no" if claim is None else f"by key {claim['key']} (not checked)" if "key" in claim else f"wrongly: {claim['error']}"


def bulk(manifest: Manifest) -> str:
    """Formats files and bytes: `5 files, 1.2 MiB`."""
    return f"{count(len(manifest.files) + 1, 'file')}, {size(manifest_text.bundle_bytes(manifest))}"


def target(row: Target) -> str:
    """Describes a target: `cpu x86_64 (x86-64-v3, avx_vnni, and 9 more), to run: torch 2.13 or newer`, or `cpu x86-64-v3, to run:
    ...`.  A standalone bundle needs only OpenMP's library."""
    from cgbundle.cpu.libtorch import OPENMP  # imported here, because it imports ctypes

    best = max(
        [level for level in LEVELS if set(level.features) - UNASKED <= set(row.features)], key=lambda tier: tier.name, default=None
    )
    ranked = sorted(
        set(row.features) - set(best.features if best else ()), key=lambda name: (not name.startswith(MAIN_FEATURES), name)
    )
    named = [best.name, *ranked] if best else ranked
    features = f" ({listed(named, FEATURES)})" if row.features else ""
    needs = [f"torch {row.torch} or newer"] if row.torch else [OPENMP] if row.kind == "cpu" else []
    if row.driver:
        needs.append(f"CUDA driver {row.driver // 1000}.{row.driver % 1000 // 10} or newer")
    return f"{row.kind} {row.level or row.arch + features}" + (f", to run: {', '.join(needs)}" if needs else "")


def shape(sizes: Sequence[Any]) -> str:
    """Formats a shape: `[batch, 64]`."""
    return "[" + ", ".join([text(expression) for expression in sizes]) + "]"


def returned(entry: EntrySpec) -> list[tuple[TensorSpec, str]]:
    """Returns the outputs of a call with their shapes: `[<=n, 4]` if the number of rows depends on data."""
    counts = {row.count for row in entry.data_sizes}
    bounded = {(row.output, row.axis) for row in entry.data_sizes}
    return [
        (spec, "[" + ", ".join([f"{'<=' * ((index, axis) in bounded)}{text(size)}" for axis, size in enumerate(spec.shape)]) + "]")
        for index, spec in enumerate(entry.outputs)
        if index not in counts
    ]


def signature_rows(manifest: Manifest, entry: EntrySpec) -> list[tuple[str, str, str, str, str]]:
    """Returns (in or out, name, dtype, shape, remark) of every input and output, and (in, name, type, value, remark) of the
    constants.  If an entry has no inputs or no outputs, a row says `none`.  The remark is `(updated by the call)`, `(indices
    0..99)`, `(shares memory with input x)`, how a constant is passed, or ""."""
    shared = {alias.output: f"(shares memory with {alias_of(manifest, entry, alias)})" for alias in entry.aliases}
    indices = {i: f"(indices {spec.range[0]}..{spec.range[1] - 1})" for i, spec in enumerate(entry.inputs) if spec.range}
    updated = indices | dict.fromkeys(entry.mutated_inputs, UPDATED)
    rows = {
        side: [(side, spec.name, spec.dtype, sizes, remarks.get(index, "")) for index, (spec, sizes) in enumerate(specs)]
        for side, specs, remarks in (
            ("in", [(spec, shape(spec.shape)) for spec in entry.inputs], updated),
            ("out", returned(entry), shared),
        )
    }
    fixed = [
        ("in", constant.name, type(constant.value).__name__, cut(repr(constant.value)), constant_remark(constant))
        for constant in constants(entry)
    ]
    inputs, outputs = [*rows["in"], *fixed], rows["out"]
    return [*(inputs or [("in", "none", "", "", "")]), *(outputs or [("out", "none", "", "", "")])]


def constant_remark(constant: Constant) -> str:
    """Returns `(constant, may be left out)`, `(constant, must be given: the model's default is 1.0)`."""
    if not constant.required:
        return "(constant, may be left out)"
    model_default = f": the model's default is {cut(repr(constant.default[0]))}" if constant.default else ""
    return f"(constant, must be given{model_default})"


def cut(text: str) -> str:
    """Truncates `text` to SHOWN characters."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def alias_of(manifest: Manifest, entry: EntrySpec, alias: Alias) -> str:
    """Returns the tensor with which an output shares memory: `input x`, `output y`, `weight table`, `state cache`."""
    if alias.memory in ("inputs", "outputs"):
        specs = entry.inputs if alias.memory == "inputs" else entry.outputs
        return f"{alias.memory.removesuffix('s')} {specs[alias.index].name}"
    return f"{alias.memory.removesuffix('s')} {manifest.weights[alias.index].name}"


def padding(row: Dimension) -> str:
    """Describes a dimension: `batch: padded with any values, chunked: <why>`."""
    chunks = "chunked" if row.chunk else "not chunked"
    return f"{row.name}: {PADDING[row.pad]}, {chunks}" + (f": {row.reason}" if row.reason else "")


def unpadded(entry: EntrySpec) -> list[str]:
    """Describes every dimension that accepts only recorded sizes, and what to do: `seq takes 16, 64 only: ...`."""
    notes = []
    for row in entry.dimensions:
        if row.pad == "no":
            why = f"{row.name} takes {listed(row.sizes)} only: other sizes are refused (`padding` above says why)"
            cure = f"record the sizes of your calls too (--sizes {row.name}={','.join(map(str, row.sizes[:LISTED]))},N)"
            cures = ", ".join(filter(None, [cure, short_cure(row.reason)]))
            notes.append(f"{why}; {cures}; `cgcompile explain padding` lists all reasons")
    return notes


def sizes(manifest: Manifest, entry: EntrySpec) -> str:
    """Formats the sizes: `batch 1, 8 x seq 32: 4 int_keys`.  Adds `, exported per size` if each int_key has its own program."""
    axes = " x ".join([f"{dimension.name} {listed(dimension.sizes)}" for dimension in entry.dimensions])
    suffix = ", exported per size" if file_names.per_size(manifest, entry) else ""
    return f"{axes or 'no dimensions'}: {count(len(entry.programs), 'int_key')}{suffix}"


def mutated_buffers(manifest: Manifest, entry: EntrySpec) -> list[str]:
    """Returns the names of the state that a call changes."""
    return [manifest.weights[index].name for index in entry.mutated_buffers]


def entry_lines(manifest: Manifest, entry: EntrySpec) -> list[str]:
    """Returns an entry's name, and `changes keys, values` if its calls change state."""
    names = mutated_buffers(manifest, entry)
    return [entry.name, *([f"changes {listed(names, 4)}"] if names else [])]


def axes(entry: EntrySpec) -> list[str]:
    """Returns `batch: axis 0 of ids, mask` for every dimension."""
    shapes = [(spec.name, spec.shape) for spec in entry.inputs]
    return [f"{dimension.name}: {cut(axes_text(dimension.name, shapes))}" for dimension in entry.dimensions]


def world(manifest: Manifest) -> list[str]:
    """Describes the number of GPUs and the bytes of each rank; [] for a model on one device."""
    if not manifest.world:
        return []
    rank, ranks = manifest.world.rank, manifest.world.size
    folders = [file_names.rank_folder(number) for number in range(1, ranks)]
    others = [sum(file.bytes for file in manifest.files if file.path.startswith(folder)) for folder in folders]
    first = manifest_text.bundle_bytes(manifest) - sum(others)
    rows = [f"rank {number}: {size(total)}" for number, total in enumerate([first, *others])]
    return [f"{ranks} GPUs that write to each other's memory; this is rank {rank}", *(rows if not rank else [])]


def memory(manifest: Manifest) -> str:
    """Formats the memories: `weights 1.2 MiB, arena 80.0 KiB`."""
    return ", ".join([f"{name} {size(number)}" for name, number in manifest.memories if number]) or "none of its own"


def memory_lines(manifest: Manifest) -> list[str]:
    """Returns the memories, and why weights need more bytes on a GPU than on the CPU."""
    needed, tensors = dict(manifest.memories).get("weights", 0), fixed_bytes(manifest)
    gaps = manifest.target.kind == "cuda" and not manifest.world and needed > tensors and size(needed) != size(tensors)
    text = f"weights: {size(tensors)} of tensors; on a GPU each begins at a multiple of {ALIGNMENT} bytes"
    return [memory(manifest), *([text] if gaps else [])]


def weight_bytes(manifest: Manifest) -> int:
    """Returns the bytes of the weights; a tensor that several weights share counts once."""
    return sum({weight.tensor: nbytes(weight.dtype, weight.shape) for weight in manifest.weights}.values())


def fixed_bytes(manifest: Manifest) -> int:
    """Returns the bytes of the weights that no call changes."""
    return weight_bytes(manifest) - sum(nbytes(weight.dtype, weight.shape) for weight in stateful(manifest))


def ties(manifest: Manifest) -> list[list[str]]:
    """Returns the names of weights that share a tensor, a list per tensor."""
    named: dict[str, list[str]] = defaultdict(list)
    for weight in manifest.weights:
        named[weight.tensor].append(weight.name)
    return [names for names in named.values() if len(names) > 1]


def weights(manifest: Manifest) -> list[str]:
    """Returns `6 weights, 1.2 MiB` and a line per tie."""
    tied, hidden = shortened(ties(manifest), 3)
    changed = stateful(manifest)
    tables = sum(weight.name.startswith(TABLE) for weight in manifest.weights)
    counts = count(len(manifest.weights) - len(changed) - tables, "weight") + (f" and {count(tables, 'table')}" if tables else "")
    lines = [f"{counts}, {size(fixed_bytes(manifest))}", *(" = ".join(names) for names in tied)]
    return [*lines, *([f"and {hidden} more ties"] if hidden else [])]


def stateful(manifest: Manifest) -> list[Weight]:
    """Returns the buffers that calls change, including the state of the random numbers."""
    return [weight for weight in manifest.weights if weight.memory == "state"]


def state(manifest: Manifest) -> list[str]:
    """Returns `2 buffers that calls change, 1.2 MiB in every session` and lines for the first buffers; [] without state."""
    hidden = {manifest.random, *[dimension.count for dimension in manifest.state_dimensions]}
    buffers = [weight for index, weight in enumerate(manifest.weights) if weight.memory == "state" and index not in hidden]
    total = sum(nbytes(weight.dtype, weight.shape) for weight in buffers)
    least = " at least" if manifest.state_dimensions else ""
    lines = [f"{count(len(buffers), 'buffer')} that calls change, {size(total)}{least} in every session"] if buffers else []
    rows = [
        f"{buffer.name}  {buffer.dtype} {shape(buffer.shape)}  {size(nbytes(buffer.dtype, buffer.shape))}" for buffer in buffers
    ]
    lines += [*first_lines(rows, 4), *state_rows(manifest)]
    return lines + ([f"{manifest.weights[manifest.random].name}: {RANDOM}"] if manifest.random is not None else [])


def state_rows(manifest: Manifest) -> list[str]:
    """Returns `pages: 9 rows or more, chosen by load(..., state={"pages": N}); at most 65 by default, 4.0 KiB each`."""
    lines = []
    for dimension in manifest.state_dimensions:
        rows = [manifest.weights[index] for index in dimension.weights]
        least = least_rows(dimension, manifest.weights)
        row = size(sum(nbytes(weight.dtype, weight.shape) for weight in rows) // least)
        most = f"at most {dimension.most} by default, " if dimension.most is not None else ""
        lines.append(
            f'{dimension.name}: {least} rows or more, chosen by load(..., state={{"{dimension.name}": N}}); {most}{row} each'
        )
    return lines


def donations(manifest: Manifest) -> list[tuple[str, str]]:
    """Returns (`prefill.hidden`, `decode.hidden`): an output, and the input that reads it in place."""
    rows = [(row, entry_named(manifest, row.source), entry_named(manifest, row.target)) for row in manifest.donations]
    return [
        (f"{row.source}.{source.outputs[row.output].name}", f"{row.target}.{target.inputs[row.input].name}")
        for row, source, target in rows
    ]


def donation_lines(manifest: Manifest) -> list[str]:
    """Returns the donations, and the bytes of the arena that are reserved for them; [] if there are none."""
    lines = [f"{source} -> {target}" for source, target in donations(manifest)]
    reserved = ", ".join([f"{row.entry} {size(row.bytes)}" for row in manifest.donated])
    return [*lines, *([f"reserved in the arena: {reserved}"] if reserved else [])]


def files(manifest: Manifest) -> Table:
    """Makes a row per file; a folder with many files is one row."""
    folders: dict[str, list[int]] = defaultdict(list)
    for file in manifest.files:
        folders[file.path.rpartition("/")[0]].append(file.bytes)
    many = {folder for folder, byte_counts in folders.items() if folder and len(byte_counts) > 3}
    shown = [(file.bytes, file.path) for file in manifest.files if file.path.rpartition("/")[0] not in many]
    rows = [(size(len(manifest_text.encode(manifest))), file_names.MANIFEST)]
    rows += [(size(number), f"{path}  {FILES[path]}" if path in FILES else path) for number, path in shown]
    rows += [(size(sum(folders[folder])), f"{folder}/ ({count(len(folders[folder]), 'file')})") for folder in sorted(many)]
    return table((">", ""), first_rows(rows, 1))


def serve_line(path: str, model: str) -> str:
    """Returns the command that serves the bundle of a language model.  `model`: as in `cgcompile build`, which
    converts a GGUF file to a folder beside the bundle."""
    converted = os.path.join(os.path.dirname(path), os.path.basename(model).removesuffix(".gguf"))
    folder = model if os.path.isdir(model) else converted if model.endswith(".gguf") else "FOLDER"
    return f"cgcompile serve {shlex.quote(path)} --tokenizer {shlex.quote(folder)}"


def load_lines(path: str, manifest: Manifest, entries: Sequence[EntrySpec] = ()) -> list[str]:
    """Returns Python code that loads the bundle and calls `entries`, by default all of them."""
    devices = f", devices={list(range(manifest.world.size))}" if manifest.world else ""
    lines = ["import cgbundle", f"program = cgbundle.load({path!r}{devices})"]
    assigned: dict[str, str] = {}  # an assignment that still holds is not repeated
    for entry in entries or manifest.entries:
        called = "program" if entry.name == FORWARD or len(manifest.entries) == 1 else attribute(entry.name)
        values = {line.partition(" = ")[0]: line for line in nested(entry)}
        lines += [line for name, line in values.items() if assigned.get(name) != line]
        assigned |= values
        lines.append(f"result = {called}({spelled(entry)})")
    return lines


def attribute(entry: str) -> str:
    """Returns `program.decode`, or `program["reset"]` if a loaded program has an attribute of that name."""
    from cgbundle.program import Program  # imported here, because few bundles have several entries

    return f"program[{entry!r}]" if hasattr(Program, entry) or entry in OWN_ATTRIBUTES else f"program.{entry}"
