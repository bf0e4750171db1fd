"""The device memory of donated outputs: a reserved part of the arena for each entry.  Sizes are in bytes.

All programs use the same arena, so a call could overwrite the outputs of another call.  So each source of a donation has a reserved
part in front of the shared arena.  It is as large as the entry's largest int_key needs, and holds the outputs of the latest call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cgbundle.format.schema import DonatedRange, IntKey

from ...errors import ModelError
from ..build_spec import BuildSpec, build_key
from ..memory_layout import ALIGN, PAD, align
from .host_regions import SplitProgram


@dataclass(frozen=True, kw_only=True, slots=True)
class DonatedOutput:
    """An output of an int_key's program that is in a donation.  `region`, `output`: the number of the graph region that computes
    it, and its position there.  `entry`, `number`: the entry's name, and the output's position in its signature."""

    entry: str
    number: int
    region: int
    output: int


def donated_outputs(spec: BuildSpec, split: SplitProgram | None) -> dict[IntKey, tuple[DonatedOutput, ...]]:
    """Returns the donated outputs by build key.  Raises donation-refused for an output that the host computes."""
    outputs_by_key: dict[IntKey, tuple[DonatedOutput, ...]] = {}
    for number, entry in enumerate(spec.entries):
        donated = sorted({donation.output for donation in spec.donations if donation.source == entry.name})
        for key in entry.keys if donated else ():
            program_key = build_key(spec, number, key)
            outputs_by_key[program_key] = tuple([_located(entry.name, output, program_key, split) for output in donated])
    return outputs_by_key


def reserved_parts(needs: Mapping[str, int], to: int = ALIGN) -> tuple[DonatedRange, ...]:
    """Returns a part of the arena for each entry, from offset 0 on, at multiples of `to`.  `needs`: bytes by entry.  PAD unused
    bytes separate the parts, so that an address one past the end of a part is not in the next part."""
    rows, end = [], 0
    for entry, size in needs.items():
        rows.append(DonatedRange(entry=entry, offset=align(end, to), bytes=size + PAD))
        end = align(end, to) + size + PAD
    return tuple(rows)


def reserved_end(rows: Sequence[DonatedRange], to: int = ALIGN) -> int:
    """Returns the offset of the arena that all programs share."""
    return align(max([row.offset + row.bytes for row in rows], default=0), to)


def refused(entry: str, number: int, why: str) -> ModelError:
    return ModelError("donation-refused", f"donations(): output {number} of {entry}() {why}")


def _located(entry: str, number: int, key: IntKey, split: SplitProgram | None) -> DonatedOutput:
    if split is None:
        return DonatedOutput(entry=entry, number=number, region=0, output=number)
    planned = split.partitions[key]
    name = planned.outputs[number]
    graphs = [region for region in planned.regions if region.kind == "graph"]
    for place, region in enumerate(graphs):
        if name in region.outputs:
            return DonatedOutput(entry=entry, number=number, region=place, output=region.outputs.index(name))
    raise refused(entry, number, "is computed on the host")
