"""Runs the stages of a build: source -> export -> check -> padding -> lower, record, emit -> verify."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cgbundle.format.schema import Dimension, Finding, Manifest, Provenance
from cgbundle.validate import host_code

from ..bundle.condense import condense
from ..bundle.emit import seal, write_programs
from ..bundle.proof import replay
from ..bundle.provenance import provenance
from ..bundle.ranks import Ranks
from ..checks import Checked, check, refuse
from ..checks.repeatability import widened_bound
from ..errors import BuildError, ModelError
from ..export.export import export, refuse_branches, with_unwritten
from ..export.exported import Exported
from ..export.paths import MAX_PATHS
from ..export.programs import Programs, with_shared_constants
from ..export.signature.more_rows import same_with_more_rows
from ..export.signature.signature import describe_signature
from ..model.declared_sizes import Inputs, SizesOption, count_keys, declared_sizes, sizes_of_entries
from ..model.devices.placing import placed
from ..model.load import checked_donations, load_sources, with_rows
from ..model.nondeterminism.fresh_process import Place, cuda_left_alone, forked_models, models_at
from ..model.source import CPU, CUDA, Source
from ..model.tracing.held_tensors import own_buffers
from ..targets.architectures import capability_of
from ..targets.build_spec import BuildSpec, EntryBuild, ManifestParts, Placements
from ..targets.choice import CONDITIONALS, Chosen, asks_gpu, choose
from ..targets.donations import check_layouts, donations_of
from ..targets.instruction_sets import level_of
from ..transforms.bounded.exports import with_bounded_outputs
from ..transforms.error_bounds import error_bounds
from ..transforms.padding.proof import prove_padding, unpadded
from ..transforms.prepared import Prepared, prepare, together
from ..util.disk_space import size
from ..util.garbage_collection import quick_imports
from ..util.progress import Stages, Tell, named_tells
from .destination import destination_path, staged_bundle
from .kernel_coverage import operators_without_kernel
from .manifest import manifest_of, with_mismatches
from .records import Built, Options
from .sequences import with_sequences
from .training_mode import evaluated, load_evaluated
from .world.agreement import agreed, refuse_host

if TYPE_CHECKING:
    from ..capture.processes import RecorderProcesses

BUILDERS = {"host": "cgcompile.targets.cpu.build", "capture": "cgcompile.capture.build", "cross-compile": "cgcompile.offline.build"}
"""Recorder of a `targets.choice.Chosen` -> module whose `build_parts` writes the target's part of a bundle."""

PADDED = {"rows": "padded", "zeros": "padded with zeros", "no": "never padded"}
"""Text for each value of `Dimension.pad`."""

AUTOTUNE = "cgcompile.pipeline.best.build"
"""The module with `build_parts` for several lowerings."""


def build(model: Any, inputs: Inputs | None, options: Options, recorders: RecorderProcesses | None = None) -> Built:
    """See `cgcompile.build`.  `recorders`: processes of a fork server that was started before torch was imported."""
    return _build(model, inputs, options, None, None, recorders)


def build_into(model: Any, inputs: Inputs | None, options: Options, folder: Path) -> Built:
    """Builds into `folder` and does not publish."""
    return _build(model, inputs, options, None, folder)


def build_rank(model: str, options: Options, ranks: Ranks, folder: Path) -> Built:
    """Builds one rank of a model on several devices into `folder`, at the same time as the processes of the other ranks."""
    return _build(model, None, options, ranks, folder)


