"""Donations: a later call reads an output of an entry in place, as its input.  The model file names the pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cgbundle.errors import did_you_mean
from cgbundle.format.schema import Donation, Manifest, TensorSpec
from cgbundle.format.shapes import evaluate
from cgbundle.validate.state import donating_programs

from ..errors import ModelError
from ..model.source import DonationNames
from ..transforms.prepared import Prepared


def donations_of(pairs: Iterable[DonationNames], entries: Sequence[Prepared]) -> tuple[Donation, ...]:
    """Returns the manifest rows for the pairs that the model's `donations()` returns: an output and an input as "entry.name".

    Raises donation-unknown for unknown names, and donation-unlike or donation-refused for pairs that can never be donated.
    """
    donations: dict[tuple[str, int, str, int], Donation] = {}
    for pair in pairs:
        source, output = _entry_and_position(pair, 0, entries)
        target, position = _entry_and_position(pair, 1, entries)
        row = Donation(source=source.name, output=output, target=target.name, input=position)
        if row in donations.values():
            raise ModelError("donation-unknown", f"donations(): {_pair_text(pair)} is given twice")
        _check(pair, source, output, target, position)
        donations[(row.source, row.output, row.target, row.input)] = row
    return tuple([row for _, row in sorted(donations.items())])


def check_layouts(manifest: Manifest) -> None:
    """Raises donation-unlike if no pair of programs gives the output the memory layout of the input."""
    compatible = {donation for donation, _, _ in donating_programs(manifest)}
    names = {entry.name: entry for entry in manifest.entries}
    for row in manifest.donations:
        if row not in compatible:
            source, target = names[row.source], names[row.target]
            pair = f"{row.source}.{source.outputs[row.output].name}", f"{row.target}.{target.inputs[row.input].name}"
            raise ModelError(
                "donation-unlike",
                f"donations(): {_pair_text(pair)}: the axes of the output and of the input have different orders in memory",
                "return output.contiguous(), or let inputs() return a tensor with the layout of the output",
            )


def _entry_and_position(pair: DonationNames, side: int, entries: Sequence[Prepared]) -> tuple[Prepared, int]:
    """Returns the entry and the position that one side of a pair names.  `side`: 0 for the output, 1 for the input."""
    name, _, tensor_name = pair[side].partition(".")
    entry = next((entry for entry in entries if entry.name == name), None)
    if entry is None:
        names = [entry.name for entry in entries]
        raise ModelError(
            "donation-unknown",
            f"donations(): {_pair_text(pair)}: {name!r} is no entry{did_you_mean(name, names)}; the entries are {', '.join(names)}",
        )
    signature = entry.signature
    kind, specs = ("input", signature.inputs) if side else ("output", signature.outputs)
    names = [spec.name for spec in specs]
    if not tensor_name and len(names) == 1:
        return entry, 0
    if tensor_name not in names:
        has = ", ".join([f"{name}.{spec_name}" for spec_name in names])
        raise ModelError("donation-unknown", f"donations(): {_pair_text(pair)}: {pair[side]!r} is no {kind}: {name!r} has {has}")
    return entry, names.index(tensor_name)


def _check(pair: DonationNames, source: Prepared, output: int, target: Prepared, position: int) -> None:
    output_spec, input_spec = source.signature.outputs[output], target.signature.inputs[position]
    where = f"donations(): {_pair_text(pair)}"
    if output_spec.dtype != input_spec.dtype:
        raise ModelError("donation-unlike", f"{where}: the output is {output_spec.dtype}, the input {input_spec.dtype}")
    if not _shapes(source, output_spec) & _shapes(target, input_spec):
        raise ModelError("donation-unlike", f"{where}: their shapes are equal at none of the built sizes")
    shared = next((alias for alias in source.aliases if alias.output == output and alias.memory != "outputs"), None)
    if shared is not None:
        owner = "one of its inputs" if shared.memory == "inputs" else f"buffer {shared.name!r}"
        raise ModelError("donation-refused", f"{where}: the output is {owner} itself")
    if any(output in (row.output, row.count) for row in source.signature.data_sizes):
        raise ModelError("donation-refused", f"{where}: the size of the output depends on data")
    if position in target.written:
        raise ModelError("donation-refused", f"{where}: {target.name}() writes to that input, which would change the output")


def _shapes(entry: Prepared, spec: TensorSpec) -> set[tuple[int, ...]]:
    """Returns the shapes of `spec` at all int_keys of an entry."""
    return {tuple([evaluate(size, entry.exported.sizes_at(key)) for size in spec.shape]) for key in entry.keys}


def _pair_text(pair: DonationNames) -> str:
    return f"{pair[0]} -> {pair[1]}"
