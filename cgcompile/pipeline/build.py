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

from cgbundle.format.schema import Manifest, Provenance
from cgbundle.validate import host_code

from ..bundle.condense import condense
from ..bundle.emit import seal, write_programs
from ..bundle.proof import mismatches, replay
from ..bundle.provenance import provenance
from ..bundle.ranks import Ranks
from ..errors import BuildError, ModelError
from ..export.export import export, refuse_branches, with_unwritten
from ..export.exported import Exported
from ..export.paths import MAX_PATHS
from ..export.programs import with_shared_constants
from ..export.signature.more_rows import same_with_more_rows
from ..export.signature.signature import describe_signature
from ..model.declared_sizes import Inputs, SizesOption, count_keys, declared_sizes, sizes_of_entries
from ..model.devices.placing import placed
from ..model.load import checked_donations, evaluated, load_evaluated, load_sources, with_rows
from ..model.nondeterminism.fresh_process import Place, cuda_left_alone, forked_models, models_at
from ..model.source import CPU, CUDA, Source
from ..model.tracing.held_tensors import own_buffers
from ..targets.architectures import capability_of
from ..targets.build_spec import BuildSpec, ManifestParts, manifest_of
from ..targets.choice import Chosen, Options, asks_gpu, choose
from ..targets.donations import check_layouts, donations_of
from ..targets.instruction_sets import level_of
from ..transforms.bounded.exports import with_bounded_outputs
from ..transforms.error_bounds import error_bounds
from ..transforms.padding.proof import prove_padding, unpadded
from ..transforms.prepared import Prepared
from ..util.disk_space import size
from ..util.garbage_collection import quick_imports
from ..util.progress import Stages, Tell, named_tells
from .destination import destination_path, staged_bundle
from .entries import agreed, checked_entries, refuse_host
from .records import Built
from .sequences import with_sequences

if TYPE_CHECKING:
    from ..capture.processes import RecorderProcesses

BUILDERS = {"host": "cgcompile.targets.cpu.build", "capture": "cgcompile.capture.build", "cross-compile": "cgcompile.offline.build"}
"""Recorder of a `targets.choice.Chosen` -> module whose `build_parts` writes the target's part of a bundle."""

PADDED = {"rows": "padded", "zeros": "padded with zeros", "no": "never padded"}
"""Text for each value of `Dimension.pad`."""

AUTOTUNE = "cgcompile.pipeline.best.build"
"""The module with `build_parts` for several lowerings."""


def build(
    model: Any,
    inputs: Inputs | None,
    options: Options,
    recorders: RecorderProcesses | None = None,
    *,
    ranks: Ranks | None = None,
    out_path: Path | None = None,
) -> Built:
    """See `cgcompile.build`.  `recorders`: processes of a fork server that was started before torch was imported.  `ranks`: the
    processes that build the other ranks of the model at the same time.  `out_path`: builds into this folder, and publishes
    nothing."""
    stages = Stages(options.progress)
    chosen_early = None if asks_gpu(options.target) else choose(options)
    with ExitStack() as stack:
        with stages("source") as tell:
            share = (ranks.rank, ranks.size) if ranks and not options.split else None
            with cuda_left_alone():
                loaded = load_sources(model, inputs, share)
                loaded = with_rows(loaded, options.state) if options.state else loaded
            mode = stack.enter_context(evaluated(loaded[0], options.train))
            fresh_stack = stack.enter_context(ExitStack())
            fresh = None if ranks or loaded[0].saved else fresh_stack.enter_context(forked_models(loaded))
            chosen = chosen_early or choose(options)  # after the fork, because it may start CUDA
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
        if first.rows and chosen.recorder == "capture" and options.lower == "eager":
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
            if first.rows:
                same_with_more_rows(exported, options.max_paths, tell)
            exported = with_sequences(exported, fresh)
            fresh = None
            fresh_stack.close()  # it holds a second copy of the weights
            signatures = [describe_signature(entry) for entry in exported]
            tell.result(_nodes(exported))
        with stages("check") as tell:
            entries = checked_entries(exported, signatures, chosen, options)
            if ranks:
                refuse_host(entries)
            if first.rows:
                _refuse_rows(entries, ranks is not None)
            tell.result(_counted(sum(len(entry.findings) for entry in entries), "finding"))
        with stages("padding") as tell:
            tells = named_tells(tell, [entry.name for entry in entries])
            dimensions = [prove_padding(entry, entry_tell) for entry, entry_tell in zip(entries, tells, strict=True)]
            if ranks:
                dimensions = [agreed(by_rank) for by_rank in zip(*ranks.gathered(dimensions), strict=True)]
            entries = [replace(entry, dimensions=rows) for entry, rows in zip(entries, dimensions, strict=True)]
            tell.result(_padded(entries))
        if ranks and options.split:
            from ..offline.layers.shares import layer_shares

            with stages("split") as tell:
                entries = layer_shares(entries, ranks)
                tell.result(f"{size(sum(value.nbytes for value in entries[0].weights.values()))} on rank {ranks.rank}")
        spec = BuildSpec(
            entries=tuple(entries),
            donations=donations_of(checked_donations(options.donations, first.label) or first.donations, entries),
            options=options, chosen=chosen, torch_version=torch.__version__.partition("+")[0], ranks=ranks,
        )  # fmt: skip
        origin = provenance(first.origin or first.label, options.recorded(chosen.recorder))
        sealed = _finished(spec, build_parts, origin, folder, stages)
        if sealed is None:
            _empty(folder)
            spec = replace(spec, options=replace(options, standalone=False))
            sealed = _finished(spec, build_parts, origin, folder, stages)
            assert sealed is not None
    return Built(path=destination, manifest=sealed, seconds=tuple(stages.seconds))


