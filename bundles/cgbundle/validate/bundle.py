"""Every invariant of a bundle, in one place: the compiler calls it before it publishes, the loader before it touches the device.

`check_manifest` is pure; `check_bundle` adds the files: their lengths always, their hashes as far as asked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..errors import BundleError, CgbundleError
from ..format import archive, safetensors
from ..format import pytree as structure
from ..format.extents import ELSEWHERE, graph_memories
from ..format.schema import CODE, DTYPES, MEMORIES, Dimension, Manifest, TensorSpec
from ..format.size_expressions import linear, names
from ..tensors.tensor import memory_order
from .lifetimes import check_recording
from .programs import check_programs, checked_extent
from .state import STATE, check_aliases, check_looks, check_state, check_state_exam
from .steps import require

LEVELS = ("load", "full")
"""How much `check_bundle` hashes: everything but the weights' data, or everything."""

CPU, CUDA = "cpu", "cuda"

KERNELS, HOST = "kernels/", "host/"
METHODS = ("replay", "interpret", "none")
SEVERITIES = ("refuse", "host", "note")


def check_bundle(path: str, manifest: Manifest, level: str = "load") -> None:
    """Raises the error of the first invariant that does not hold: manifest-invalid, file-damaged, weights-invalid, table-invalid."""
    check_manifest(manifest)
    archive.check_sizes(path, manifest)
    check_weights(path, manifest)
    if level == "full":
        check_exam(path, manifest)
    for file in manifest.files:
        if level == "full" or file.path != archive.WEIGHTS:
            archive.check_hash(path, file)
    if manifest.target.kind == CUDA:
        check_tables(path, manifest)
    if level == "full":
        archive.check_strangers(path, manifest)


def examine(path: str, manifest: Manifest) -> list[CgbundleError]:
    """Everything that is wrong with a bundle, file by file; [] when `check_bundle` with level "full" holds."""
    found: dict[str, CgbundleError] = {}

    def holds(check: Callable[..., None], *arguments: object) -> bool:
        try:
            check(*arguments)
        except BundleError as error:
            found.setdefault(str(error), error)
            return False
        return True

    if not holds(check_manifest, manifest):
        return list(found.values())
    broken = set()
    for file in manifest.files:
        if not (holds(archive.check_sizes, path, replace(manifest, files=(file,))) and holds(archive.check_hash, path, file)):
            broken.add(file.path)
    for name, check in ((archive.WEIGHTS, check_weights), (archive.EXAM, check_exam)):
        if name not in broken:
            holds(check, path, manifest)
    if not broken:
        holds(check_tables, path, manifest)
    for stranger in archive.strangers(path, manifest):
        holds(archive.check_strangers, path, manifest, (stranger,))
    return list(found.values())


def check_manifest(manifest: Manifest) -> None:
    """Raises manifest-invalid, with the path of the field, unless the manifest is sound in itself; file-damaged when it does not
    list a file that it needs."""
    _check_dimensions(manifest.dimensions)
    known = {dimension.name for dimension in manifest.dimensions}
    _check_specs("inputs", manifest.inputs, known)
    _check_specs("outputs", manifest.outputs, known)
    solved = {rule[0] for spec in manifest.inputs for size in spec.shape if (rule := linear(size))}
    for dimension in manifest.dimensions:
        require(dimension.name in solved, "dimensions", f"{dimension.name} is the size of no input's axis")
    _check_cuts(manifest)
    _check_written(manifest)
    structure.check_call(manifest.call, len(manifest.inputs))
    structure.check(manifest.result, "result", len(manifest.outputs))
    _check_target(manifest)
    _check_memories(manifest)
    _check_weights(manifest)
    _check_regions(manifest)
    check_state(manifest)
    check_aliases(manifest)
    check_programs(manifest)
    check_looks(manifest)
    _check_files(manifest)
    _check_exam_rows(manifest)
    for index, finding in enumerate(manifest.findings):
        require(finding.severity in SEVERITIES, f"findings[{index}].severity", f"unknown severity {finding.severity!r}")