def _build(
    model: Any,
    inputs: Inputs | None,
    options: Options,
    ranks: Ranks | None,
    out_path: Path | None,
    recorders: RecorderProcesses | None = None,
) -> Built:
    stages = Stages(options.progress)
    choice_options = (options.target, options.lower, options.specialize, options.record, options.prove)
    choose_target = partial(choose, *choice_options, standalone=bool(options.standalone), autotune=options.autotune)
    chosen_early = None if asks_gpu(options.target) else choose_target()
    with ExitStack() as stack:
        with stages("source") as tell:
            share = (ranks.rank, ranks.size) if ranks and not options.split else None
            with cuda_left_alone():
                loaded = load_sources(model, inputs, share)
                loaded = with_rows(loaded, options.state) if options.state else loaded
            mode = stack.enter_context(evaluated(loaded[0], options.train))
            fresh_stack = stack.enter_context(ExitStack())
            fresh = None if ranks or loaded[0].saved else fresh_stack.enter_context(forked_models(loaded))
            chosen = chosen_early or choose_target()  # after the fork, because it may start CUDA
            sizes = _sizes(loaded, options.sizes)
            keys = count_keys(sizes, options.max_keys)
            destination = out_path or destination_path(options.out, loaded[0].name)
            # locks the path
            folder = out_path or stack.enter_context(staged_bundle(destination, options.force))
            stack.enter_context(own_buffers(loaded[0].model))
            place = Place(
                device=chosen.device,
                target_device=CPU if chosen.recorder == "host" else CUDA,
                capability=capability_of(chosen.target),
            )
            first = stack.enter_context(placed(loaded[0], chosen.device))
            if fresh:
                fresh = models_at(place, fresh, [replace(source, model=first.model) for source in loaded], _reload(model, options))
            sources = [
                replace(source, device=first.device, target_device=place.target_device, capability=place.capability)
                for source in loaded
            ]
            builder = AUTOTUNE if options.autotune else BUILDERS[chosen.recorder]
            with quick_imports():  # late: the other recorders do not need the modules of this one (Triton, CUPTI, AOTInductor)
                build_parts: Callable[..., ManifestParts] = import_module(builder).build_parts
            entries_text = f", {len(sources)} entries" if len(sources) > 1 else ""
            target_text = f" for {_default(chosen)}" if options.target == "auto" else ""
            tell.result(f"{first.name}{entries_text}, {_counted(keys, 'int_key')}{target_text}{f'; {mode}' if mode else ''}")
        if sources[0].rows and chosen.recorder == "capture" and options.lower == "eager":
            text = f"{first.label}: state: PyTorch's own kernels hold the number of rows, which a load is to choose"
            raise ModelError("state-refused", text, "leave --lower out, or state()")
        if chosen.recorder == "capture":
            from ..capture.build import start
            from ..capture.processes import recorder_processes

            processes = recorders or stack.enter_context(recorder_processes())
            start(processes, keys, options.lower, options.specialize)
            build_parts = partial(build_parts, processes=processes)
        elif recorders:
            recorders.close()
        if chosen.recorder == "host":
            from ..targets.cpu.interface import begun

            started_early = stack.enter_context(begun(level_of(chosen.target), options.standalone))
            build_parts = partial(build_parts, begun=started_early)
        with stages("export") as tell:
            exported = export_entries(sources, sizes, tell, options.max_paths)
            if sources[0].rows:
                same_with_more_rows(exported, options.max_paths, tell)
            exported = with_sequences(exported, fresh)
            fresh = None
            fresh_stack.close()  # it holds a second copy of the weights
            signatures = [describe_signature(entry) for entry in exported]
            tell.result(_nodes([entry.programs for entry in exported]))
        with stages("check") as tell:
            kind, conditionals = "cpu" if chosen.recorder == "host" else "cuda", chosen.recorder in CONDITIONALS
            crossed = chosen.recorder == "cross-compile"
            checked = [
                check(entry, kind, options.fallback_ops, conditionals=conditionals, cross_compiled=crossed) for entry in exported
            ]
            _refuse(checked, options)
            prepared = together(
                [
                    prepare(entry, signature, rules.functionalized, markers=bool(rules.on_host))
                    for entry, signature, rules in zip(exported, signatures, checked, strict=True)
                ]
            )
            checked = [
                replace(rules, findings=(*rules.findings, *widened_bound(lowerable)))
                for rules, lowerable in zip(checked, prepared, strict=True)
            ]
            if chosen.recorder == "cross-compile":
                missing_kernels = [
                    operators_without_kernel(lowerable, rules.placements, sizes[own_source.entry], chosen.target)
                    for lowerable, rules, own_source in zip(prepared, checked, sources, strict=True)
                ]
                checked = [
                    replace(rules, findings=(*rules.findings, *missing))
                    for rules, missing in zip(checked, missing_kernels, strict=True)
                ]
                _refuse(checked, options)
            if ranks:
                refuse_host(checked)
            if sources[0].rows:
                _refuse_rows(sources[0], [rules.placements for rules in checked], ranks is not None)
            tell.result(_counted(sum(len(rules.findings) for rules in checked), "finding"))
        with stages("padding") as tell:
            tells = named_tells(tell, [source.entry for source in sources])
            dimensions = [
                prove_padding(source, lowerable, sizes[source.entry], tell)
                for source, lowerable, tell in zip(sources, prepared, tells, strict=True)
            ]
            if ranks:
                dimensions = [agreed(by_rank) for by_rank in zip(*ranks.gathered(dimensions), strict=True)]
            tell.result(_padded(sources, prepared, dimensions))
        if ranks and options.split:
            from ..offline.layers.shares import layer_shares

            with stages("split") as tell:
                prepared = layer_shares(prepared, ranks)
                tell.result(f"{size(sum(value.nbytes for value in prepared[0].weights.values()))} on rank {ranks.rank}")
        entries = tuple(
            [
                EntryBuild(
                    source=source, prepared=lowerable, sizes=sizes[source.entry], dimensions=dimension, placements=rules.placements
                )
                for source, lowerable, dimension, rules in zip(sources, prepared, dimensions, checked, strict=True)
            ]
        )
        spec = BuildSpec(
            entries=entries, donations=donations_of(checked_donations(options.donations, first.label) or first.donations, entries),
            target=chosen.target, recorder=chosen.recorder, lower=options.lower, specialize=options.specialize, prove=options.prove,
            prove_budget=options.prove_budget, autotune_timeout=options.autotune_timeout, allow=options.allow,
            standalone=options.standalone, torch_version=torch.__version__.partition("+")[0], ranks=ranks,
        )  # fmt: skip
        origin = provenance(first.origin or first.label, _recorded_options(options, chosen.recorder))
        finish = partial(_finished, build_parts=build_parts, findings=[rules.findings for rules in checked], origin=origin)
        sealed = finish(spec, folder, stages, run=chosen.runs_here)
        if sealed is None:
            _empty(folder)
            sealed = finish(replace(spec, standalone=False), folder, stages, run=chosen.runs_here)
            assert sealed is not None
    return Built(path=destination, manifest=sealed, seconds=tuple(stages.seconds))


