"""Rules that all ranks of a model must satisfy together."""

from __future__ import annotations

from collections.abc import Sequence

from cgbundle.format.schema import Dimension

from ...checks import Checked
from ...errors import BuildError

PADS = ("no", "zeros", "rows")
"""From the least to the most padding that a dimension allows."""


def agreed(by_rank: Sequence[Sequence[Dimension]]) -> tuple[Dimension, ...]:
    """Returns dimensions that are valid for all ranks, from those that each rank has proved.  All ranks get the same sizes."""
    dimensions = []
    for versions in zip(*by_rank, strict=True):
        least = min(versions, key=lambda dimension: (PADS.index(dimension.pad), dimension.chunk))
        dimensions.append(least)
    return tuple(dimensions)


def refuse_host(checked: Sequence[Checked]) -> None:
    """Raises world-refused for operations that would run on the host."""
    for rules in checked:
        first = next((finding for finding in rules.findings if finding.severity == "host"), None)
        if first is not None or rules.on_host:
            where = f"{first.where or 'model'}: {first.rule}: {first.message}" if first else "an operation runs on the host"
            raise BuildError("world-refused", where, first.fix if first else "")
