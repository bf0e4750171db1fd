"""A manifest as a whole, and the signatures of its entries; pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..errors import BundleError
from ..format import file_names, limits, pytree
from ..format.file_names import FORWARD, host_regions
from ..format.schema import STATE, Dimension, EntrySpec, Manifest, TensorSpec
from ..format.size_expressions import linear, names
from ..tensors.self_test_tensors import NEAR_TIES, WAIVER, is_exact, self_test_tensors
from . import require, require_whole_calls
from .memories import check_computed, check_frozen, check_memories, check_weight_rows, check_world
from .programs import check_programs, check_size_evaluations


def check_manifest(manifest: Manifest) -> None:
    """Raises manifest-invalid unless the manifest is sound in itself, file-damaged when it does not list a file that it needs."""
    if manifest.engine is not None:
        from .engine import check_engine  # few bundles are of an engine's graphs

        check_engine(manifest)
    else:
        _check_entries(manifest)
    _of_entries(check_signature, manifest.entries)
    _check_target(manifest)
    check_memories(manifest)
    check_world(manifest)
    check_weight_rows(manifest)
    _check_regions(manifest)
    if lasting := _has_lasting(manifest):
        from .state import check_state  # few models keep state, alias outputs or have donations

        check_state(manifest)
    check_frozen(manifest)
    check_computed(manifest)
    _of_entries(partial(_check_calls, manifest, lasting), manifest.entries)
    if lasting:
        from .state import check_donations

        check_donations(manifest)
    if manifest.state_dimensions:
        from .state import check_state_dimensions

        check_state_dimensions(manifest)
    _check_owners(manifest)
    _check_files(manifest)
    _of_entries(partial(check_self_test_rows, manifest), manifest.entries)


def _of_entries(check: Callable[[EntrySpec], None], entries: Sequence[EntrySpec]) -> None:
    """A check of every entry; errors name its field of the manifest."""
    for index, entry in enumerate(entries):
        try:
            check(entry)
        except BundleError as error:
            raise BundleError(error.code, f"entries[{index}].{error}", error.hint) from None


def _has_lasting(manifest: Manifest) -> bool:
    """Whether there is anything that state.py has invariants of."""
    several = manifest.donations or manifest.donated or any(row.memory == STATE for row in manifest.weights)
    return bool(several) or manifest.random is not None or any(entry.aliases or entry.mutated_buffers for entry in manifest.entries)


def _check_calls(manifest: Manifest, lasting: bool, entry: EntrySpec) -> None:
    if lasting:
        from .state import check_alias_spans, check_aliases, check_changes

        check_changes(manifest, entry)
        check_aliases(manifest, entry)
    check_programs(manifest, entry)
    if lasting:
        check_alias_spans(manifest, entry)


def _check_entries(manifest: Manifest) -> None:
    """Every entry has a name of its own.  One that is called `forward` is the first."""
    names = [entry.name for entry in manifest.entries]
    require(1 <= len(names) <= limits.ENTRIES, "entries", f"{len(names)}, expected 1 to {limits.ENTRIES}")
    for index, name in enumerate(names):
        where = f"entries[{index}].name"
        require(name.isidentifier(), where, f"{name!r} is no name")
        require(name not in names[:index], where, f"{name!r} stands twice")
        require(name != FORWARD or not index, where, f"{FORWARD!r} is not the first entry")
    check_size_evaluations(manifest.entries)


def _check_owners(manifest: Manifest) -> None:
    """A shared object, and the graphs of a recording, are one entry's: they say how they are called."""
    owners: dict[int, str] = {}
    for entry in manifest.entries:
        for region in host_regions(entry):
            taken = owners.setdefault(region, entry.name)
            require(taken == entry.name, f"regions[{region}]", f"is of two entries, {taken!r} and {entry.name!r}")


def _check_target(manifest: Manifest) -> None:
    require(bool(manifest.target.arch), "target.arch", "empty")
    require(not manifest.target.level or manifest.target.kind == "cpu", "target.level", "a bundle for a GPU has none")
    hosted = any(region.kind == "host" for region in manifest.regions)
    beside = hosted and manifest.target.kind == "cuda"
    require(bool(manifest.target.torch) or not beside, "target.torch", "empty: host regions beside a GPU run on torch's libraries")


def _check_regions(manifest: Manifest) -> None:
    for index, region in enumerate(manifest.regions):
        where = f"regions[{index}]"
        require((region.kind == "host") == bool(region.file), f"{where}.file", "a host region has a file, a graph region none")
        require(
            region.kind == "graph" or region.file.startswith(file_names.HOST),
            f"{where}.file",
            f"a shared object outside {file_names.HOST}",
        )
        for place, (_, weight) in enumerate(region.constants):
            require(0 <= weight < len(manifest.weights), f"{where}.constants[{place}]", f"no weight {weight}")
        require(len({name for name, _ in region.constants}) == len(region.constants), f"{where}.constants", "a name stands twice")
    files = [region.file for region in manifest.regions if region.file]
    require(len(set(files)) == len(files), "regions", "two of them have one shared object")


