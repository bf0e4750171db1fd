"""Makes the compatibility report of a model, from the stages of a build up to the check, and the partition."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.export import ExportedProgram

from cgbundle.format.schema import Finding
from cgbundle.format.shapes import axes_text

from ..checks.context import operator
from ..checks.sizes import small_region, too_many_keys
from ..errors import BuildError, ModelError
from ..export.export import export, with_unwritten
from ..export.exported import Exported
from ..export.paths.explore import PathsRefused
from ..export.paths.program import WayStopped
from ..export.signature.signature import describe_signature
from ..export.weights import weight_placeholders
from ..model.declared_sizes import Inputs, SizesOption, assumed_sizes, declared_sizes, sizes_of_entries
from ..model.flat_module import PREFIX
from ..model.load import evaluated, load_sources
from ..model.nondeterminism.fresh_process import Place, cuda_left_alone, forked_models, models_at
from ..model.side_effects import BRANCH
from ..model.source import CPU, CUDA, Source, sample
from ..model.tracing.held_tensors import own_buffers
from ..model.user_code import called_by, user_place
from ..partition.crossing import crossings, effect_of
from ..partition.region_modules import region_modules
from ..partition.split import Partition, partition
from ..targets.architectures import capability_of
from ..targets.choice import Options, recorder_for, resolved
from ..targets.donations import donations_of
from ..transforms.bounded.exports import with_bounded_outputs
from ..transforms.prepared import Prepared
from .entries import apply_rules, prepared_entry, with_later_findings
from .records import RegionReport, Report
from .sequences import with_sequences

ASSUMED = (2, 8)
"""Assumed sizes of a dimension without sizes: a report needs a range, not a list."""


def check(model: Any, inputs: Inputs | None, options: Options) -> Report:
    """See `cgcompile.check`."""
    with cuda_left_alone():
        sources = load_sources(model, inputs)
    many = len(sources) > 1
    dimensions = {source.entry: source.dimensions for source in sources}
    by_entry = sizes_of_entries(options.sizes, dimensions) if options.sizes else {}
    with ExitStack() as stack:
        mode = stack.enter_context(evaluated(sources[0], options.train))
        fresh = None if sources[0].saved else stack.enter_context(forked_models(sources))
        target = resolved(options.target)  # after the fork: it may start CUDA
        stack.enter_context(own_buffers(sources[0].model))
        model_device = CPU if recorder_for(target) == "host" else CUDA
        if fresh:
            fresh = models_at(Place(device=CPU, target_device=model_device, capability=capability_of(target)), fresh, sources, None)
        sources = tuple([replace(source, target_device=model_device, capability=capability_of(target)) for source in sources])
        entry_sizes = [_entry_sizes(source, by_entry.get(source.entry), many) for source in sources]
        exported = [
            _exported(source, dims, options.max_paths, alone=not many) for source, dims in zip(sources, entry_sizes, strict=True)
        ]
        exported = _unwritten(exported, options.max_paths)
        completed = [outcome for outcome in exported if isinstance(outcome, Exported)]
        if len(completed) == len(exported):  # with_sequences calls all entries, since one may read state that another one changes
            exported = list(with_sequences(completed, fresh))
        outcomes = [
            _report(source, dims, outcome, target, options, assumed=source.entry not in by_entry)
            for source, dims, outcome in zip(sources, entry_sizes, exported, strict=True)
        ]
    reports, entries = [report for report, _ in outcomes], [entry for _, entry in outcomes if entry is not None]
    if len(entries) == len(sources):
        donations_of(sources[0].donations, entries)  # raises the errors of a build
    return replace(reports[0], mode=mode, others=tuple([replace(report, mode=mode) for report in reports[1:]]))


def _entry_sizes(source: Source, sizes: SizesOption | None, several: bool) -> dict[str, tuple[int, ...]]:
    """Returns the sizes that the user gave for one entry, else assumed ones."""
    if sizes is None:
        return assumed_sizes(tuple(source.dimensions), source.saved, ASSUMED)
    return declared_sizes(sizes, source.dimensions, source.saved, source.entry if several else "")


def _exported(source: Source, sizes: dict[str, tuple[int, ...]], max_paths: int, *, alone: bool) -> Exported | Finding:
    """Returns the exported entry, or the finding that stopped the export."""
    try:
        return with_bounded_outputs(export(source, sizes, alone=alone, max_paths=max_paths))
    except ModelError as error:
        if error.code not in ("export-failed", "data-dependent-branch", "data-dependent-shape"):
            raise
        return _stopped(error)


def _unwritten(exported: list[Exported | Finding], max_paths: int) -> list[Exported | Finding]:
    """Exports an entry again if it uses a buffer as a constant that another entry writes to.  Returns all entries."""
    completed = [outcome for outcome in exported if isinstance(outcome, Exported)]
    try:
        unwritten = iter(with_unwritten(completed, max_paths))
    except ModelError as error:
        stopped = _stopped(error)
        written = frozenset().union(*[outcome.written for outcome in completed])
        return [stopped if isinstance(outcome, Exported) and outcome.baked.keys() & written else outcome for outcome in exported]
    return [next(unwritten) if isinstance(outcome, Exported) else outcome for outcome in exported]


def _report(
    source: Source,
    sizes: dict[str, tuple[int, ...]],
    exported: Exported | Finding,
    target: str,
    options: Options,
    *,
    assumed: bool,
) -> tuple[Report, Prepared | None]:
    """Returns the report of one entry, and the data for a build, or None if no bundle can be built."""
    recorder = recorder_for(target)
    kind = "cpu" if recorder == "host" else "cuda"
    collected: list[Finding] = []
    axes: tuple[tuple[str, str], ...] = ()
    regions: tuple[RegionReport, ...] = ()
    returned: tuple[tuple[str, int], ...] = ()
    unpartitioned = per_size = ""
    entry: Prepared | None = None
    if isinstance(exported, Finding):
        collected.append(exported)
        unpartitioned = "the model cannot be exported"
    else:
        per_size = exported.programs.reason
        shapes = [(name, shape) for (name, _), shape in zip(exported.flat.like.leaves, exported.shapes, strict=True)]
        axes = tuple([(name, axes_text(name, shapes)) for name in sizes])
        checked = apply_rules(exported, recorder, options)
        collected += checked.findings
        if not any(finding.severity == "refuse" for finding in collected):
            signature = describe_signature(exported)  # this call and the next one raise the errors of a build
            entry = with_later_findings(prepared_entry(exported, signature, checked), target, recorder)
            collected = list(entry.findings)
        if kind == "cuda":
            try:
                largest = tuple([values[-1] for values in sizes.values()])
                program = exported.programs.at(largest)
                parts = partition(program, checked.placements[largest])
            except BuildError as error:
                unpartitioned = str(error)
            else:
                regions, returned = _regions(parts, exported, program)
                collected = _with_partition(collected, parts, program)
    collected += too_many_keys(sizes, options.max_keys)
    if options.strict:
        collected = [replace(finding, severity="refuse") if finding.severity == "host" else finding for finding in collected]
    collected.sort(key=lambda finding: ("refuse", "host", "note").index(finding.severity))
    report = Report(
        name=source.name, entry=source.entry, others=(), target=kind, sizes=tuple(sizes.items()), axes=axes,
        assumed=tuple(sizes) if assumed else (),
        findings=tuple(collected), regions=regions, returned=returned, unpartitioned=unpartitioned, per_size=per_size,
    )  # fmt: skip
    return report, entry


def _stopped(error: ModelError) -> Finding:
    """Returns the finding for an error of torch.export.  Raises `error` if no rule describes it."""
    cause = error.__cause__.__cause__ if isinstance(error.__cause__, WayStopped) else error.__cause__
    where, line = user_place(cause) if cause is not None else ("", "")
    caller = called_by(cause) if cause is not None else ""
    if isinstance(cause, PathsRefused) and error.code == cause.obstacle.rule == "data-dependent-branch":
        # the model's Python code has too many paths, so torch.export was not called
        where, line = cause.obstacle.where, cause.obstacle.source
        rule, message, fix = cause.obstacle.rule, cause.obstacle.message, error.hint
    elif error.code == "data-dependent-branch":
        rule, message, fix = "data-dependent-branch", BRANCH + caller, error.hint
    elif error.code == "data-dependent-shape":
        rule, message, fix = "data-dependent-shape", f"torch.export cannot follow a size that depends on data{caller}", error.hint
        where = where or error.where
    elif isinstance(cause, UnsupportedOperatorException) and re.search("sparse|nested", str(cause.func)):
        rule, message, fix = "sparse-output", "a tensor that is not dense", "use dense tensors, and masks"
    elif isinstance(cause, UnsupportedOperatorException) or "There was no fake impl registered" in str(cause):
        rule, message = "custom-operator", "an operator has no fake implementation, from which export learns shapes"
        fix = "give it one with torch.library.register_fake"
    else:
        raise error
    effect = "torch.export stops here: what comes after was not checked"
    return Finding(rule=rule, severity="refuse", message=message, node="", where=where, source=line, effect=effect, fix=fix)


def _regions(
    parts: Partition, exported: Exported, program: ExportedProgram
) -> tuple[tuple[RegionReport, ...], tuple[tuple[str, int], ...]]:
    """Returns the reports of the regions, and name and bytes of the values that return to the caller."""
    largest = {name: values[-1] for name, values in exported.sizes.items()}
    modules = region_modules(program, parts, sample(exported.source, largest).tensors)
    nodes = {node.name: node for node in program.graph.nodes}
    input_names = {node: name.removeprefix(PREFIX) for node, name in weight_placeholders(program).items()}
    input_names |= {node: name for node, (name, _) in zip(parts.inputs, exported.flat.like.leaves, strict=True)}
    returned = dict(zip(parts.outputs, exported.flat.names, strict=True))
    reads: dict[str, list[tuple[str, int]]] = {}
    for crossing in crossings(parts, modules):
        value_names = returned if crossing.target == "call" else input_names
        reads.setdefault(crossing.target, []).append((value_names.get(crossing.value, crossing.value), crossing.nbytes))
    regions = [
        RegionReport(
            name=part.name, kind=part.kind, reason=part.reason,
            operations=tuple(Counter([operator(nodes[name]) for name in part.operations]).most_common()),
            reads=tuple(reads.get(part.name, ())),
        )
        for part in parts.regions
    ]  # fmt: skip
    return tuple(regions), tuple(reads.get("call", ()))


def _with_partition(findings: Sequence[Finding], parts: Partition, program: ExportedProgram) -> list[Finding]:
    """Returns the findings with their effect on the partition, and a note for operations whose graph would be too small."""
    nodes = {node.name: node for node in program.graph.nodes}
    exact = [
        replace(finding, effect=effect_of(parts, finding.node)) if finding.severity == "host" and finding.node else finding
        for finding in findings
    ]
    return [*exact, *[note for merged in parts.merged for note in small_region([nodes[name] for name in merged.nodes])]]
