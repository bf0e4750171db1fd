"""build: source -> export -> check -> padding -> lower -> (record) -> emit -> verify, each stage values in, values out."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgbundle.format import archive
from cgbundle.format.publish import staged
from cgbundle.format.schema import FORMAT_VERSION, Finding, Manifest

from .errors import BuildError, ModelError
from .model.declared_sizes import Given, count_keys, declared_sizes
from .util.progress import Stages, Watcher, silent

if TYPE_CHECKING:
    from .targets.build_spec import BuildSpec, ManifestParts

MAX_KEYS = 64
"""int_keys that are built without being asked: each costs runs of the model, an exam, and on a GPU a recording."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A published bundle, its manifest, and the seconds that each stage took."""

    path: Path
    manifest: Manifest
    seconds: tuple[tuple[str, float], ...]


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Export and Inductor warn about their own insides, which a user of cgcompile can do nothing about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.|copyreg")
        yield


@quiet_torch()
def build(
    model: Any,
    inputs: Callable[..., Any] | None = None,
    *,
    sizes: Given = (),
    out: str | os.PathLike[str] | None = None,
    target: str = "auto",
    strict: bool = False,
    waive: Sequence[str] = (),
    lower: str = "inductor",
    specialize: str = "size",
    recorder: str = "auto",
    prove: str = "interpret",
    host_ops: Sequence[str] = (),
    force: bool = False,
    max_keys: int = MAX_KEYS,
    progress: Watcher | None = None,
) -> Built:
    """Builds a bundle and publishes it at `out` (default: the model's name + `.cgb` in the current folder).

    `model`: path of a model.py, `package.module:attribute`, path of a saved .pt2, or a module (then `inputs` makes its example
    inputs). `sizes`: of the declared dimensions, e.g. [1, 8, 32] or {"batch": [1, 8], "seq": [128]}.  `target`: auto, cuda,
    sm_90 and its kind (a GPU that need not be here), or cpu.  `strict`: findings that put operations on the host are errors.
    `waive`: rules whose findings are accepted; the manifest names them (what is refused now cannot be waived).  `lower`: eager,
    inductor or max-autotune; the cpu target has inductor alone.  `specialize`: "size" lowers every int_key for itself, "shared"
    all at once with dynamic shapes (fewer images, slower kernels).  `recorder`: capture (a GPU that is here), trace (without), or
    auto.  `prove`: what shows that a bundle is right whose GPU is not here, interpret or none; all others are replayed.
    `host_ops`: operators that are kept on the host between two graphs, e.g. "mylib::op".  `force`: replace an existing bundle.
    `progress` is told what happens.

    Raises a CgbundleError (see errors.py here and in cgbundle); nothing is published then.
    """
    need_torch()
    import torch

    from .bundle.emit import seal, write_program
    from .bundle.exam import exam_calls
    from .bundle.proof import replay
    from .bundle.provenance import provenance
    from .checks import check, functional, placements, refuse, refuse_written, state_buffers, written_inputs
    from .export.export import export
    from .model.flat_module import PREFIX, Computed
    from .model.load import load_source
    from .partition.markers import without_markers
    from .targets.build_spec import BuildSpec
    from .targets.choice import choose
    from .transforms.output_aliases import find_aliases
    from .transforms.padding_proof import prove_padding
    from .transforms.rng.rewrite import draws, generator_buffer, with_generator

    stages = Stages(progress or silent)
    chosen = choose(target, lower, specialize, recorder, prove)
    with stages("source") as tell:
        source = load_source(model, inputs)
        wanted = declared_sizes(sizes, source.dimensions)
        keys = count_keys(wanted, max_keys)
        destination = _destination(out, source.name, force)
        tell(f"{source.name}, {keys} int_key{'s' if keys > 1 else ''}")
    with stages("export") as tell:
        exported = export(source, wanted)
        tell(f"{len(exported.program.graph.nodes)} nodes")
    with stages("check") as tell:
        signature = functional(exported.program)
        findings = check(exported, "cpu" if chosen.target == "cpu" else "cuda", host_ops, signature)
        refuse(findings, strict, waive)
        placed = placements(findings, exported) if chosen.target != "cpu" else {}
        refuse_written(findings, chosen.recorder, len(placed))
        if placed and specialize == "shared":
            raise ModelError(
                "check-refused",
                f"specialize='shared': {len(placed)} operations run on the host, and their regions are lowered for every size",
                "leave --specialize out",
            )
        if not placed:
            exported = replace(exported, program=without_markers(exported.program))
        if draws(exported.program):
            exported = with_generator(exported)
            signature = functional(exported.program)
        if generator_buffer(exported.program):
            exported = replace(exported, computed=Computed(exported.program, PREFIX))
        exported = replace(exported, written=written_inputs(signature), state=state_buffers(signature))
        exported = replace(exported, aliases=find_aliases(source, exported, wanted), calls=exam_calls(source, exported, wanted))
        tell(f"{len(findings)} finding{'s' if len(findings) != 1 else ''}")
    with stages("padding") as tell:
        dimensions = prove_padding(source, exported, wanted, tell)
        proved = [f"{d.name} by {d.pad}" if d.pad != "no" else f"{d.name} not" for d in dimensions]
        tell(", ".join(proved) or "no dimension")
    job = BuildSpec(
        source=source, exported=exported, sizes=wanted, dimensions=dimensions, placements=placed, target=chosen.target,
        recorder=chosen.recorder,
        lower=lower, specialize=specialize, prove=prove,
        torch_version=torch.__version__.partition("+")[0],
    )  # fmt: skip
    with staged(destination, replace=force) as stage:
        parts = _parts(job, stage, stages)
        write_program(stage / archive.PROGRAM, exported.program)
        options = {"target": target, "lower": lower, "specialize": specialize, "strict": str(strict).lower()}
        if chosen.recorder == "trace":
            options |= {"record": chosen.recorder, "prove": prove}
        if host_ops:
            options["host_ops"] = ", ".join(host_ops)
        manifest = seal(stage, _manifest(job, parts, findings, waive, provenance(source.label, options)))
        with stages("verify") as tell:
            if chosen.runs_here:
                proofs = replay(stage, manifest)
                manifest = seal(stage, replace(manifest, exam=replace(manifest.exam, proofs=proofs)))
                tell(
                    f"{len(proofs)} int_key{'s' if keys > 1 else ''} in a fresh process, "
                    f"largest error {max(proof.error for proof in proofs):.1e}"
                )
            else:
                tell(f"structure and hashes; `cgcompile verify --run` replays it where a GPU of {chosen.target} is")
    return Built(path=destination, manifest=manifest, seconds=tuple(stages.seconds))


