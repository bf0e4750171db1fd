"""Compares starts of vLLM without the plugin in examples/vllm_plugin and with it, alternately.

    python -m tests.bench.gpu.vllm_start MODEL GRAPHS [--turns 3] [--rounds 5] [--options '{"load_format": "dummy"}']

GRAPHS is the folder in which the plugin saves graphs. If it is empty, the first starts fill it.  Every start is its own process.
Prints a row for each: seconds from process start to the engine, the phases in vLLM's log, tokens/s at LANES (best of --rounds; not
while a cache or the folder is filled), used memory, and whether the tokens equal those of the first start.  The logs are in
`GRAPHS.logs`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.helpers.places import ROOT

LANES = (1, 32, 256)
PROMPTS, NEW = 64, 32
LENGTHS = (5, 40, 300, 700)
"""Lengths of prompts in tokens, below and above the largest captured size."""

SAVES = 4
"""Largest number of starts until the folder is complete."""

LIMIT = 400
"""Seconds after which a start is killed."""

PHASES = {
    "compile": r"torch\.compile took ([\d.]+) s",
    "profile": r"Initial profiling/warmup run took ([\d.]+) s",
    "capture": r"Graph capturing finished in ([\d.]+) secs",
    "engine": r"init engine .* took ([\d.]+) s",
    "loaded": r"no profiling run, the compiled model in ([\d.]+) s",
    "attached": r"graphs attached, .*: tensors [\d.]+ s, graphs ([\d.]+) s",
}
"""Patterns for seconds in the logs of vLLM and the plugin."""

SKIPPED = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False, "disable_log_stats": True}
"""Options of every engine: no tokenizer is needed."""


def child(model: str, options: dict[str, Any], answer: Path, *, rounds: int) -> None:
    """Runs one start and writes its measurements.  `rounds`: 0 measures no tokens/s."""
    began = float(os.environ["BEGAN"])
    from vllm import LLM, SamplingParams

    imported = time.time()
    engine = LLM(model=model, **SKIPPED, **options)
    ready = time.time()
    draw = random.Random(0)

    def prompts(count: int, *lengths: int) -> list[Any]:
        sizes = [lengths[number % len(lengths)] for number in range(count)]
        return [{"prompt_token_ids": [draw.randrange(1000, 30000) for _ in range(size)]} for size in sizes]

    def generate(requests: list[Any], tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return [list(row.outputs[0].token_ids) for row in engine.generate(requests, sampling, use_tqdm=False)]

    first = generate(prompts(1, 128), 1)
    answered = time.time()
    tokens = first + generate(prompts(PROMPTS, *LENGTHS), NEW)
    speeds = {}
    for lanes in LANES if rounds else ():
        generate(prompts(lanes, 128), 8)
        measured = []
        for _ in range(rounds):
            seconds = []
            for new in (1, 129):
                start = time.perf_counter()
                generate(prompts(lanes, 128), new)
                seconds.append(time.perf_counter() - start)
            measured.append(round(lanes * 128 / (seconds[1] - seconds[0]), 1))
        speeds[lanes] = max(measured)
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    used = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    row = {
        "imports": round(imported - began, 2), "ready": round(ready - began, 2), "first token": round(answered - began, 2),
        "tokens/s": speeds, "MiB used": int(used[0]) if used else None,
        "tokens": hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16],
    }  # fmt: skip
    answer.write_text(json.dumps(row))
    engine.llm_engine.engine_core.shutdown()
    os._exit(0)  # do not wait for vLLM's threads


def start(name: str, arguments: argparse.Namespace, graphs: Path | None, *, rounds: int) -> dict[str, Any]:
    """Runs one start in a new process, with the plugin's folder or without the plugin. Raises RuntimeError."""
    logs = Path(f"{arguments.graphs}.logs")
    logs.mkdir(exist_ok=True)
    log, answer = logs / f"{name}.log", logs / f"{name}.json"
    answer.unlink(missing_ok=True)
    environment = {**os.environ, "BEGAN": repr(time.time())} | ({"CGCOMPILE_GRAPHS": str(graphs)} if graphs else {})
    command = [sys.executable, "-m", "tests.bench.gpu.vllm_start", arguments.model, str(answer), "--child", str(rounds)]
    with open(log, "w") as file:
        options = ["--options", arguments.options]
        process = subprocess.Popen(
            [*command, *options], env=environment, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes of vLLM's engine
            process.wait()
    text = log.read_text(errors="replace")
    if process.returncode or not answer.exists():
        raise RuntimeError(f"{log}: the start ended with {process.returncode}: {text[-2000:]}")
    row: dict[str, Any] = {"start": name, **json.loads(answer.read_text())}
    row |= {phase: float(hit[-1]) for phase, pattern in PHASES.items() if (hit := re.findall(pattern, text))}
    print(json.dumps(row), flush=True)
    for line in re.findall(r"cgcompile: .*", text):
        print("   ", line[:300], flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("graphs", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of tokens/s per start; 0: none")
    parser.add_argument("--options", default="{}", help="options of vLLM's LLM, in JSON")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.model, json.loads(arguments.options), arguments.graphs, rounds=arguments.child)
        return
    rows = []
    for number in range(SAVES):
        if not (arguments.graphs / "graphs.cgb").exists():
            rows.append(start(f"save {number}", arguments, arguments.graphs, rounds=0))
    if arguments.turns:
        rows.append(start("stock 0", arguments, None, rounds=0))  # fills vLLM's cache, whose names depend on its options
    for number in range(1, arguments.turns + 1):
        rows.append(start(f"stock {number}", arguments, None, rounds=arguments.rounds))
        rows.append(start(f"plugin {number}", arguments, arguments.graphs, rounds=arguments.rounds))
    others = [row["start"] for row in rows if row["tokens"] != rows[0]["tokens"]]
    print("the same tokens in all starts" if not others else f"other tokens in {', '.join(others)}")


if __name__ == "__main__":
    main()
