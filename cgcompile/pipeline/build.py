"""The stages of a build, values in, values out: source -> export -> check -> padding -> lower, record, emit -> verify."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from cgbundle.format.schema import FORMAT_VERSION, Finding, Manifest, Provenance
from cgbundle.validate import host_code

from ..bundle.emit import seal, write_programs
from ..bundle.proof import mismatches, replay
from ..bundle.provenance import provenance
from ..checks import check, refuse
from ..export.export import export, refuse_branches
from ..export.programs import Programs
from ..export.signature import describe_signature
from ..model.declared_sizes import count_keys, declared_sizes
from ..model.devices.placing import placed
from ..model.flat_module import PREFIX
from ..model.load import load_source
from ..targets.build_spec import BuildSpec, ManifestParts
from ..targets.choice import CONDITIONALS, choose
from ..transforms.error_bounds import error_bounds
from ..transforms.output_aliases import manifest_aliases
from ..transforms.padding_proof import prove_padding
from ..transforms.prepared import prepare
from ..util.imports import quick_imports
from ..util.progress import Stages
from .destination import destination_path, staged_bundle
from .kernel_coverage import operators_without_kernel
from .records import Built, Options
from .training_mode import evaluated

BUILDERS = {"host": "cgcompile.targets.cpu.build", "capture": "cgcompile.capture.build", "trace": "cgcompile.offline.build"}
"""By the recorder of a `targets.choice.Chosen`: the module whose `build_parts` makes the target's half of a bundle."""


def build(model: Any, inputs: Callable[..., Any] | None, options: Options) -> Built:
    """See `cgcompile.build`."""
    stages = Stages(options.progress)
    chosen = choose(options.target, options.lower, options.specialize, options.record, options.prove)
    with ExitStack() as stack:
        with stages("source") as tell:
            loaded = load_source(model, inputs)
            sizes = declared_sizes(options.sizes, loaded.dimensions, loaded.saved)
            keys = count_keys(sizes, options.max_keys)
            destination = destination_path(options.out, loaded.name)
            folder = stack.enter_context(staged_bundle(destination, options.force))  # from here on it is this process's
            mode = stack.enter_context(evaluated(loaded, options.train))
            source = stack.enter_context(placed(loaded, chosen.device))
            with quick_imports():  # late: one recorder's modules (Triton, CUPTI, AOTInductor) are not needed by the others
                build_parts: Callable[..., ManifestParts] = import_module(BUILDERS[chosen.recorder]).build_parts
            tell(f"{source.name}, {_counted(keys, 'int_key')}{f'; {mode}' if mode else ''}")
        if chosen.recorder == "capture":
            from ..capture.build import started

            build_parts = partial(build_parts, processes=stack.enter_context(started(keys, options.lower, options.specialize)))
        with stages("export") as tell:
            exported = export(source, sizes)
            refuse_branches(exported)
            signature = describe_signature(exported)
            tell(_nodes(exported.programs))
        with stages("check") as tell:
            checked = check(
                exported,
                "cpu" if chosen.recorder == "host" else "cuda",
                options.host_ops,
                conditionals=chosen.recorder in CONDITIONALS,
            )
            refuse(checked, options.strict, options.waive, options.specialize)
            prepared = prepare(exported, signature, checked.functionalized, markers=bool(checked.on_host))
            if chosen.recorder == "trace":
                without = operators_without_kernel(prepared, checked.placements, sizes, chosen.target)
                checked = replace(checked, findings=(*checked.findings, *without))
                refuse(checked, options.strict, options.waive, options.specialize)
            tell(_counted(len(checked.findings), "finding"))
        with stages("padding") as tell:
            dimensions = prove_padding(source, prepared, sizes, tell)
            proved = [f"{d.name} by {d.pad}" if d.pad != "no" else f"{d.name} not" for d in dimensions]
            tell(", ".join(proved) or "no dimension")
        spec = BuildSpec(
            source=source, prepared=prepared, sizes=sizes, dimensions=dimensions, placements=checked.placements,
            target=chosen.target, recorder=chosen.recorder, lower=options.lower, specialize=options.specialize, prove=options.prove,
            prove_budget=options.prove_budget, waive=options.waive, torch_version=torch.__version__.partition("+")[0],
        )  # fmt: skip
        parts = build_parts(spec, folder, stages)
        write_programs(folder, prepared.programs)
        origin = provenance(source.origin or source.label, _recorded_options(options, chosen.recorder))
        manifest = _manifest(spec, parts, checked.findings, options.waive, origin)
        host_code.attach(folder, manifest)
        sealed = seal(folder, _with_mismatches(manifest))
        with stages("verify") as tell:
            if chosen.runs_here:
                examined = replay(folder, sealed, error_bounds(prepared, sealed.weights), options.waive)
                sealed = seal(folder, _with_mismatches(replace(sealed, exam=examined, findings=checked.findings)))
                error = max(proof.error for proof in examined.proofs)
                tell(f"{_counted(len(examined.proofs), 'int_key')} in a fresh process, largest error {error:.1e}")
            else:
                tell(f"structure and hashes; `cgcompile verify --run` replays it where a GPU of {chosen.target} is")
    return Built(path=destination, manifest=sealed, seconds=tuple(stages.seconds))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _nodes(programs: Programs) -> str:
    """How large the programs are."""
    counts = sorted({len(program.graph.nodes) for _, program in programs.each})
    nodes = _counted(counts[0], "node") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} nodes"
    return nodes if programs.dynamic else f"exported per size, {nodes}"


def _recorded_options(options: Options, recorder: str) -> dict[str, str]:
    """The options that the manifest names."""
    named = {
        "target": options.target, "lower": options.lower, "specialize": options.specialize, "strict": str(options.strict).lower(),
    }  # fmt: skip
    if recorder == "trace":
        named |= {"record": recorder, "prove": options.prove}
        if options.prove != "none":
            named["prove_budget"] = f"{options.prove_budget:g}"
    if options.train:
        named["train"] = "true"
    if options.host_ops:
        named["host_ops"] = ", ".join(options.host_ops)
    return named


def _manifest(
    spec: BuildSpec, parts: ManifestParts, findings: tuple[Finding, ...], waive: tuple[str, ...], origin: Provenance
) -> Manifest:
    prepared = spec.prepared
    names = [row.name for row in parts.weights]
    return Manifest(
        format=FORMAT_VERSION,
        name=spec.source.name,
        target=parts.target,
        dimensions=spec.dimensions,
        inputs=prepared.signature.inputs,
        written=prepared.written,
        outputs=prepared.signature.outputs,
        aliases=manifest_aliases(prepared.aliases, parts.weights),
        random=names.index(prepared.generator.removeprefix(PREFIX)) if prepared.generator else -1,
        call=prepared.signature.call,
        parameters=prepared.signature.parameters,
        result=prepared.signature.result,
        weights=parts.weights,
        memories=parts.memories,
        regions=parts.regions,
        programs=parts.programs,
        module_state=parts.module_state,
        findings=findings,
        waivers=tuple(sorted(waive)),
        exam=parts.exam,
        provenance=origin,
        files=(),
    )


def _with_mismatches(manifest: Manifest) -> Manifest:
    """The manifest with a finding for what was accepted though it differs."""
    return replace(manifest, findings=(*manifest.findings, *mismatches(manifest)))
