"""Compares two manifests.

Rows are matched by name, values and steps by position.  Before the comparison, references by number are replaced by names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from cgbundle.format import file_names
from cgbundle.format.file_names import FORWARD
from cgbundle.format.pytree import recorded_constant
from cgbundle.format.safetensors import ALIGNMENT
from cgbundle.format.schema import Alias, EntrySpec, Manifest, Program, Proof, Value, Weight
from cgbundle.format.shapes import dense

from .differences import ROW_MAJOR, Difference, Row, as_row, compare_fields, compare_rows, unique_names, value_text

ELSEWHERE = frozenset({
    "target", "entries", "random", "weights", "frozen", "memories", "regions", "module_state", "donations", "donated", "allowed",
    "state_dimensions", "engine", "provenance", "files",
})  # fmt: skip
"""Manifest fields with a comparison below or in other modules.  All other fields, also those of a later format, are compared
directly."""

Pair = tuple[EntrySpec, EntrySpec]
"""The entries of one name in both bundles."""

MEASURED = ("error", "errors", "distance")
"""Measured fields of a proof; their last digits may differ between two builds of one model."""


def compare(a: Manifest, b: Manifest) -> Iterator[Difference]:
    """Yields the differences of two manifests, part by part and entry by entry."""
    both = (a, b)
    pairs = common_entries(a, b)
    yield from compare_fields("bundle", "", *[as_row(manifest, *ELSEWHERE) for manifest in both])
    yield from compare_fields("target", "", *[as_row(manifest.target, "features") for manifest in both])
    yield from _sets("target", "features", a.target.features, b.target.features)
    yield from _sets("signature", "entries", *[[entry.name for entry in manifest.entries] for manifest in both])
    yield from _sets("signature", "donations", *[_donations(manifest) for manifest in both])
    yield from compare_fields("signature", "", *[{"random numbers": _weight_name(manifest, manifest.random)} for manifest in both])
    yield from compare_fields("signature", "", *[_state_rows(manifest) for manifest in both])
    yield from _engine(a, b)
    for pair in pairs:
        yield from _with_entry_name(pair, _signature(both, pair))
        per_size = [file_names.per_size(manifest, entry) for manifest, entry in zip(both, pair, strict=True)]
        exported = [{"exported": "per size" if is_per_size else "dynamic"} for is_per_size in per_size]
        yield from _with_entry_name(pair, compare_fields("sizes", "", *exported))
        sizes = [{dimension.name: as_row(dimension, "name") for dimension in entry.dimensions} for entry in pair]
        yield from _with_entry_name(pair, compare_rows("sizes", *sizes))
    yield from _memory(a, b)
    yield from compare_rows("weights", *[_weights(manifest) for manifest in both])
    yield from _regions(a, b)
    for pair in pairs:
        yield from _steps(both, pair)
        findings = [unique_names([(finding.rule, as_row(finding, "rule")) for finding in entry.findings]) for entry in pair]
        yield from _with_entry_name(pair, compare_rows("findings", *findings))
        yield from _with_entry_name(pair, _proofs(*pair))
    yield from _sets("findings", "allowed", a.allowed, b.allowed)
    yield from compare_fields("versions", "", *[dict(manifest.provenance.versions) for manifest in both])
    yield from compare_fields("options", "", *[dict(manifest.provenance.options) for manifest in both])


def _engine(a: Manifest, b: Manifest) -> Iterator[Difference]:
    """Compares an engine's graphs by key and its tensors by name."""
    engines = [manifest.engine for manifest in (a, b)]
    yield from _sets("signature", "graphs", *[[graph.key for graph in engine.graphs] if engine else [] for engine in engines])
    rows = [{row.name: as_row(row, "name") for row in engine.tensors} if engine else {} for engine in engines]
    yield from compare_rows("signature", *rows, ordered=False)
    yield from compare_fields("signature", "", *[{"verified": engine.verified} if engine else {} for engine in engines])


def variants(a: Sequence[str], b: Sequence[str]) -> Iterator[Difference]:
    """Compares the names of two bundles' variants."""
    yield from _sets("target", "variants", a, b)


