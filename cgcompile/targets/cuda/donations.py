"""Where outputs that a later call takes lie on a GPU: in a part of the arena that is reserved for their entry.  Pure; bytes.

Programs overlay each other in the arena, so that any call would overwrite what another one gave.  Below the arena that all share
each source of a donation has a part of its own.  As large as its largest int_key needs, it holds the outputs of the latest call.
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
    """An output of an int_key's program that is in a donation: which of its graph regions makes it, and as which of its outputs.
    `entry` and `number` are the entry's name and the output's number in its signature."""

    entry: str
    number: int
    region: int
    output: int


def donated_outputs(spec: BuildSpec, split: SplitProgram | None) -> dict[IntKey, tuple[DonatedOutput, ...]]:
    """By build key.  Raises donation-refused for an output that the host makes."""
    outputs_by_key: dict[IntKey, tuple[DonatedOutput, ...]] = {}
    for number, entry in enumerate(spec.entries):
        donated = sorted({donation.output for donation in spec.donations if donation.source == entry.name})
        for key in entry.keys if donated else ():
            built = build_key(spec, number, key)
            outputs_by_key[built] = tuple([_located(entry.name, output, built, split) for output in donated])
    return outputs_by_key


def reserved_parts(needs: Mapping[str, int], to: int = ALIGN) -> tuple[DonatedRange, ...]:
    """A part of the arena for each entry that needs so many bytes, from offset 0 on, each at a multiple of `to`.  Between two of
    them lie PAD bytes of nobody: an address behind the last byte of one is not in the next."""
    rows, end = [], 0
    for entry, size in needs.items():
        rows.append(DonatedRange(entry=entry, offset=align(end, to), bytes=size + PAD))
        end = align(end, to) + size + PAD
    return tuple(rows)


def reserved_end(rows: Sequence[DonatedRange], to: int = ALIGN) -> int:
    """Where the arena that all programs share begins."""
    return align(max([row.offset + row.bytes for row in rows], default=0), to)


def refused(entry: str, number: int, why: str) -> ModelError:
    """The error of an output that cannot be kept."""
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
    raise refused(entry, number, "is made by the host")