def check_weights(path: str, manifest: Manifest) -> None:
    """Raises weights-invalid unless weights.safetensors is well formed and holds what the manifest names."""
    with open(os.path.join(path, archive.WEIGHTS), "rb") as file:
        entries = safetensors.read_header(file, archive.WEIGHTS)
    for weight in manifest.weights:
        entry = entries.get(weight.tensor)
        if entry is None:
            raise BundleError("weights-invalid", f"{archive.WEIGHTS}: tensor {weight.tensor!r} is missing")
        found = list(entry.shape)
        stored = [weight.shape[axis] for axis in memory_order(weight.shape, weight.strides)]
        same = sorted(found) == sorted(stored) and _without_ones(found) == _without_ones(stored)
        if entry.dtype != weight.dtype or not same:
            raise BundleError(
                "weights-invalid",
                f"{archive.WEIGHTS}: tensor {weight.tensor!r} is {entry.dtype} {found}, expected {weight.dtype} {stored}",
            )


def check_exam(path: str, manifest: Manifest) -> None:
    """Raises weights-invalid unless the exam holds every input and output of every int_key, what the inputs that a call changes hold
    after it, and nothing else."""
    with open(os.path.join(path, archive.EXAM), "rb") as file:
        entries = safetensors.read_header(file, archive.EXAM)
    expected = set()
    for program in manifest.programs:
        written = [(index, program.inputs[index]) for index in manifest.written]
        expected |= check_state_exam(manifest, program.key, entries)
        parts = (("input", enumerate(program.inputs)), ("output", enumerate(program.outputs)), ("written", written))
        for kind, positions in parts:
            for index, position in positions:
                name, value = archive.exam_entry(program.key, kind, index), program.values[position]
                expected.add(name)
                entry = entries.get(name)
                if entry is None:
                    raise BundleError("weights-invalid", f"{archive.EXAM}: tensor {name!r} is missing")
                if (entry.dtype, entry.shape) != (value.dtype, value.shape):
                    raise BundleError(
                        "weights-invalid",
                        f"{archive.EXAM}: tensor {name!r} is {entry.dtype} {list(entry.shape)}, "
                        f"expected {value.dtype} {list(value.shape)}",
                    )
    for name in sorted(entries.keys() - expected):
        raise BundleError("weights-invalid", f"{archive.EXAM}: tensor {name!r} belongs to no int_key")


def check_tables(path: str, manifest: Manifest) -> None:
    """Raises table-invalid unless every recording is sound and that of its program's key, and the module states are sound."""
    from ..tables import module_state as modulestates  # a cpu bundle has neither
    from ..tables import validation as tablecheck
    from ..tables.view import Table

    memories = graph_memories(manifest.memories)
    images = {file.path.removeprefix(KERNELS) for file in manifest.files if file.path.startswith(KERNELS)}
    for program in manifest.programs:
        for place, step in enumerate(program.steps):
            if step.kind != "graph":
                continue
            name = step.file
            table = Table(_read(path, name), name)
            tablecheck.check(table, name, memories, images)
            if tuple(table.key) != program.key:
                raise BundleError("table-invalid", f"{name}: key: {tuple(table.key)}, the manifest uses it for {program.key}")
            check_recording(program, place, table, name)
    if manifest.module_state:
        states = modulestates.decode_states(_read(path, manifest.module_state), manifest.module_state)
        modulestates.check_states(states, manifest.module_state, memories, images)


def _read(path: str, name: str) -> bytes:
    with open(os.path.join(path, name), "rb") as file:
        return file.read()


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _check_dimensions(dimensions: Sequence[Dimension]) -> None:
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
    """The inputs that a call changes: each once, and no call is padded or cut, since a part of the caller's tensor would be left as
    it was or be changed twice."""
    written = manifest.written
    require(list(written) == sorted(set(written)), "written", "not ascending, or a position stands twice")
    require(all(0 <= place < len(manifest.inputs) for place in written), "written", "no such input")
    for index, dimension in enumerate(manifest.dimensions):
        whole = not written or (dimension.pad == "no" and not dimension.chunk)
        require(whole, f"dimensions[{index}].pad", f"{dimension.name} is padded or cut, and calls write to their inputs")


def _check_exam_rows(manifest: Manifest) -> None:
    keys = [program.key for program in manifest.programs]
    require([proof.key for proof in manifest.exam.proofs] == keys, "exam.proofs", "do not match the programs")
    require(1 <= manifest.exam.calls <= 16, "exam.calls", f"{manifest.exam.calls} calls")
    require(manifest.exam.compare in ("bits", "tolerance"), "exam.compare", f"unknown comparison {manifest.exam.compare!r}")
    for index, proof in enumerate(manifest.exam.proofs):
        where = f"exam.proofs[{index}]"
        require(proof.method in METHODS, f"{where}.method", f"unknown method {proof.method!r}")
        require(proof.tolerance >= 0, f"{where}.tolerance", f"{proof.tolerance} is below 0")
        require(proof.error >= 0, f"{where}.error", f"{proof.error} is below 0")