def key_text(entry: EntrySpec, key: Sequence[int]) -> str:
    """Formats an int_key: `batch=8, seq=128`."""
    text = ", ".join([f"{dimension.name}={size}" for dimension, size in zip(entry.dimensions, key, strict=True)]) or "no dimensions"
    return text if entry.name == FORWARD else f"{entry.name}: {text}"


def common_entries(a: Manifest, b: Manifest) -> list[Pair]:
    """Returns the entries that both manifests have."""
    theirs = {entry.name: entry for entry in b.entries}
    return [(entry, theirs[entry.name]) for entry in a.entries if entry.name in theirs]


def _with_entry_name(pair: Pair, differences: Iterator[Difference]) -> Iterator[Difference]:
    """Adds the entry's name to the names of its differences, unless it is `forward`."""
    entry = pair[0].name
    for difference in differences:
        labelled = difference if entry == FORWARD else replace(difference, name=": ".join(filter(None, [entry, difference.name])))
        yield labelled


def common_programs(a: EntrySpec, b: EntrySpec) -> list[tuple[str, Program, Program]]:
    """Returns the programs of the int_keys that both entries have, with the key as text.  The part `sizes` reports other keys."""
    theirs = {program.key: program for program in b.programs}
    return [(key_text(a, mine.key), mine, theirs[mine.key]) for mine in a.programs if mine.key in theirs]


def step_regions(manifest: Manifest, program: Program) -> list[str]:
    """Returns the name of every step's region, "" for a copy."""
    return ["" if step.kind == "copy" else manifest.regions[step.region].name for step in program.steps]


# --- parts ------------------------------------------------------------------------------------------------------


def _sets(part: str, name: str, a: Sequence[str], b: Sequence[str]) -> Iterator[Difference]:
    removed, added = sorted(set(a) - set(b)), sorted(set(b) - set(a))
    texts = [f"only in {side}: {', '.join(names)}" for side, names in (("A", removed), ("B", added)) if names]
    if texts or tuple(a) != tuple(b):
        yield Difference(part=part, name=name, note="; ".join(texts) or f"{value_text(a)} -> {value_text(b)}")


def _signature(both: tuple[Manifest, Manifest], pair: Pair) -> Iterator[Difference]:
    sides = list(zip(both, pair, strict=True))
    for side in ("input", "output"):
        yield from compare_rows("signature", *[_specs(manifest, entry, side) for manifest, entry in sides])
    trees = [{"call": entry.call, "result": entry.result} for entry in pair]
    for name, label in (("call", "nesting of the inputs"), ("result", "nesting of the outputs")):
        texts = [json.dumps(tree[name], separators=(",", ":")) for tree in trees]
        yield from compare_fields("signature", "", {label: texts[0]}, {label: texts[1]})
    yield from compare_fields("signature", "", *[{"parameters": _parameters(entry)} for entry in pair])
    mutated = [tuple([_weight_name(manifest, index) for index in entry.mutated_buffers]) for manifest, entry in sides]
    yield from compare_fields("signature", "", *[{"mutated buffers": names} for names in mutated])


def _state_rows(manifest: Manifest) -> dict[str, object]:
    return {
        f"rows of state {dimension.name}": (manifest.weights[dimension.weights[0]].shape[0], dimension.most)
        for dimension in manifest.state_dimensions
    }


def _donations(manifest: Manifest) -> list[str]:
    by_name = {entry.name: entry for entry in manifest.entries}
    return [
        f"{row.source}.{by_name[row.source].outputs[row.output].name} -> {row.target}.{by_name[row.target].inputs[row.input].name}"
        for row in manifest.donations
    ]


def _specs(manifest: Manifest, entry: EntrySpec, side: str) -> dict[str, Row]:
    """Returns the inputs or outputs, with the effects of the call on them as fields."""
    if side == "input":
        return {
            f"{side} {spec.name}": as_row(spec, "name", mutated=index in entry.mutated_inputs)
            for index, spec in enumerate(entry.inputs)
        }
    aliases = {alias.output: alias for alias in entry.aliases}
    return {
        f"{side} {spec.name}": as_row(
            spec, "name", shares=_shared(manifest, entry, aliases.get(index)), counted=_counted(entry, index)
        )
        for index, spec in enumerate(entry.outputs)
    }


