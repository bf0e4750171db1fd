"""What a measured process is told, and what it answers.  JSON between processes of one benchmark.

A job: `bundle` (its folder), `target` ("cpu" or "cuda"), `keys` (int_keys, in order), `orders` (each input's axes from outermost to
innermost in memory), `outputs` (how many), `written` (positions of inputs that a call changes), `call` (the manifest's tree),
`calls` (from the first state on until the exam's outputs are given), `state` (whether calls change buffers), `compared` (whether
outputs can be), `weights`, `model` (the user's, or ""), `program` and `onnx` (files that are made first).

An answer, once everything is ready: `laps` (seconds by phase), `memory` (see `child.resident`), `torch` (whether it is imported),
`errors` ({"error", "exact"} per int_key); on a GPU `device` (bytes beside the context), and of the bundle `gpu` and `driver`; of
torch.compile `hits` (of its disk cache).  To a request: `seconds`.  Of a process that fails: `failed` and `hint`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from cgbundle.format import archive
from cgbundle.format.schema import IntKey, Manifest


def write(folder: str, manifest: Manifest, keys: Sequence[IntKey], model: str, scratch: Path) -> Path:
    """The file that tells children what to serve."""
    job = {
        "bundle": folder,
        "target": manifest.target.kind,
        "keys": keys,
        "orders": [spec.order for spec in manifest.inputs],
        "outputs": len(manifest.outputs),
        "written": manifest.written,
        "call": manifest.call["call"],
        "calls": manifest.exam.calls,
        "state": any(weight.memory == "state" for weight in manifest.weights),
        "compared": manifest.random < 0,
        "weights": os.path.join(folder, archive.WEIGHTS),
        "model": os.path.abspath(model) if os.path.exists(model) else model,
        "program": os.fspath(scratch / "cgcompile_bench_program.py"),
        "onnx": os.fspath(scratch / "program.onnx"),
    }
    path = scratch / "job.json"
    path.write_text(json.dumps(job))
    return path