def _check_target(manifest: Manifest) -> None:
    require(manifest.target.kind in (CPU, CUDA), "target.kind", f"unknown target {manifest.target.kind!r}")
    require(bool(manifest.target.arch), "target.arch", "empty")
    hosted = any(region.kind == "host" for region in manifest.regions)
    require(bool(manifest.target.torch) or not hosted, "target.torch", "empty: host regions run on torch's shared libraries")


def _check_memories(manifest: Manifest) -> None:
    seen = [name for name, _ in manifest.memories]
    require(len(set(seen)) == len(seen) and set(seen) <= {*MEMORIES, CODE}, "memories", f"unknown or double name in {seen}")
    for name, size in manifest.memories:
        require(size >= 0, f"memories.{name}", f"{size} bytes")


def _check_weights(manifest: Manifest) -> None:
    require(len({weight.name for weight in manifest.weights}) == len(manifest.weights), "weights", "a name stands twice")
    total = dict(manifest.memories).get("weights", 0)
    used = {weight for region in manifest.regions for _, weight in region.constants if region.kind == "host"}
    for index, weight in enumerate(manifest.weights):
        where = f"weights[{index}]"
        require(weight.dtype in DTYPES, f"{where}.dtype", f"unknown dtype {weight.dtype!r}")
        extent = checked_extent(where, weight.dtype, weight.shape, weight.strides)
        require(_is_packed(weight.shape, weight.strides), f"{where}.strides", "leave gaps or overlap")
        if weight.memory == STATE:
            continue  # check_state does
        require(weight.memory == "weights", f"{where}.memory", f"a weight in memory {weight.memory!r}")
        if manifest.target.kind == CUDA and weight.offset == ELSEWHERE:
            require(index in used, f"{where}.offset", "is not on the GPU, and no host region uses it")
        elif manifest.target.kind == CUDA:
            require(weight.offset % safetensors.ALIGNMENT == 0, f"{where}.offset", "is not aligned")
            require(weight.offset >= 0 and weight.offset + extent <= total, f"{where}.offset", "outside memory weights")


def _is_packed(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements lie without gaps or overlaps, in whatever order of the axes."""
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != step and 0 not in shape:
            return False
        step *= size
    return True


def _check_regions(manifest: Manifest) -> None:
    for index, region in enumerate(manifest.regions):
        where = f"regions[{index}]"
        require(region.kind in ("graph", "host"), f"{where}.kind", f"unknown kind {region.kind!r}")
        require((region.kind == "host") == bool(region.file), f"{where}.file", "a host region has a file, a graph region none")
        require(region.kind == "graph" or region.file.startswith(HOST), f"{where}.file", f"a shared object outside {HOST}")
        for place, (_, weight) in enumerate(region.constants):
            require(0 <= weight < len(manifest.weights), f"{where}.constants[{place}]", f"no weight {weight}")
        require(len({name for name, _ in region.constants}) == len(region.constants), f"{where}.constants", "a name stands twice")


def _check_files(manifest: Manifest) -> None:
    paths = [file.path for file in manifest.files]
    require(len(set(paths)) == len(paths), "files", "a path stands twice")
    for index, file in enumerate(manifest.files):
        where = f"files[{index}]"
        parts = file.path.split("/")
        plain = all(part not in ("", ".", "..") for part in parts) and "\\" not in file.path and file.path.isprintable()
        require(plain and file.path != archive.MANIFEST, f"{where}.path", f"{file.path[:60]!r} is no path inside the bundle")
        require(file.bytes >= 0, f"{where}.bytes", f"{file.bytes}")
        digits = len(file.sha256) == 64 and set(file.sha256) <= set("0123456789abcdef")
        require(digits, f"{where}.sha256", "is no SHA-256 in lower-case hexadecimal")
        if file.path.startswith(KERNELS):
            require(file.path == KERNELS + file.sha256, f"{where}.path", "a kernel image is not named by its SHA-256")
    needed = {archive.WEIGHTS, archive.EXAM, archive.PROGRAM}
    needed |= {region.file for region in manifest.regions if region.file}
    needed |= {step.file for program in manifest.programs for step in program.steps if step.file}
    needed |= {manifest.module_state} - {""}
    for path in sorted(needed - set(paths)):
        raise BundleError("file-damaged", f"{path}: the manifest needs it and does not list it")