def _check_files(manifest: Manifest) -> None:
    paths = [file.path for file in manifest.files]
    require(len(set(paths)) == len(paths), "files", "a path stands twice")
    for index, file in enumerate(manifest.files):
        where = f"files[{index}]"
        parts = file.path.split("/")
        plain = file.path.isprintable() and "\\" not in file.path
        plain = plain and all(part not in ("", ".", "..") and len(part.encode()) <= limits.PATH_PART for part in parts)
        reserved = file.path in (file_names.MANIFEST, file_names.SIGNATURE)
        require(plain and not reserved, f"{where}.path", f"{file.path[:60]!r} is no path inside the bundle")
        if file.path.startswith(file_names.KERNELS):
            require(file.path == file_names.KERNELS + file.sha256, f"{where}.path", "a kernel image is not named by its SHA-256")
    within = {folder for path in paths for folder in file_names.folders(path)}
    both = sorted(within.intersection((*paths, file_names.MANIFEST, file_names.SIGNATURE)))
    require(not both, "files", f"{''.join(both[:1])!r} is a file and a folder")
    tables = {*file_names.recordings(manifest), manifest.module_state}
    for index, file in enumerate(manifest.files):
        small = file.bytes <= limits.TABLE_BYTES or file.path not in tables
        require(small, f"files[{index}].bytes", f"a table of {file.bytes} bytes, more than the limit of {limits.TABLE_BYTES}")
    needed = {*file_names.weight_files(manifest), *file_names.program_files(manifest)}
    needed |= {file_names.SELF_TEST} if manifest.engine is None else set()
    needed |= {region.file for region in manifest.regions if region.file}
    needed |= tables - {""}
    for path in sorted(needed - set(paths)):
        raise BundleError("file-damaged", f"{path}: the manifest needs it and does not list it")


def check_self_test_rows(manifest: Manifest, entry: EntrySpec) -> None:
    """Raises manifest-invalid unless every program has its proof and the self-test can be taken."""
    keys = [program.key for program in entry.programs]
    require([proof.key for proof in entry.self_test.proofs] == keys, "self_test.proofs", "do not match the programs")
    require(1 <= entry.self_test.calls <= 16, "self_test.calls", f"{entry.self_test.calls} calls")
    _check_bounds(manifest, entry)
    for index, proof in enumerate(entry.self_test.proofs):
        where = f"self_test.proofs[{index}]"
        require(len(proof.errors) in (0, len(entry.self_test.bounds)), f"{where}.errors", "are not one per bound")
        recorded = entry.self_test.expected == "recording"
        require(proof.distance == 0 or recorded, f"{where}.distance", f"{proof.distance} of no recording")


def _check_bounds(manifest: Manifest, entry: EntrySpec) -> None:
    self_test, compared = entry.self_test, self_test_tensors(manifest, entry)
    require(len(self_test.bounds) == len(compared), "self_test.bounds", f"{len(self_test.bounds)} for {len(compared)} tensors")
    tied = self_test.compare == "tolerance" and any(finding.rule == NEAR_TIES for finding in entry.findings)
    for index, (tensor, bound) in enumerate(zip(compared, self_test.bounds, strict=True)):
        accepted = bound == 0 or (bound <= 1 and (WAIVER in manifest.allowed or tied))
        require(
            not is_exact(tensor.dtype) or accepted, f"self_test.bounds[{index}]", f"{tensor.title} has to be equal, got {bound}"
        )


# --- signatures of calls: dimensions, inputs and outputs, and which calls may be cut or padded ----------------------------


def check_signature(entry: EntrySpec) -> None:
    """Raises manifest-invalid unless the signature is sound in itself."""
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
    model_outputs = len(outputs) - len(counts)
    require(counts == list(range(model_outputs, len(outputs))), "data_sizes", "the counts are not the last outputs")
    for index, row in enumerate(rows):
        where = f"data_sizes[{index}]"
        require(row.output < model_outputs and row.axis < len(outputs[row.output].shape), where, "no such axis of an output")
        count = outputs[row.count]
        require(count.dtype == "int64" and not count.shape, f"{where}.count", f"{count.name!r} is not an int64 of no axes")
    shared = {alias.output for alias in entry.aliases}
    require(not shared & {*counts, *[row.output for row in rows]}, "data_sizes", "an output that shares memory")
    if rows:
        require_whole_calls(entry, "the sizes of outputs depend on data")


def _check_parameters(entry: EntrySpec) -> None:
    """A parameter for every argument of the call, those by name last, and defaults that are constants."""
    rows = entry.parameters
    require(len(rows) == len(entry.call["call"]), "parameters", "are not those of the call")
    for index, parameter in enumerate(rows):
        if parameter.default is not None:
            pytree.check(parameter.default, f"parameters[{index}].default", 0)
        late = index and rows[index - 1].keyword and not parameter.keyword
        require(not late, f"parameters[{index}].keyword", "a parameter by position follows one by name")