def _counted(entry: EntrySpec, output: int) -> str:
    """Returns the axes of an output whose sizes depend on data."""
    return ", ".join([f"axis {row.axis}" for row in entry.data_sizes if row.output == output])


def _parameters(entry: EntrySpec) -> list[str]:
    """Describes kind and default of the call's parameters: `by name, default 1.0`."""
    defaults = [
        "" if parameter.default is None else f", default {recorded_constant(parameter.default)!r}" for parameter in entry.parameters
    ]
    return [f"{'by name' if parameter.keyword else 'any'}{end}" for parameter, end in zip(entry.parameters, defaults, strict=True)]


def _shared(manifest: Manifest, entry: EntrySpec, alias: Alias | None) -> str:
    """Returns the name of the tensor with which an output shares memory."""
    if alias is None:
        return ""
    if alias.memory in ("inputs", "outputs"):
        specs = entry.inputs if alias.memory == "inputs" else entry.outputs
        return f"{alias.memory.removesuffix('s')} {specs[alias.index].name}"
    return f"{alias.memory} {_weight_name(manifest, alias.index)}"


def _weight_name(manifest: Manifest, index: int | None) -> str:
    return "" if index is None else manifest.weights[index].name


def _memory(a: Manifest, b: Manifest) -> Iterator[Difference]:
    for difference in _bytes("", dict(a.memories), dict(b.memories)):
        gaps = difference.name == "weights" and a.target.kind != b.target.kind and difference.change == "changed"
        text = f"{difference.a} -> {difference.b}: on a GPU a tensor begins at a multiple of {ALIGNMENT} bytes"
        yield replace(difference, note=text) if gaps else difference
    yield from compare_rows(
        "memory", *[{f"donated by {row.entry}": as_row(row, "entry") for row in manifest.donated} for manifest in (a, b)]
    )
    for key, mine, theirs in [program for pair in common_entries(a, b) for program in common_programs(*pair)]:
        yield from _bytes(key, *[{"arena": program.arena, "inputs": program.static} for program in (mine, theirs)])
    before, after = [{weight.name: weight.offset for weight in manifest.weights} for manifest in (a, b)]
    moved = [name for name, offset in before.items() if after.get(name, offset) != offset]
    if moved:
        note = f"{len(moved)} of {len(before)} lie elsewhere, first {moved[0]}: {before[moved[0]]} -> {after[moved[0]]}"
        yield Difference(part="memory", name="places of weights", note=note, facts={"weights": len(before), "moved": len(moved)})


def _bytes(name: str, a: Mapping[str, int], b: Mapping[str, int]) -> Iterator[Difference]:
    for field in compare_fields("memory", name, a, b):
        sizes = field.facts
        yield replace(field, b=f"{field.b} bytes ({sizes['b'] - sizes['a']:+})" if sizes else field.b)


def _weights(manifest: Manifest) -> dict[str, Row]:
    """Returns rows by name; rows of frozen weights also contain the reason and the hash of their contents."""
    names = [weight.name for weight in manifest.weights]
    frozen = {
        names[row.weight]: {"frozen": row.reason, "holds": row.sha256, **({"read at": row.where} if row.where else {})}
        for row in manifest.frozen
    }
    return {weight.name: {**_weight(weight), **frozen.get(weight.name, {})} for weight in manifest.weights}


def _weight(weight: Weight) -> Row:
    layout = ROW_MAJOR if weight.strides == dense(weight.shape) else weight.strides
    return as_row(weight, "name", "offset", "strides", layout=layout, tensor="" if weight.tensor == weight.name else weight.tensor)


