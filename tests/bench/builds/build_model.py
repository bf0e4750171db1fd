"""Child: `build_model.py NAME LEVEL OUT` builds a model of built_models.py for this machine's GPU and prints a row as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import cgcompile
from cgbundle import CgbundleError
from cgbundle.format import file_names
from cgbundle.format.schema import Manifest
from cgbundle.format.table import Table
from tests.bench.builds import built_models


def main(name: str, level: str, out: str) -> int:
    """Prints the row, or {"error", "kind"} if the build rejects the model."""
    model = built_models.BY_NAME[name]
    start = time.perf_counter()
    try:
        network, inputs = built_models.make_model(model)
        built = cgcompile.build(
            network, inputs, sizes=model.sizes, out=out, target="auto", lower=level, force=True, progress=watcher(start)
        )
    except CgbundleError as error:
        print(json.dumps({"error": str(error), "kind": error.kind, "hint": error.hint}))
        return 1
    print(
        json.dumps(described(Path(out), built.manifest) | {"seconds": time.perf_counter() - start, "stages": dict(built.seconds)})
    )
    return 0


def watcher(start: float) -> Any:
    """Returns a progress function that writes finished stages to standard error."""

    def watch(event: cgcompile.Event) -> None:
        print(f"{time.perf_counter() - start:.1f} {event.stage} {event.state} {event.text}", file=sys.stderr, flush=True)

    return watch


def described(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Returns what the manifest and the graph tables say about the bundle."""
    entry, nodes = manifest.entries[0], []
    for program in entry.programs:
        steps = [step.file for step in program.steps if step.kind == "graph"]
        nodes.append(sum(len(Table((path / file).read_bytes(), file).kind) for file in steps))
    worst = max(entry.self_test.proofs, key=lambda proof: proof.error / (proof.tolerance or 1.0))
    sizes = {file.path: file.bytes for file in manifest.files}
    return {
        "target": manifest.target.arch,
        "keys": [list(program.key) for program in entry.programs],
        "nodes": nodes,
        "images": sum(name.startswith("kernels/") for name in sizes),
        "image bytes": sum(size for name, size in sizes.items() if name.startswith("kernels/")),
        "graph bytes": sum(size for name, size in sizes.items() if name.startswith("graphs/")),
        "weight bytes": sizes[file_names.WEIGHTS],
        "bytes": sum(sizes.values()),
        "memories": dict(manifest.memories),
        "arenas": [program.arena for program in entry.programs],
        "pad": {dimension.name: dimension.pad for dimension in entry.dimensions},
        "module state": bool(manifest.module_state),
        "self_test": entry.self_test.compare,
        "methods": sorted({proof.method for proof in entry.self_test.proofs}),
        "difference": worst.error,
        "tolerance": worst.tolerance,
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