def _refuse_rows(entries: Sequence[Prepared], several: bool) -> None:
    """Raises state-refused for a load-time number of state rows if the model uses several GPUs, or the host beside a GPU."""
    if several:
        problem, remedy = "the model is over several GPUs", "leave state() out"
    elif any(placed for entry in entries for placed in entry.placements.values()):
        problem, remedy = "operations of the model are on the host, beside a GPU", "`cgcompile check` lists them"
    else:
        return
    raise ModelError(
        "state-refused", f"{entries[0].source.label}: state: {problem}, so a load cannot choose the number of rows", remedy
    )


def _reload(model: Any, options: Options) -> Callable[[], Sequence[Source]] | None:
    """Returns a function that loads the model again, or None for a module in memory."""
    return None if isinstance(model, torch.nn.Module) else partial(load_evaluated, model, options.train)


def _finished(
    spec: BuildSpec, build_parts: Callable[..., ManifestParts], origin: Provenance, folder: Path, stages: Stages
) -> Manifest | None:
    """Writes the bundle to `folder`, seals it, and replays it if this machine can.  If the replay fails for a CPU bundle that has
    torch's functions, and `standalone` is None, returns None: the caller then uses torch's libraries, which round as eager PyTorch
    does."""
    parts = build_parts(spec, folder, stages)
    for entry in spec.entries:
        write_programs(folder, entry.programs, entry.name)
    manifest = manifest_of(spec, parts, origin)
    check_layouts(manifest)
    with stages("verify") as tell:
        host_code.attach(folder, manifest)
        if not spec.chosen.runs_here:  # otherwise it is condensed after the replay, which needs all expected values
            condense(folder, manifest)
        sealed = seal(folder, _with_mismatches(manifest))  # hashes every file, which takes long for large weights
        if not spec.chosen.runs_here:
            tell.result(f"every hash and invariant; `cgcompile verify --run` replays it where a GPU of {spec.chosen.target} is")
            return sealed
        bounds = [error_bounds(entry, sealed.weights) for entry in spec.entries]
        try:
            judges = spec.entries if spec.chosen.recorder == "host" else ()
            replayed = replay(folder, sealed, bounds, spec.options.allow, judges)
        except BuildError as refusal:
            linked = sealed.target.torch or spec.options.standalone is not None or spec.chosen.recorder != "host"
            if linked or refusal.code != "proof-failed":
                raise
            tell.result(f"building again with torch's libraries, because: {refusal}")
            return None
        examined = [
            replace(row, self_test=self_test, findings=entry.findings)
            for row, self_test, entry in zip(sealed.entries, replayed.self_tests, spec.entries, strict=True)
        ]
        sealed = replace(sealed, entries=tuple(examined))
        condense(folder, sealed)
        sealed = seal(folder, _with_mismatches(sealed))
        proofs = [proof for self_test in replayed.self_tests for proof in self_test.proofs]
        error = max(proof.error for proof in proofs)
        compared = f"{_counted(len(proofs), 'int_key')} in a fresh process, largest error {error:.1e}"
        tell.result("; ".join(filter(None, [compared, replayed.index_remarks])))
    return sealed


def _with_mismatches(manifest: Manifest) -> Manifest:
    """Adds findings for accepted differences."""
    entries = [replace(entry, findings=(*entry.findings, *mismatches(manifest, entry))) for entry in manifest.entries]
    return replace(manifest, entries=tuple(entries))


def _empty(folder: Path) -> None:
    """Deletes the contents of `folder`."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _padded(entries: Sequence[Prepared]) -> str:
    """Says which dimensions are padded, and why an entry is never padded."""
    texts = []
    for entry in entries:
        why = unpadded(entry)
        pads = ", ".join([f"{row.name} {PADDED[row.pad]}" for row in entry.dimensions])
        texts += [pads + (f": {why}" if why else "")] if pads else []
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


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _nodes(exported: Sequence[Exported]) -> str:
    """Says how many nodes every entry has, and why there is one program for each int_key."""
    nodes: dict[str, list[str]] = {}
    for programs in [entry.programs for entry in exported]:
        counts = sorted({len(program.graph.nodes) for _, program in programs.distinct})
        reason = "" if programs.dynamic else f", exported per size: {programs.reason}"
        text = _counted(counts[0], "node") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} nodes"
        nodes.setdefault(reason, []).append(text)
    return "; ".join([f"{', '.join(texts)}{reason}" for reason, texts in nodes.items()])