def _refuse_rows(source: Source, placements: Sequence[Placements], several: bool) -> None:
    """Raises state-refused for a load-time number of state rows if the model uses several GPUs, or the host beside a GPU."""
    if several:
        problem, remedy = "the model is over several GPUs", "leave state() out"
    elif any(placed for placement in placements for placed in placement.values()):
        problem, remedy = "operations of the model are on the host, beside a GPU", "`cgcompile check` lists them"
    else:
        return
    raise ModelError("state-refused", f"{source.label}: state: {problem}, so a load cannot choose the number of rows", remedy)


def _reload(model: Any, options: Options) -> Callable[[], Sequence[Source]] | None:
    """Returns a function that loads the model again, or None for a module in memory."""
    return None if isinstance(model, torch.nn.Module) else partial(load_evaluated, model, options.train)


def _finished(
    spec: BuildSpec,
    folder: Path,
    stages: Stages,
    *,
    run: bool,
    build_parts: Callable[..., ManifestParts],
    findings: Sequence[tuple[Finding, ...]],
    origin: Provenance,
) -> Manifest | None:
    """Writes the bundle to `folder`, seals it, and replays it if `run`.  If the replay fails for a CPU bundle that contains torch's
    functions, and `standalone` is None, returns None: the caller then uses torch's libraries, which round as eager PyTorch does."""
    parts = build_parts(spec, folder, stages)
    for entry in spec.entries:
        write_programs(folder, entry.prepared.programs, entry.name)
    manifest = manifest_of(spec, parts, findings, origin)
    check_layouts(manifest)
    with stages("verify") as tell:
        host_code.attach(folder, manifest)
        if not run:  # otherwise it is condensed after the replay, which needs all expected values
            condense(folder, manifest)
        sealed = seal(folder, with_mismatches(manifest))  # hashes every file, which takes long for large weights
        if not run:
            tell.result(f"every hash and invariant; `cgcompile verify --run` replays it where a GPU of {spec.target} is")
            return sealed
        bounds = [error_bounds(entry.prepared, sealed.weights) for entry in spec.entries]
        try:
            judges = [entry.prepared for entry in spec.entries] if spec.recorder == "host" else []
            replayed = replay(folder, sealed, bounds, spec.allow, judges)
        except BuildError as refusal:
            if refusal.code != "proof-failed" or spec.standalone is not None or spec.recorder != "host" or sealed.target.torch:
                raise
            tell.result(f"building again with torch's libraries, because: {refusal}")
            return None
        examined = [
            replace(entry, self_test=self_test, findings=entry_findings)
            for entry, self_test, entry_findings in zip(sealed.entries, replayed.self_tests, findings, strict=True)
        ]
        sealed = replace(sealed, entries=tuple(examined))
        condense(folder, sealed)
        sealed = seal(folder, with_mismatches(sealed))
        proofs = [proof for self_test in replayed.self_tests for proof in self_test.proofs]
        error = max(proof.error for proof in proofs)
        compared = f"{_counted(len(proofs), 'int_key')} in a fresh process, largest error {error:.1e}"
        tell.result("; ".join(filter(None, [compared, replayed.index_remarks])))
    return sealed


