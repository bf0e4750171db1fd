"""Checks of a manifest as a whole, and of the signatures of its entries. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from ..errors import BundleError
from ..format import file_names, limits, pytree
from ..format.file_names import FORWARD, NEAR_TIES, WAIVER, host_regions, is_exact, self_test_tensors
from ..format.safetensors import ALIGNMENT
from ..format.schema import HOST, KERNEL_CODE, MEMORIES, STATE, Dimension, EntrySpec, Manifest, TensorSpec, Weight
from ..format.shapes import linear, names, span
from . import require, require_apart, require_whole_calls
from .programs import check_programs, check_size_evaluations, checked_span


def check_manifest(manifest: Manifest) -> None:
    """Raises manifest-invalid unless the manifest is valid in itself, file-damaged if it does not list a file that it needs."""
    if manifest.engine is not None:
        from .engine import check_engine  # few bundles are of an engine's graphs

        check_engine(manifest)
    else:
        _check_entries(manifest)
    _of_entries(check_signature, manifest.entries)
    target, hosted = manifest.target, any(region.kind == "host" for region in manifest.regions)
    require(bool(target.arch), "target.arch", "empty")
    require(not target.level or target.kind == "cpu", "target.level", "a bundle for a GPU has none")
    alone = target.kind == "cpu" or not hosted
    require(alone or bool(target.torch), "target.torch", "empty: host regions beside a GPU run on torch's libraries")
    check_memories(manifest)
    _check_regions(manifest)
    lasting = manifest.donations or manifest.donated or any(row.memory == STATE for row in manifest.weights)
    lasting = lasting or manifest.random is not None or any(row.aliases or row.mutated_buffers for row in manifest.entries)
    lasting = bool(lasting or manifest.state_dimensions)
    if lasting:
        from .state import check_state  # few models keep state, alias outputs or have donations

        check_state(manifest)
    check_frozen(manifest)
    check_computed(manifest)
    _of_entries(partial(_check_calls, manifest, lasting), manifest.entries)
    if lasting:
        from .state import check_donations, check_state_dimensions

        check_donations(manifest)
        if manifest.state_dimensions:
            check_state_dimensions(manifest)
    owners: dict[int, str] = {}  # a shared object or a recording is compiled for the signature of one entry
    for entry in manifest.entries:
        for region in host_regions(entry):
            owner = owners.setdefault(region, entry.name)
            require(owner == entry.name, f"regions[{region}]", f"is of two entries, {owner!r} and {entry.name!r}")
    _check_files(manifest)
    _of_entries(partial(check_self_test_rows, manifest), manifest.entries)


def _of_entries(check: Callable[[EntrySpec], None], entries: Sequence[EntrySpec]) -> None:
    for index, entry in enumerate(entries):
        try:
            check(entry)
        except BundleError as error:
            raise BundleError(error.code, f"entries[{index}].{error}", error.hint) from None


def _check_calls(manifest: Manifest, lasting: bool, entry: EntrySpec) -> None:
    if lasting:
        from .state import check_alias_spans, check_aliases, check_changes

        check_changes(manifest, entry)
        check_aliases(manifest, entry)
    check_programs(manifest, entry)
    if lasting:
        check_alias_spans(manifest, entry)


def _check_entries(manifest: Manifest) -> None:
    """Names are unique identifiers; `forward` is the first."""
    names = [entry.name for entry in manifest.entries]
    require(1 <= len(names) <= limits.ENTRIES, "entries", f"{len(names)}, expected 1 to {limits.ENTRIES}")
    for index, name in enumerate(names):
        where = f"entries[{index}].name"
        require(name.isidentifier(), where, f"{name!r} is no name")
        require(name not in names[:index], where, f"{name!r} occurs twice")
        require(name != FORWARD or not index, where, f"{FORWARD!r} is not the first entry")
    check_size_evaluations(manifest.entries)


def _check_regions(manifest: Manifest) -> None:
    for index, region in enumerate(manifest.regions):
        where = f"regions[{index}]"
        require((region.kind == "host") == bool(region.file), f"{where}.file", "a host region has a file, a graph region none")
        inside = region.kind == "graph" or region.file.startswith(file_names.HOST)
        require(inside, f"{where}.file", f"a shared object outside {file_names.HOST}")
        for place, (_, weight) in enumerate(region.constants):
            require(0 <= weight < len(manifest.weights), f"{where}.constants[{place}]", f"no weight {weight}")
        require(len({name for name, _ in region.constants}) == len(region.constants), f"{where}.constants", "a name occurs twice")
    files = [region.file for region in manifest.regions if region.file]
    require(len(set(files)) == len(files), "regions", "two of them have one shared object")


def _check_files(manifest: Manifest) -> None:
    paths = [file.path for file in manifest.files]
    require(len(set(paths)) == len(paths), "files", "a path occurs twice")
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
    """Raises manifest-invalid unless every program has its proof and the self-test can be run."""
    self_test, compared = entry.self_test, self_test_tensors(manifest, entry)
    keys = [program.key for program in entry.programs]
    require([proof.key for proof in self_test.proofs] == keys, "self_test.proofs", "do not match the programs")
    require(1 <= self_test.calls <= 16, "self_test.calls", f"{self_test.calls} calls")
    require(len(self_test.bounds) == len(compared), "self_test.bounds", f"{len(self_test.bounds)} for {len(compared)} tensors")
    tied = self_test.compare == "tolerance" and any(finding.rule == NEAR_TIES for finding in entry.findings)
    for index, (tensor, bound) in enumerate(zip(compared, self_test.bounds, strict=True)):
        fits = bound == 0 or not is_exact(tensor.dtype) or (bound <= 1 and (WAIVER in manifest.allowed or tied))
        require(fits, f"self_test.bounds[{index}]", f"{tensor.title} has to be equal, got {bound}")
    for index, proof in enumerate(self_test.proofs):
        where = f"self_test.proofs[{index}]"
        require(len(proof.errors) in (0, len(self_test.bounds)), f"{where}.errors", "are not one per bound")
        fits = proof.distance == 0 or self_test.expected == "recording"
        require(fits, f"{where}.distance", f"{proof.distance} of no recording")


# --- signatures of calls: dimensions, inputs and outputs, and which calls may be chunked or padded ------------------------


def check_signature(entry: EntrySpec) -> None:
    _check_dimensions(entry.dimensions)
    known = {dimension.name for dimension in entry.dimensions}
    _check_specs("inputs", entry.inputs, known)
    _check_specs("outputs", entry.outputs, known)
    solved = {rule[0] for spec in entry.inputs for size in spec.shape if (rule := linear(size))}
    for dimension in entry.dimensions:
        require(dimension.name in solved, "dimensions", f"{dimension.name} is the size of no input's axis")
    _check_chunks(entry)
    mutated, rows = entry.mutated_inputs, entry.parameters
    require(list(mutated) == sorted(set(mutated)), "mutated_inputs", "not ascending, or a position occurs twice")
    require(all(0 <= place < len(entry.inputs) for place in mutated), "mutated_inputs", "no such input")
    if mutated:  # a part of the caller's tensor would stay unchanged, or be changed twice
        require_whole_calls(entry, "calls write to their inputs")
    pytree.check_call(entry.call, len(entry.inputs))
    require(len(rows) == len(entry.call["call"]), "parameters", "are not those of the call")
    for index, parameter in enumerate(rows):
        if parameter.default is not None:
            pytree.check(parameter.default, f"parameters[{index}].default", 0)
        late = index and rows[index - 1].keyword and not parameter.keyword
        require(not late, f"parameters[{index}].keyword", "a parameter by position follows one by name")
    _check_data_sizes(entry)
    pytree.check(entry.result, "result", len(entry.outputs) - len({row.count for row in entry.data_sizes}))


def _check_dimensions(dimensions: Sequence[Dimension]) -> None:
    require(len(dimensions) <= limits.DIMENSIONS, "dimensions", f"{len(dimensions)}, more than the limit of {limits.DIMENSIONS}")
    require(len({dimension.name for dimension in dimensions}) == len(dimensions), "dimensions", "a name occurs twice")
    for index, dimension in enumerate(dimensions):
        where = f"dimensions[{index}]"
        require(dimension.name.isidentifier(), f"{where}.name", f"{dimension.name!r} is no name")
        require(bool(dimension.sizes), f"{where}.sizes", "no size")
        require(list(dimension.sizes) == sorted(set(dimension.sizes)), f"{where}.sizes", "not ascending")
        require(dimension.sizes[0] >= 1, f"{where}.sizes", f"{dimension.sizes[0]} is below 1")


def _check_specs(where: str, specs: Sequence[TensorSpec], known: set[str]) -> None:
    require(len({spec.name for spec in specs}) == len(specs), where, "a name occurs twice")
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


def _check_chunks(entry: EntrySpec) -> None:
    """Chunks can be separated in every input and joined in every output."""
    for index, dimension in enumerate(entry.dimensions):
        if dimension.chunk:
            for kind, specs in (("inputs", entry.inputs), ("outputs", entry.outputs)):
                for place, spec in enumerate(specs):
                    rules = [linear(size) for size in spec.shape if dimension.name in names(size)]
                    whole = all(rule is not None and rule[2] == 0 for rule in rules) and (len(rules) == 1 or kind == "inputs")
                    require(whole, f"dimensions[{index}].chunk", f"{kind}[{place}] cannot be chunked along {dimension.name}")


def _check_data_sizes(entry: EntrySpec) -> None:
    """Axes are unique; counts are scalar int64 after the model's outputs. Calls are not padded or chunked: that changes the
    data."""
    rows, outputs = entry.data_sizes, entry.outputs
    places = [(row.output, row.axis) for row in rows]
    require(places == sorted(set(places)), "data_sizes", "not ascending, or an axis occurs twice")
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


# --- memories and weights ------------------------------------------------------------------------------------------------


WORLDS = range(2, 9)  # numbers of ranks: hosts with NVLink have at most eight GPUs
CONSTANT, FOLDED, BAKED = "constant", "folded", "baked"  # reasons that a weight is frozen
GRANULARITY = 2 << 20  # bytes: the driver's unit of memory that several GPUs may write to


def check_memories(manifest: Manifest) -> None:
    """Raises manifest-invalid unless memories, the world and weights are valid: see `check_world`, `check_weight_rows`."""
    names = [name for name, _ in manifest.memories]
    require(
        len(set(names)) == len(names) and set(names) <= {*MEMORIES, KERNEL_CODE}, "memories", f"unknown or double name in {names}"
    )
    check_world(manifest)
    check_weight_rows(manifest)


def check_world(manifest: Manifest) -> None:
    """Raises manifest-invalid unless a rank's bundle is for GPUs, with a part of memory peer for each rank."""
    peer = dict(manifest.memories).get("peer")
    world = manifest.world
    if world is None:
        require(peer is None, "memories.peer", "a bundle for one device has none")
        return
    require(manifest.target.kind == "cuda", "world", "the ranks of a model are GPUs")
    require(world.size in WORLDS, "world.size", f"{world.size}, expected {WORLDS[0]} to {WORLDS[-1]}")
    require(0 <= world.rank < world.size, "world.rank", f"{world.rank} of {world.size}")
    require(world.stride > 0 and not world.stride % GRANULARITY, "world.stride", f"no multiple of {GRANULARITY}")
    for name, at, size in (("status", world.status, 4), ("limit", world.limit, 8)):
        inside = 0 <= at <= world.stride - size and not at % size
        require(inside, f"world.{name}", f"{at} is no place of {size} bytes in {world.stride}")
    require(peer == world.size * world.stride, "memories.peer", f"{peer}, {world.size} parts of {world.stride} bytes are expected")
    hosted = next((index for index, region in enumerate(manifest.regions) if region.kind == "host"), None)
    require(hosted is None, f"regions[{hosted}]", "a bundle over several GPUs has no operations on the host")
    require(not (manifest.donations or manifest.module_state), "world", "must be absent: the bundle has donations or module state")


