"""Chains: which outputs of the entries a later call takes where they lie, as the model file names them.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cgbundle.errors import meant
from cgbundle.format.file_names import donating_programs
from cgbundle.format.schema import Donation, Manifest, TensorSpec
from cgbundle.format.size_expressions import evaluate

from ..errors import ModelError
from ..model.source import ChainNames
from .build_spec import EntryBuild


def chains_of(given: Iterable[ChainNames], entries: Sequence[EntryBuild]) -> tuple[Donation, ...]:
    """The rows of what `chains()` gives: pairs of an output and an input, each as `entry.name`.

    Raises chain-unknown, and chain-unlike or chain-refused for two between which nothing could ever be passed on.
    """
    found: dict[tuple[str, int, str, int], Donation] = {}
    for pair in given:
        source, output = _named(pair, 0, entries)
        target, taken = _named(pair, 1, entries)
        row = Donation(source=source.name, output=output, target=target.name, input=taken)
        if row in found.values():
            raise ModelError("chain-unknown", f"chains(): {_shown(pair)} stands twice")
        _check(pair, source, output, target, taken)
        found[(row.source, row.output, row.target, row.input)] = row
    return tuple([row for _, row in sorted(found.items())])


def check_layouts(manifest: Manifest) -> None:
    """Raises chain-unlike where an output is never laid out as the input is."""
    meeting = {chain for chain, _, _ in donating_programs(manifest)}
    names = {entry.name: entry for entry in manifest.entries}
    for chain in manifest.donations:
        if chain not in meeting:
            source, target = names[chain.source], names[chain.target]
            pair = f"{chain.source}.{source.outputs[chain.output].name}", f"{chain.target}.{target.inputs[chain.input].name}"
            raise ModelError(
                "chain-unlike",
                f"chains(): {_shown(pair)}: the output lies in another order of its axes than the input",
                "return it .contiguous(), or let inputs() give a tensor that is laid out as the output is",
            )


def _named(pair: ChainNames, side: int, entries: Sequence[EntryBuild]) -> tuple[EntryBuild, int]:
    """The entry and the position of one side of a pair."""
    name, _, rest = pair[side].partition(".")
    entry = next((each for each in entries if each.name == name), None)
    if entry is None:
        names = [each.name for each in entries]
        raise ModelError(
            "chain-unknown", f"chains(): {_shown(pair)}: there is no entry {name!r}{meant(name, names)}, but {', '.join(names)}"
        )
    signature = entry.prepared.signature
    kind, specs = ("input", signature.inputs) if side else ("output", signature.outputs)
    names = [spec.name for spec in specs]
    if not rest and len(names) == 1:
        return entry, 0
    if rest not in names:
        has = ", ".join([f"{name}.{each}" for each in names])
        raise ModelError("chain-unknown", f"chains(): {_shown(pair)}: {pair[side]!r} is no {kind}: {name!r} has {has}")
    return entry, names.index(rest)


def _check(pair: ChainNames, source: EntryBuild, output: int, target: EntryBuild, taken: int) -> None:
    made, wanted = source.prepared.signature.outputs[output], target.prepared.signature.inputs[taken]
    where = f"chains(): {_shown(pair)}"
    if made.dtype != wanted.dtype:
        raise ModelError("chain-unlike", f"{where}: the output is {made.dtype}, the input {wanted.dtype}")
    if not _shapes(source, made) & _shapes(target, wanted):
        raise ModelError("chain-unlike", f"{where}: they have the same shape at no sizes that are built")
    shared = next((each for each in source.prepared.aliases if each.output == output and each.memory != "outputs"), None)
    if shared is not None:
        what = "one of its inputs" if shared.memory == "inputs" else f"buffer {shared.name!r}"
        raise ModelError("chain-refused", f"{where}: the output is {what} itself, and lies there")
    if any(output in (row.output, row.count) for row in source.prepared.signature.data_sizes):
        raise ModelError("chain-refused", f"{where}: the size of the output depends on data")
    if taken in target.prepared.written:
        raise ModelError("chain-refused", f"{where}: {target.name}() writes to that input, which would change the output")


def _shapes(entry: EntryBuild, spec: TensorSpec) -> set[tuple[int, ...]]:
    """At all int_keys of an entry."""
    return {tuple([evaluate(size, dict(zip(entry.sizes, key, strict=True))) for size in spec.shape]) for key in entry.keys}


def _shown(pair: ChainNames) -> str:
    return f"{pair[0]} -> {pair[1]}"