def _empty(folder: Path) -> None:
    """Deletes the contents of `folder`."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _padded(sources: Sequence[Source], prepared: Sequence[Prepared], dimensions: Sequence[Sequence[Dimension]]) -> str:
    """Says which dimensions are padded, and why an entry is never padded."""
    texts = []
    for source, lowerable, dimension in zip(sources, prepared, dimensions, strict=True):
        why = unpadded(source, lowerable)
        texts += (
            [", ".join([f"{row.name} {PADDED[row.pad]}" for row in dimension]) + (f": {why}" if why else "")] if dimension else []
        )
    return ", ".join(texts) or "no dimension"


def _default(chosen: Chosen) -> str:
    """Says which target "auto" chose, and why."""
    return "cpu: no GPU is here" if chosen.recorder == "host" else f"{chosen.target}, the GPU of this machine"


def _sizes(sources: Sequence[Source], sizes: SizesOption) -> dict[str, dict[str, tuple[int, ...]]]:
    sizes_by_entry = sizes_of_entries(sizes, {source.entry: source.dimensions for source in sources})
    many = len(sources) > 1
    return {
        source.entry: declared_sizes(sizes_by_entry[source.entry], source.dimensions, source.saved, source.entry if many else "")
        for source in sources
    }


def export_entries(
    sources: Sequence[Source], sizes: Mapping[str, dict[str, tuple[int, ...]]], tell: Tell, max_paths: int = MAX_PATHS
) -> list[Exported]:
    """Exports every entry of the model.  A constant has the same name in all of them.

    Exporting an entry turns the tensors that it writes to into buffers.  Entries that were exported before that are exported again.
    """
    exported = _exported(sources, sizes, tell, max_paths)
    while len(exported[0].flat.snapshot.owners()) < len(exported[-1].flat.snapshot.owners()):
        exported = _exported(sources, sizes, tell, max_paths)
    exported = with_unwritten(exported, max_paths)
    for entry in exported:
        refuse_branches(entry)
    exported = [with_bounded_outputs(entry) for entry in exported]
    if len(exported) == 1:
        return exported
    shared = with_shared_constants([entry.programs for entry in exported])
    return [replace(entry, programs=programs) for entry, programs in zip(exported, shared, strict=True)]


def _exported(
    sources: Sequence[Source], sizes: Mapping[str, dict[str, tuple[int, ...]]], tell: Tell, max_paths: int
) -> list[Exported]:
    exported = []
    for source, entry_tell in zip(sources, named_tells(tell, [source.entry for source in sources]), strict=True):
        entry_tell("torch.export")
        exported.append(export(source, sizes[source.entry], alone=len(sources) == 1, max_paths=max_paths, tell=entry_tell))
    return exported


def _refuse(checked: Sequence[Checked], options: Options) -> None:
    for rules in checked:
        refuse(rules, options.strict, options.allow, options.specialize)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _nodes(exported: Sequence[Programs]) -> str:
    """Says how many nodes every entry has, and why there is one program for each int_key."""
    nodes: dict[str, list[str]] = {}
    for programs in exported:
        counts = sorted({len(program.graph.nodes) for _, program in programs.distinct})
        reason = "" if programs.dynamic else f", exported per size: {programs.reason}"
        text = _counted(counts[0], "node") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} nodes"
        nodes.setdefault(reason, []).append(text)
    return "; ".join([f"{', '.join(texts)}{reason}" for reason, texts in nodes.items()])


def _recorded_options(options: Options, recorder: str) -> dict[str, str]:
    """Returns the options for the manifest's provenance."""
    named = {
        "target": options.target, "lower": options.lower, "specialize": options.specialize, "strict": str(options.strict).lower(),
    }  # fmt: skip
    if recorder == "cross-compile":
        named |= {"record": recorder, "prove": options.prove}
        if options.prove != "none":
            named["prove_budget"] = f"{options.prove_budget:g}"
    if options.world is not None:
        named["world"] = str(options.world)
    if options.split is not None:
        named["split"] = options.split
    if options.autotune:
        named["autotune"] = "true"
    if options.autotune_timeout is not None:
        named["autotune_timeout"] = f"{options.autotune_timeout:g}"
    if options.standalone is not None:
        named["standalone"] = str(options.standalone).lower()
    if options.train:
        named["train"] = "true"
    if options.fallback_ops:
        named["fallback_ops"] = ", ".join(options.fallback_ops)
    return named