def check_weight_rows(manifest: Manifest) -> None:
    """Raises manifest-invalid unless each weight is dense and at its own place; tied weights share one."""
    require(len({weight.name for weight in manifest.weights}) == len(manifest.weights), "weights", "a name occurs twice")
    positions = {weight for region in manifest.regions for _, weight in region.constants if region.kind == "host"}
    used = {weight.tensor for index, weight in enumerate(manifest.weights) if index in positions}
    for index, weight in enumerate(manifest.weights):
        where = f"weights[{index}]"
        checked_span(where, weight)
        require(_is_packed(weight.shape, weight.strides), f"{where}.strides", "leave gaps or overlap")
        require(not weight.zeros or weight.memory == STATE, f"{where}.zeros", "of a weight that is no state")
        if weight.memory == STATE:
            continue  # `check_state` checks it
        if manifest.target.kind == "cpu":
            require(weight.memory == "weights", f"{where}.memory", "a weight of the cpu target beside its memory")
            require(weight.offset == 0, f"{where}.offset", "a weight of the cpu target lies where the file has it")
        elif weight.memory == HOST:
            require(weight.tensor in used, f"{where}.memory", "is not on the GPU, and no host region uses it")
            require(weight.offset == 0, f"{where}.offset", "a weight of the host lies where the file has it")
        else:
            require(weight.offset % ALIGNMENT == 0, f"{where}.offset", "is not aligned")
    _check_ties(manifest.weights)
    _check_places(manifest)


