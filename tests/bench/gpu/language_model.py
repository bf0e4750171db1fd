"""Benchmarks a large language model with random weights: compares its bundle with transformers, and the bandwidth of its steps with
that of a copy.

    language_model.py folder NAME FOLDER              writes a model of tests/helpers/models/language_models.py, with random weights
    language_model.py compare BUNDLE FOLDER CACHE WAY...   each WAY (bundle, eager, compile) in a new process
    language_model.py steps BUNDLE [CONTEXT...]       tokens a second at every recorded number of lanes, and GB/s read

Every line is JSON and printed at once.  `compare` keeps torch.compile's cache in CACHE: a second run is a warm start.
`steps` needs no torch; a separate process measures the bandwidth of a copy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from array import array
from itertools import chain
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import cgbundle
from cgbundle.format.archive import Archive
from cgbundle.format.schema import DTYPES
from cgbundle.tensors.tensor import from_bytes
from cgcompile.errors import BuildError
from cgcompile.tools.bench.processes import WorkerProcess, compiler_cache
from cgcompile.tools.generation.layout import read_layout
from cgcompile.tools.generation.measure import BATCHES, PROMPT, TOKENS, lengths

ROOT = Path(__file__).parents[3]
STEPS = 64
GREEDY = (0, 0, 1, 1, 0, 0, 0, 0)
"""As in cgcompile/language_models/sampling.py, which imports torch."""
COPY = """
import torch
a, b = [torch.empty(1 << 31, dtype=torch.uint8, device="cuda") for _ in range(2)]
begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
for turn in range(6):
    begin.record(); b.copy_(a); end.record()
    torch.cuda.synchronize()
print(2 * a.numel() / begin.elapsed_time(end) / 1e6)
"""


def folder(name: str, out: str) -> None:
    """Writes the model in the Hub's layout, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    sys.path.insert(0, str(ROOT))
    from tests.helpers.models.language_models import configuration

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(configuration(name), dtype=torch.bfloat16)
    model.save_pretrained(out, max_shard_size="4GB")
    say(folder=out, parameters=sum(parameter.numel() for parameter in model.parameters()))


def compare(bundle: str, model: str, cache: str, variants: list[str]) -> None:
    """Prints the results of all processes of `cgcompile bench --generate`; if BUNDLE is "-", only those of transformers."""
    settings: dict[str, Any] = {
        "bundle": os.path.abspath(bundle),
        "model": os.path.abspath(model),
        "threads": None,
        "rounds": 2 if "bundle" in variants else 1,
    }
    batches: tuple[int, ...]
    if bundle == "-":
        vocabulary = json.loads(Path(model, "config.json").read_text())["vocab_size"]
        settings |= {"dtype": "bfloat16", "target": "cuda", "vocabulary": vocabulary}
        prompt, tokens, batches = PROMPT, TOKENS, BATCHES
    else:
        manifest = Archive(bundle).manifest
        layout = read_layout(manifest, PROMPT)
        prompt, tokens, batches = lengths(layout)
        settings |= {
            "dtype": layout.dtype, "target": manifest.target.kind, "vocabulary": layout.vocabulary, "prefill": layout.prefill,
            "several": layout.several,
            "decode": layout.decode, "sampling": layout.sampling, "each": -(-(prompt + tokens + 1) // layout.page),
        }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        job = Path(scratch, "job.json")
        job.write_text(json.dumps({**settings, "prompt": prompt, "tokens": tokens, "batches": batches}))
        for variant in variants:
            worker = f"cgcompile.tools.generation.{'bundle' if variant == 'bundle' else 'torch'}_worker"
            arguments: list[Any] = [job] if variant == "bundle" else [variant, job]
            environment = {} if variant == "bundle" else compiler_cache(Path(cache))
            begin = perf_counter()
            try:
                with WorkerProcess(worker, *arguments, log=Path(scratch, f"{variant}.log"), environment=environment) as process:
                    answer = process.answer()
            except BuildError as error:
                say(way=variant, failed=str(error), process=perf_counter() - begin)
                continue
            generated = answer.pop("made")
            say(way=variant, prompt=prompt, tokens=tokens, **answer, begins=generated[:12], process=perf_counter() - begin)


def steps(bundle: str, contexts: list[int]) -> None:
    """Times greedy steps at every recorded number of lanes, after contexts of these lengths; the cache holds zeros."""
    copied = subprocess.run([sys.executable, "-c", COPY], capture_output=True, text=True, check=False).stdout.strip()
    copy = float(copied) if copied else 0.0
    program = cgbundle.load(bundle)
    layout, rows = read_layout(program.manifest, PROMPT), program.manifest.weights
    for batch, blocks in layout.decode:
        for context in contexts:
            per_lane = -(-(context + STEPS + 1) // layout.page)
            if per_lane > blocks or per_lane * batch >= layout.pages:
                say(lanes=batch, context=context, skipped="the bundle has too few pages")
                continue
            tables = [[*range(1 + lane * per_lane, 1 + (lane + 1) * per_lane), *[0] * (blocks - per_lane)] for lane in range(batch)]
            pages = from_bytes(array("q", chain.from_iterable(tables)), "int64", (batch, blocks))
            count, slot = [from_bytes(array("q", values), "int64", (batch,)) for values in ([1] * batch, range(1, batch + 1))]
            sampling = tuple(
                [
                    from_bytes(array("f" if dtype == "float32" else "q", [value] * batch), dtype, (batch,))
                    for value, dtype in zip(GREEDY, layout.sampling, strict=True)
                ]
            )
            best = float("inf")
            for _ in range(3):
                ids, begin = [3] * batch, perf_counter()
                for step in range(STEPS):
                    start = from_bytes(array("q", [context + step] * batch), "int64", (batch,))
                    output = program.decode(from_bytes(array("q", ids), "int64", (batch, 1)), count, start, pages, slot, sampling)
                    ids = output["token"].tolist()
                best = min(best, (perf_counter() - begin) / STEPS)
            read = weight_bytes(rows) + batch * context * cache_bytes(rows)
            say(
                lanes=batch, context=context, milliseconds=best * 1e3, tokens_per_second=batch / best, gigabytes=read / 1e9,
                read_per_second=read / best / 1e9, copy=copy, share_of_copy=read / best / 1e9 / copy if copy else None,
            )  # fmt: skip


def weight_bytes(rows: Any) -> int:
    """Returns the bytes of weights that a step reads. Of embeddings that are not tied to the head, a step reads only one row."""
    places: dict[int, int] = {}
    names: dict[int, str] = {}
    for row in rows:
        if row.memory == "weights" and row.shape:
            places[row.offset] = DTYPES[row.dtype] * prod(row.shape)
            names[row.offset] = f"{names.get(row.offset, '')} {row.name}"
    heads = {place for place, name in names.items() if "lm_head" in name}
    skipped = {place for place, name in names.items() if heads and "embed" in name and place not in heads}
    return sum(size for place, size in places.items() if place not in skipped)


def cache_bytes(rows: Any) -> int:
    """Returns the bytes of one token in the cache of all layers."""
    total = 0
    for row in rows:
        if row.memory == "state" and row.name.startswith(("keys_", "values_")):
            _, heads, _, dim = row.shape
            total += heads * dim * DTYPES[row.dtype]
    return total


def say(**fields: object) -> None:
    print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}), flush=True)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "folder":
        folder(*arguments)
    elif command == "compare":
        compare(arguments[0], arguments[1], arguments[2], arguments[3:])
    else:
        steps(arguments[0], [int(context) for context in arguments[1:]] or [128, 1024, 8192])
