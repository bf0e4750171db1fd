"""check: the compatibility report of a model, without building anything and without a GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cgbundle.format.schema import Finding

from .errors import ModelError
from .model.declared_sizes import Given, declared_sizes
from .pipeline import MAX_KEYS, need_torch, quiet_torch

if TYPE_CHECKING:
    from .export.exported import Traced
    from .model.source import Source
    from .partition.split import Partition

ASSUMED = (2, 8)
"""Sizes of a dimension that the user gives none for: a report needs a range, not a list."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionReport:
    """A region that a build would make: `operations` are operators and how often each is called, the most frequent first; `reads`
    the values that cross to it, with the bytes of each at the largest sizes."""

    name: str
    kind: str
    reason: str
    operations: tuple[tuple[str, int], ...]
    reads: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What `check` found.  `target` is "cuda" or "cpu"; `sizes` those that the report is about, `assumed` the dimensions among them
    that the user gave no size for.  `regions` are those that a build would make, `returned` what crosses back to the caller; both
    are empty, and `unpartitioned` says why, where nothing can be built."""

    name: str
    target: str
    sizes: tuple[tuple[str, tuple[int, ...]], ...]
    assumed: tuple[str, ...]
    findings: tuple[Finding, ...]
    regions: tuple[RegionReport, ...]
    returned: tuple[tuple[str, int], ...]
    unpartitioned: str

    @property
    def refused(self) -> bool:
        """Whether a finding stops a build."""
        return any(finding.severity == "refuse" for finding in self.findings)


@quiet_torch()
def check(
    model: Any,
    inputs: Callable[..., Any] | None = None,
    *,
    sizes: Given = (),
    target: str = "cuda",
    strict: bool = False,
    host_ops: Sequence[str] = (),
) -> Report:
    """Every obstacle between a model and a bundle, and the regions that a build would make.  Nothing is built, no GPU is needed.

    `model`, `inputs` and `sizes` as for `build`; a dimension without sizes is checked for some.  `target`: cuda, cpu, or an
    architecture such as sm_90.  `strict`: findings that put operations on the host refuse.  `host_ops`: operators that are kept on
    the host, e.g. "mylib::op".

    Raises a BuildError where the model cannot even be exported for another reason than a rule's, and for wrong arguments.
    """
    need_torch()
    from .checks import check as judge
    from .checks import placements
    from .checks.sizes import too_many_keys
    from .export.export import trace
    from .export.signature import describe_signature
    from .model.load import load_source

    kind = _kind(target)
    source = load_source(model, inputs)
    wanted, assumed = _sizes(sizes, source.dimensions)
    found: list[Finding] = []
    regions: tuple[RegionReport, ...] = ()
    returned: tuple[tuple[str, int], ...] = ()
    why = ""
    try:
        traced = trace(source, wanted)
    except ModelError as error:
        if error.code not in ("export-failed", "branch-on-data"):
            raise
        found += _stopped(error)
        why = "the model cannot be exported"
    else:
        found += judge(traced, kind, host_ops)
        if not any(finding.severity == "refuse" for finding in found):
            describe_signature(traced)  # raises what a build would
        if kind == "cuda":
            parted = _partition(traced, placements(found, traced))
            if isinstance(parted, str):
                why = parted
            else:
                regions, returned = _regions(parted, source, traced)
                found = _with_partition(found, parted, traced)
    found += too_many_keys(wanted, MAX_KEYS)
    if strict:
        found = [replace(finding, severity="refuse") if finding.severity == "host" else finding for finding in found]
    return Report(
        name=source.name, target=kind, sizes=tuple(wanted.items()), assumed=assumed, findings=_ordered(found), regions=regions,
        returned=returned, unpartitioned=why,
    )  # fmt: skip


def _ordered(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """What refuses first, what is information last."""
    return tuple(sorted(findings, key=lambda finding: ("refuse", "host", "note").index(finding.severity)))


def _kind(target: str) -> str:
    """Raises target-unavailable."""
    from .targets.architectures import arch

    if target in ("cpu", "cuda"):
        return target
    arch(target)
    return "cuda"


def _sizes(given: Given, dimensions: Sequence[str]) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
    """Sizes of every dimension, and the dimensions that the user gave none for.  Raises sizes-invalid."""
    if not given and dimensions:
        return dict.fromkeys(dimensions, ASSUMED), tuple(dimensions)
    return declared_sizes(given, dimensions), ()


def _stopped(error: ModelError) -> list[Finding]:
    """The finding of a rule that torch.export stopped at.  Raises `error` where no rule knows it."""
    from torch._subclasses.fake_tensor import UnsupportedOperatorException

    from .model.side_effects import BRANCH, BRANCH_FIX
    from .model.user_code import user_place

    cause = error.__cause__
    where, line = user_place(cause) if cause is not None else ("", "")
    if error.code == "branch-on-data":
        rule, message, fix = "data-dependent-branch", BRANCH, BRANCH_FIX
    elif isinstance(cause, UnsupportedOperatorException) and re.search("sparse|nested", str(cause.func)):
        rule, message, fix = "sparse-output", "a tensor that is not dense", "use dense tensors, and masks"
    elif isinstance(cause, UnsupportedOperatorException) or "There was no fake impl registered" in str(cause):
        rule, message = "custom-operator", "an operator has no fake implementation, from which export learns shapes"
        fix = "give it one with torch.library.register_fake"
    else:
        raise error
    effect = "torch.export stops here: what comes after was not checked"
    return [
        Finding(rule=rule, severity="refuse", message=message, node="", where=where, source=line, effect=effect, fix=fix)
    ]  # fmt: skip


# --- the partition ------------------------------------------------------------------------------------------------


def _partition(traced: Traced, placed: Mapping[str, str]) -> Partition | str:
    """The partition, or why there is none."""
    from .errors import BuildError
    from .partition.split import partition

    try:
        return partition(traced.program, placed)
    except BuildError as error:
        return str(error)


def _regions(parted: Partition, source: Source, traced: Traced) -> tuple[tuple[RegionReport, ...], tuple[tuple[str, int], ...]]:
    from .checks.subject import operator
    from .model.source import sample
    from .partition.crossing import crossings
    from .partition.region_modules import region_modules

    largest = {name: values[-1] for name, values in traced.sizes.items()}
    modules = region_modules(traced.program, parted, sample(source, largest).tensors)
    nodes = {node.name: node for node in traced.program.graph.nodes}
    given = {node: name for node, (name, _) in zip(parted.inputs, traced.like.leaves, strict=True)}
    returned = dict(zip(parted.outputs, traced.flat.names, strict=True))
    reads: dict[str, list[tuple[str, int]]] = {}
    for crossing in crossings(parted, modules):
        known = returned if crossing.target == "call" else given
        reads.setdefault(crossing.target, []).append((known.get(crossing.value, crossing.value), crossing.nbytes))
    regions = [
        RegionReport(
            name=part.name, kind=part.kind, reason=part.reason,
            operations=tuple(Counter([operator(nodes[name]) for name in part.operations]).most_common()),
            reads=tuple(reads.get(part.name, ())),
        )
        for part in parted.regions
    ]  # fmt: skip
    return tuple(regions), tuple(reads.get("call", ()))


def _with_partition(findings: Sequence[Finding], parted: Partition, traced: Traced) -> list[Finding]:
    """The findings with the effect that the partition gives them, and a note for every graph that would have been too small."""
    from .checks.sizes import small_region
    from .partition.crossing import effect_of

    nodes = {node.name: node for node in traced.program.graph.nodes}
    exact = [
        replace(finding, effect=effect_of(parted, finding.node)) if finding.severity == "host" and finding.node else finding
        for finding in findings
    ]
    return [*exact, *[note for merged in parted.merged for note in small_region([nodes[name] for name in merged.nodes])]]
