"""Host regions that are not compiled, for tests that do not run the bundle: compiling one takes 8 s."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cgbundle.format.schema import Region, Weight
from cgcompile.targets.cuda.host_regions import HostRegions, SplitProgram


def uncompiled(
    split: SplitProgram, weights: Sequence[Weight], scratch: Path, stage: Path, tell: object, level: object = None
) -> HostRegions:
    """Replaces `compile_host_regions`: returns rows and writes dummy files of the same kind."""
    rows = {}
    for key, planned in split.partitions.items():
        for region in [region for region in planned.regions if region.kind == "host" and region.operations]:
            stem = f"{region.name}-{'x'.join(map(str, key))}"
            (stage / "host").mkdir(exist_ok=True)
            (stage / "host" / f"{stem}.so").write_bytes(b"\x7fELF")
            rows[region.name, key] = Region(name=stem, kind="host", reason=region.reason, file=f"host/{stem}.so", constants=())
    return HostRegions(rows=rows, features=(), unbound=frozenset())