def check_computed(manifest: Manifest) -> None:
    """Raises manifest-invalid unless `computed` weights are on a GPU, not tied, and read by no host region."""
    read = {weight for region in manifest.regions for _, weight in region.constants}
    computed = [(index, weight) for index, weight in enumerate(manifest.weights) if weight.computed]
    users = Counter([weight.tensor for weight in manifest.weights]) if computed else {}
    for index, row in computed:
        where = f"weights[{index}].computed"
        there = manifest.target.kind == "cuda" and row.memory == "weights"
        require(there and index not in read, where, f"{row.name!r} is not read by a GPU alone")
        require(users[row.tensor] == 1, where, f"{row.tensor!r} is another weight's, too")


def check_frozen(manifest: Manifest) -> None:
    """Raises manifest-invalid unless `frozen` are ascending weights with reasons that fit their memories."""
    positions = [row.weight for row in manifest.frozen]
    for place, row in enumerate(manifest.frozen):
        where = f"frozen[{place}]"
        ascends = row.weight > (positions[place - 1] if place else -1)
        require(ascends and row.weight < len(manifest.weights), f"{where}.weight", "is no weight, or not ascending")
        kept = manifest.weights[row.weight].memory == STATE
        fits = (row.reason == STATE) == kept
        require(fits, f"{where}.reason", f"{row.reason!r} of a weight of memory {manifest.weights[row.weight].memory}")
        require(bool(row.where) == (row.reason == BAKED), f"{where}.where", f"{row.where!r} of a weight that is {row.reason}")


