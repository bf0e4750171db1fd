"""Host regions that are not compiled, for tests of builds that do not run them: a compiler takes 8 s for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cgbundle.format.schema import Region, Weight
from cgcompile.targets.cuda.host_regions import HostRegions, SplitProgram


def uncompiled(
    split: SplitProgram, weights: Sequence[Weight], scratch: Path, stage: Path, tell: object, level: object = None
) -> HostRegions:
    """In the place of `compile_host_regions`: rows and files of its kind."""
    rows = {}
    for key, planned in split.partitions.items():
        for region in [region for region in planned.regions if region.kind == "host" and region.operations]:
            stem = f"{region.name}-{'x'.join(map(str, key))}"
            (stage / "host").mkdir(exist_ok=True)
            (stage / "host" / f"{stem}.so").write_bytes(b"\x7fELF")
            rows[region.name, key] = Region(name=stem, kind="host", reason=region.reason, file=f"host/{stem}.so", constants=())
    return HostRegions(rows=rows, features=(), unbound=frozenset())