def _parts(job: BuildSpec, stage: Path, stages: Stages) -> ManifestParts:
    if job.recorder == "host":
        from .targets.cpu import build as build_cpu

        return build_cpu.build_parts(job, stage, stages)
    if job.recorder == "trace":
        from .offline import build as build_trace

        return build_trace.build_parts(job, stage, stages)
    from .capture import build as build_cuda

    return build_cuda.build_parts(job, stage, stages)


def _manifest(job: BuildSpec, parts: ManifestParts, findings: tuple[Finding, ...], waive: Sequence[str], origin: Any) -> Manifest:
    from .model.flat_module import PREFIX
    from .transforms.output_aliases import manifest_aliases
    from .transforms.rng.rewrite import generator_buffer

    generator = generator_buffer(job.exported.program).removeprefix(PREFIX)
    names = [row.name for row in parts.weights]
    return Manifest(
        format=FORMAT_VERSION,
        name=job.source.name,
        target=parts.target,
        dimensions=job.dimensions,
        inputs=job.exported.inputs,
        written=job.exported.written,
        outputs=job.exported.outputs,
        aliases=manifest_aliases(job.exported, parts.weights),
        random=names.index(generator) if generator else -1,
        call=job.exported.call,
        result=job.exported.result,
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


def need_torch() -> None:
    for package in ("torch", "numpy"):
        if importlib.util.find_spec(package) is None:
            raise BuildError(
                "extra-missing", f"building needs {package}, which is not installed", "pip install 'cgcompile[compile]'"
            )


def _destination(out: str | os.PathLike[str] | None, name: str, force: bool) -> Path:
    """Where the bundle goes.  Raises output-exists, output-unwritable: before minutes of work, not after."""
    path = Path(out) if out is not None else Path(f"{name}.cgb")
    if path.exists():
        if not path.is_dir() or not ((path / archive.MANIFEST).exists() or not any(path.iterdir())):
            raise BuildError("output-unwritable", f"{path}: exists and is no bundle", "choose another name with -o")
        if not force:
            raise BuildError("output-exists", f"{path}: exists", "give --force to replace it, or choose another name with -o")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise BuildError("output-unwritable", f"{path}: the folder {folder} does not exist")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".cgcompile-", dir=folder))
    except OSError as error:
        raise BuildError("output-unwritable", f"{path}: the folder {folder} cannot be written: {error.strerror}") from None
    return path