def _check_ties(weights: Sequence[Weight]) -> None:
    """A tensor has the name of one of its weights, so that no weight can get another's contents in another layout."""
    owners = {weight.name: weight for weight in weights}
    for index, weight in enumerate(weights):
        owner = owners.get(weight.tensor)
        if owner is weight:
            continue
        where = f"weights[{index}]"
        known = owner is not None and owner.tensor == weight.tensor
        require(known, f"{where}.tensor", f"{weight.tensor[:80]!r} is the name of no weight that lies there")
        assert owner is not None
        layout, other = [(row.dtype, row.shape, row.strides, row.memory == STATE) for row in (weight, owner)]
        require(layout == other, where, f"is laid out otherwise than {owner.name!r}, the same tensor")
        apart = HOST in (weight.memory, owner.memory)
        require(apart or weight.offset == owner.offset, f"{where}.offset", f"lies elsewhere than {owner.name!r}, the same tensor")


def _check_places(manifest: Manifest) -> None:
    """Tensors are inside their memory and do not overlap."""
    memories = dict(manifest.memories)
    rows = {row.tensor: (index, row) for index, row in enumerate(manifest.weights) if row.memory != HOST}.values()
    if manifest.target.kind == "cpu":
        sizes = {"weights": sum(span(row) for _, row in rows if row.memory == "weights")}
        ends = [row.offset + span(row) for _, row in rows if row.memory == STATE]
        sizes |= {STATE: max(ends)} if ends else {}
        fits = {name: size for name, size in memories.items() if size or name in sizes} == sizes
        require(fits, "memories", f"{memories}, the weights make {sizes}")
        return
    ranges = [(row.offset, row.offset + span(row), f"weights[{at}].offset") for at, row in rows if row.memory == "weights"]
    for _, end, where in sorted(ranges):
        require(end <= memories.get("weights", 0), where, "outside memory weights")
    require_apart(ranges, "overlaps another weight")


def _is_packed(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements have no gaps or overlaps in some order of the axes."""
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != step and 0 not in shape:
            return False
        step *= size
    return True
