"""Generates with transformers: `python -m cgcompile.tools.generation.torch_worker HOW JOB`.

HOW is `eager` or `compile`.  With `compile` the cache is static, so that transformers compiles the step of one token.

Private interface (transformers 5.17, 5.23): `CompileConfig._compile_all_devices`, without which it compiles only on a GPU.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import Any

from ..bench.protocol import Laps, fail, say
from .job import prompt_of


def main(how: str, path: str) -> None:
    """Measures, then writes one answer: see `job`."""
    laps = Laps()
    laps.mark("first")
    sys.excepthook = fail
    with open(path) as file:
        job = json.load(file)
    served = Transformers(how, job)
    served.generate(1, 1)
    laps.mark("first")
    served.generate(1, 2)
    laps.mark("second")
    tokens, rates = job["tokens"], {}
    answer = served.generate(1, tokens + 1)
    for batch in job["batches"]:
        served.generate(batch, tokens + 1)
        durations = []
        for _ in range(job["rounds"]):
            begin = perf_counter()
            served.generate(batch, 1)
            middle = perf_counter()
            served.generate(batch, tokens + 1)
            durations.append((perf_counter() - middle) - (middle - begin))
        rates[str(batch)] = batch * tokens / max(min(durations), 1e-9)
    say({"laps": laps.seconds, "rates": rates, "made": answer, "torch": True})


class Transformers:
    """The model of a folder, on the bundle's device and in its dtype."""

    def __init__(self, how: str, job: dict[str, Any]) -> None:
        import torch
        import transformers

        if job["threads"]:
            torch.set_num_threads(job["threads"])
        torch.set_grad_enabled(False)
        self._job, self._device = job, job["target"]
        dtype = getattr(torch, job["dtype"])
        with torch.device(self._device):
            self._model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype, local_files_only=True)
        self._model = self._model.to(self._device).eval()
        self._options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        if how == "compile":
            self._options |= {"cache_implementation": "static"}
            if self._device == "cpu":
                compiling = transformers.CompileConfig()
                compiling._compile_all_devices = True
                self._options |= {"compile_config": compiling}

    def generate(self, batch: int, tokens: int) -> list[int]:
        """Generates for `batch` prompts, and returns the tokens of the first."""
        import torch

        rows = [prompt_of(lane, self._job["prompt"], self._job["vocabulary"]) for lane in range(batch)]
        ids = torch.tensor(rows, device=self._device)
        sequences = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, **self._options
        )
        new_tokens: list[int] = sequences[0, ids.shape[1] :].tolist()
        return new_tokens


if __name__ == "__main__":
    main(*sys.argv[1:])