def _regions(a: Manifest, b: Manifest) -> Iterator[Difference]:
    both = (a, b)
    yield from compare_rows(
        "regions",
        *[unique_names([(region.name, as_row(region, "name", "constants")) for region in side.regions]) for side in both],
    )
    named_a, named_b = [
        {region.name: {constant: _weight_name(side, index) for constant, index in region.constants} for region in side.regions}
        for side in both
    ]
    for name in named_a:
        if name in named_b:
            for difference in compare_fields("regions", "", named_a[name], named_b[name]):
                yield Difference(part="regions", name=name, field=f"constant {difference.name}", a=difference.a, b=difference.b)


def _steps(both: tuple[Manifest, Manifest], pair: Pair) -> Iterator[Difference]:
    """Compares the sequence of steps of every int_key.  If it is equal, reports the first value that differs."""
    for key, mine, theirs in common_programs(*pair):
        chains = [
            value_text([f"{step.kind} {name}".strip() for step, name in zip(row.steps, step_regions(manifest, row), strict=True)])
            for manifest, row in zip(both, (mine, theirs), strict=True)
        ]
        if chains[0] != chains[1]:
            yield Difference(part="steps", name=key, a=chains[0], b=chains[1])
            continue
        yield from compare_fields("steps", key, *[{"lowering": _chosen(program)} for program in (mine, theirs)])
        values = list(zip_longest(_values(pair[0], mine), _values(pair[1], theirs), fillvalue=("nothing", "nothing")))
        differing = [(first, second) for first, second in values if first != second]
        if differing:
            (where, before), (other_where, after) = differing[0]
            same_place = where == other_where
            note = f"{where} {before} -> {after if same_place else f'{other_where} {after}'}"
            note += f"; {len(differing) - 1} more of {len(values)} values differ" if len(differing) > 1 else ""
            yield Difference(part="steps", name=key, note=note, facts={"values": len(values), "differ": len(differing)})


def _chosen(program: Program) -> str:
    """Returns the chosen lowering, "" if there was no choice.  The lowerings' times differ from build to build and are ignored."""
    return next((lowering.name for lowering in program.lowerings if lowering.chosen), "")


def _values(entry: EntrySpec, program: Program) -> list[tuple[str, str]]:
    """Returns for every value that the call or a step reads or writes: where it is used, and a description.  The description
    contains the value's number, because all values of the cpu target have offset 0."""
    uses = [(f"input {spec.name}", index) for spec, index in zip(entry.inputs, program.inputs, strict=True)]
    uses += [(f"output {spec.name}", index) for spec, index in zip(entry.outputs, program.outputs, strict=True)]
    for number, step in enumerate(program.steps):
        for verb, positions in (("reads", step.inputs), ("writes", step.outputs)):
            uses += [(f"step {number} ({step.kind}) {verb}", index) for index in positions]
    return [(where, f"v{index} {_value(program.values[index])}") for where, index in uses]


def _value(value: Value) -> str:
    return f"{value.dtype} {value_text(value.shape)} strides {value_text(value.strides)} at {value.memory}+{value.offset}"


def _proofs(a: EntrySpec, b: EntrySpec) -> Iterator[Difference]:
    yield from compare_fields("self-test", "", as_row(a.self_test, "proofs"), as_row(b.self_test, "proofs"))
    proofs = [{proof.key: proof for proof in entry.self_test.proofs} for entry in (a, b)]
    for key, mine, _ in common_programs(a, b):
        pair = [proof[mine.key] for proof in proofs]
        for difference in compare_fields("self-test", f"proof {key}", *[as_row(proof, "key") for proof in pair]):
            beyond = _beyond(*pair) if difference.field == "error" else ""
            yield replace(difference, note=beyond, measured=difference.field in MEASURED and not beyond)


def _beyond(a: Proof, b: Proof) -> str:
    """Describes errors beyond their bounds: `of B is beyond its bound: 2.0e-03, allowed 1.0e-04`, or ""."""
    sides = [(side, proof) for side, proof in (("A", a), ("B", b)) if not proof.error <= proof.tolerance]
    return "; ".join([f"of {side} is beyond its bound: {proof.error:.1e}, allowed {proof.tolerance:.1e}" for side, proof in sides])
