"""`cgcompile build`: builds a bundle, with a line per stage."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import UsageError
from ..int_keys import spell
from ..options import (
    AdapterRank,
    Adapters,
    Chunk,
    Context,
    Dtype,
    FallbackOps,
    Lanes,
    MaxPaths,
    ModelName,
    Weights,
    rule_names,
    target_names,
)
from ..output import duration, first_lines, listed, record, show, write_json
from ..progress import watching

if TYPE_CHECKING:
    from rich.table import Table

    from cgbundle.format.schema import EntrySpec, Finding, Manifest
    from cgcompile.pipeline.build import Built

    from ..output import Field

PROVED = {
    "replay": "replayed in a fresh process, compared with eager PyTorch",
    "interpret": "interpreted on the CPU over poisoned memory, compared with eager PyTorch",
}
"""Texts for the methods of a `schema.Proof`, without "none"."""


def build(
    model: ModelName,
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--sizes", metavar="SIZES", help="Sizes to record: 1,8,32; by dimension batch=1,8; by entry decode:batch=1,8."
        ),
    ] = None,
    context: Context = None,
    lanes: Lanes = None,
    chunk: Chunk = None,
    dtype: Dtype = None,
    weights: Weights = None,
    adapters: Adapters = None,
    adapter_rank: AdapterRank = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="OUT", help="Path of the bundle. Default: the model's name + .cgb.")
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            "--target",
            metavar="TARGET",
            help="auto, cuda, cpu, a GPU architecture (sm_90), or a level of CPUs (x86-64-v3). Several: sm_80,sm_90,x86-64-v3.",
            autocompletion=target_names,
        ),
    ] = "auto",
    lower: Annotated[
        Literal["eager", "inductor", "max-autotune"], typer.Option("--lower", help="How the model is compiled.")
    ] = "inductor",
    autotune: Annotated[
        bool,
        typer.Option("--autotune", help="Try every --lower option, keep the fastest at every size (on the GPU of the target)."),
    ] = False,
    autotune_timeout: Annotated[
        float | None,
        typer.Option("--autotune-timeout", metavar="SECONDS", help="Time limit of --autotune. Default: no limit."),
    ] = None,
    specialize: Annotated[
        Literal["size", "shared"], typer.Option("--specialize", help="Kernels for every size, or for all sizes at once.")
    ] = "size",
    recorder: Annotated[
        Literal["auto", "capture", "cross-compile"],
        typer.Option("--record", help="Capture on a GPU of this machine, or cross-compile without one."),
    ] = "auto",
    prove: Annotated[
        Literal["interpret", "none"], typer.Option("--prove", help="How a cross-compiled bundle is verified.")
    ] = "interpret",
    prove_budget: Annotated[
        float, typer.Option("--prove-budget", metavar="SECONDS", help="Time limit of --prove; one int_key is always verified.")
    ] = 120,
    train: Annotated[bool, typer.Option("--train", help="Keep a model in training mode instead of calling eval().")] = False,
    world: Annotated[
        int | None,
        typer.Option("--world", metavar="N", help="Number of GPUs of the model: model(rank, world) returns each share."),
    ] = None,
    split: Annotated[
        Literal["layers"] | None,
        typer.Option("--split", metavar="layers", help="With --world: distribute the layers of a plain model() over the GPUs."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if an operation cannot be in a graph.")] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="RULE",
            help="Allow the findings of a rule; may be repeated. Severity refuse cannot be allowed.",
            autocompletion=rule_names,
        ),
    ] = None,
    fallback_ops: FallbackOps = None,
    standalone: Annotated[
        bool | None,
        typer.Option(
            "--standalone/--no-standalone",
            help="For the CPU: the bundle contains all functions that it needs of torch's libraries. Default: if possible.",
            show_default=False,
        ),
    ] = None,
    max_keys: Annotated[
        int, typer.Option("--max-keys", min=1, metavar="N", help="Maximum number of int_keys (product of the sizes).")
    ] = 64,
    max_paths: MaxPaths = 64,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing bundle.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also show every step, and the CPU time and memory of each stage.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of the bundle's path.")] = False,
) -> None:
    """Turn a PyTorch model into a bundle.

    A model file defines model(), which returns the module, and inputs(),
    which returns example inputs; the parameters of inputs() are the
    dimensions of --sizes. A folder of a language model from the Hugging
    Face Hub needs no model file and no sizes.

    \b
    cgcompile build ~/models/Qwen3-0.6B
    cgcompile build ~/models/Qwen3-0.6B --context 4096 --lanes 1,16
    cgcompile build gpt.py --sizes 1,8,32
    cgcompile build minilm.py --sizes batch=1,8 --sizes seq=32,128
    cgcompile build gpt.py --sizes 1,8,32 --target sm_90
    cgcompile build gpt.py --sizes 1,8,32 --target x86-64-v3
    cgcompile build llama.py --sizes 1,8 --target sm_90 --world 2
    cgcompile build large.py --sizes 1,8 --target sm_90 --world 2 --split layers
    """
    import cgcompile

    from ..estimates import Estimate

    if quiet and verbose:
        raise UsageError("--quiet and --verbose cannot be used together", "leave one of them out")
    # OpenMP reads this variable when torch is loaded.  Threads that spin while they wait slow down other processes:
    # on two cores a build of MiniLM took 90 s instead of 42.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    begin = time.perf_counter()
    program = os.path.abspath(model) if os.path.exists(model) else model
    settings = program, sizes, context, lanes, dtype, weights, adapters, lower, prove, standalone
    estimate = None if quiet else Estimate(settings, target)
    with watching(quiet, verbose, estimate) as progress:
        built = cgcompile.build(
            model, sizes=list(sizes or ()), out=out, target=target, strict=strict, allow=tuple(allow or ()), lower=lower,
            specialize=specialize, record=recorder, prove=prove, prove_budget=prove_budget, autotune=autotune,
            autotune_timeout=autotune_timeout, train=train, fallback_ops=tuple(fallback_ops or ()), standalone=standalone,
            force=force, max_keys=max_keys, max_paths=max_paths, world=world, split=split, context=context, lanes=lanes or (),
            chunk=chunk or (),
            dtype=dtype, weights=weights, adapters=adapters or 0,
            adapter_rank=adapter_rank, progress=progress or "silent",
        )  # fmt: skip
    if estimate is not None:
        estimate.keep()
    if not quiet:
        stages = progress.stages() if verbose and progress else None
        show(_summary(built, model, time.perf_counter() - begin, stages), sys.stderr)
    if as_json:
        from ..summary import plain

        write_json({"seconds": dict(built.seconds), **plain(str(built.path), built.manifest)})
    else:
        sys.stdout.write(f"{built.path}\n")


def _summary(built: Built, model: str, seconds: float, stages: Table | None) -> Table:
    from cgserve.language.bundle_model import is_language_model

    from .. import summary
    from ..inspection import overview, program_rows

    manifest, many = built.manifest, len(built.manifest.entries) > 1
    distinct = dict.fromkeys([finding for entry in manifest.entries for finding in entry.findings])
    served = is_language_model(manifest)  # then the server pads calls, and every call writes to the cache: no notes on these
    findings = list(dict.fromkeys([_line(finding) for finding in distinct if not (served and finding.rule == "mutated-buffer")]))
    fields: list[Field] = [
        ("built", f"{built.path} ({summary.bulk(manifest)}) in {duration(seconds)}"),
        ("target", ", ".join(built.variants) or summary.target(manifest.target)),
        *([("world", summary.world(manifest))] if manifest.world else []),
    ]
    for entry in manifest.entries:
        fields += [("entry", summary.entry_lines(manifest, entry))] if many else []
        fields.append(("sizes", [summary.sizes(manifest, entry), *summary.axes(entry)]))
        if entry.dimensions:
            fields.append(("padding", [summary.padding(dimension) for dimension in entry.dimensions]))
    fields.append(("memory", summary.memory_lines(manifest)))
    if any(row.reason in ("baked", "folded") for row in manifest.frozen):  # these weights cannot be updated later
        fields.append(("update", overview.update(manifest)))
    fields.append(("files", summary.files(manifest)))
    for entry in manifest.entries:
        suffix = f" {entry.name}" if many else ""
        fields += [(f"programs{suffix}", program_rows.programs(entry)), *program_rows.lowering_fields(entry, suffix)]
        fields.append((f"proof{suffix}", _proof(manifest, entry, dict(built.seconds))))
    notes = [
        f"{entry.name}: {line}" if many else line
        for entry in manifest.entries if not served for line in summary.unpadded(entry)
    ]  # fmt: skip
    return record([
        *fields,
        *([("findings", first_lines(findings))] if findings else []),
        *([("allowed", listed(manifest.allowed))] if manifest.allowed else []),
        *([("stages", stages)] if stages else []),
        *([("serve", summary.serve_line(str(built.path), model))] if served else []),
        ("load", summary.load_lines(str(built.path), manifest)),
        *([("note:", notes)] if notes else []),
    ])  # fmt: skip


def _line(finding: Finding) -> str:
    """Formats a finding: `mutated-buffer: forward() writes to the buffer 'seen' (m.py:9)`."""
    return f"{finding.rule}: {finding.message}" + (f" ({finding.where})" if finding.where else "")


def _proof(manifest: Manifest, entry: EntrySpec, seconds: Mapping[str, float]) -> list[str]:
    """Returns a line per method of proof: the number of int_keys, and the error nearest to its bound.  `seconds`: by stage."""
    from ..inspection.program_rows import near_recording

    proofs, lines = entry.self_test.proofs, []
    for method, meaning in PROVED.items():
        rows = [proof for proof in proofs if proof.method == method]
        if rows:
            worst = max(rows, key=lambda proof: proof.error / proof.tolerance if proof.tolerance else proof.error)
            share = "" if len(rows) == len(proofs) else f"{len(rows)} of {len(proofs)} int_keys "
            allowed = f"allowed {worst.tolerance:.1e}" if worst.tolerance else "all are equal"
            budget = dict(manifest.provenance.options).get("prove_budget") if method == "interpret" else None
            spent = f", in {seconds['interpret']:.0f} s (limit {budget} s)" if budget and "interpret" in seconds else ""
            lines.append(f"{share}{meaning}: largest error {worst.error:.1e}, {allowed}{spent}")
    if near_recording(entry):
        lines.append(f"at most {max(proof.distance for proof in proofs):.1e} from what was recorded")
    keys = [spell(proof.key) for proof in proofs if proof.method == "none"]
    if keys:
        label = "not proved" if len(keys) == len(proofs) else f"{len(keys)} of {len(proofs)} int_keys not proved: {listed(keys)}"
        lines.append(f"{label}: run `cgcompile verify --run` on a machine with a GPU of {manifest.target.arch}")
    return lines
