"""Results of build and check."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cgbundle.format.schema import Finding

from ..util.disk_space import size

if TYPE_CHECKING:
    from cgbundle.format.schema import Manifest


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Built:
    """A published bundle, its manifest, and the seconds that each stage took.  It prints as three lines.

    `variants`: the names of the variants of a build for several targets; `manifest` is then that of the first variant.
    """

    path: Path
    manifest: Manifest
    seconds: tuple[tuple[str, float], ...]
    variants: tuple[str, ...] = ()

    def __str__(self) -> str:
        target, entry = self.manifest.target, self.manifest.entries[0]
        proofs = entry.self_test.proofs
        target_text = ", ".join(self.variants) or f"{target.kind} {target.level or target.arch}"
        sizes = " x ".join(f"{dimension.name} {', '.join(map(str, dimension.sizes))}" for dimension in entry.dimensions)
        proved = [proof for proof in proofs if proof.method != "none"]
        error = f", largest error {max(proof.error for proof in proved):.1e}" if proved else ""
        return "\n".join([
            f"{self.path}, {self._size()}, for {target_text}, built in {self._spent():.1f} s",
            f"{sizes or 'no dimensions'}: {len(proofs)} int_key{'s' * (len(proofs) != 1)}, {len(proved)} proved{error}",
            f"program = cgbundle.load({str(self.path)!r})",
        ])  # fmt: skip

    def __repr__(self) -> str:
        return f"<Built {self.path}: {self.manifest.name}, {len(self.manifest.entries[0].programs)} int_keys, {self._size()}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _size(self) -> str:
        return size(sum(file.bytes for file in self.manifest.files))

    def _spent(self) -> float:
        return sum(seconds for _, seconds in self.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionReport:
    """A region that a build would make.

    `operations` are operators with their number of calls, the most frequent first.  `reads` are the values that it gets from other
    regions, with their bytes at the largest sizes.
    """

    name: str
    kind: str
    reason: str
    operations: tuple[tuple[str, int], ...]
    reads: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Report:
    """The findings of `check` for an entry of the model, and in `others` for its other entries.  `print` shows a line for each
    finding.

    `target` is "cuda" or "cpu".  `sizes` are the checked sizes.  `assumed` are the dimensions for which the check assumed sizes.
    `axes` says for each dimension, as text, which axes of the inputs have its size.  `mode`: a note about training mode, or "".
    `per_size`: why every int_key is exported separately, "" if one program serves all.  `regions` are those that a build would
    make, `returned` the values that the program returns.  Both are empty for the cpu target, which has no graphs, and if no bundle
    can be built: `unpartitioned` has the reason.
    """

    name: str
    entry: str
    target: str
    sizes: tuple[tuple[str, tuple[int, ...]], ...]
    axes: tuple[tuple[str, str], ...]
    assumed: tuple[str, ...]
    findings: tuple[Finding, ...]
    regions: tuple[RegionReport, ...]
    returned: tuple[tuple[str, int], ...]
    unpartitioned: str
    per_size: str
    others: tuple[Report, ...]
    mode: str = ""

    def __str__(self) -> str:
        lines = [self._headline()]
        for report in self.reports:
            prefix = f"{report.entry}: " if self.others else ""
            for finding in report.findings:
                where = f" ({finding.where})" if finding.where else ""
                lines.append(
                    f"  {prefix}{finding.severity} {finding.rule}: {finding.message}{where}"
                    + (f"; {finding.fix}" if finding.fix else "")
                )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Report of {self._headline()}>"

    def _headline(self) -> str:
        all_findings = [finding for report in self.reports for finding in report.findings]
        stops = sum(finding.severity == "refuse" for finding in all_findings)
        verdict = f"cannot be built, {stops} of " if stops else "can be built, "
        return f"{self.name} for {self.target}: {verdict}{len(all_findings)} finding{'s' * (len(all_findings) != 1)}"

    @property
    def reports(self) -> tuple[Report, ...]:
        """The reports of all entries: this one, then `others`."""
        return (self, *self.others)

    @property
    def refused(self) -> bool:
        """Whether a finding stops a build."""
        return any(finding.severity == "refuse" for report in self.reports for finding in report.findings)
