"""The benchmark of generation.  It runs the bundle and the baselines of transformers in new processes, one after the other."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cgbundle.format.archive import Archive
from cgbundle.validate import bundle as verify

from ...errors import BuildError
from ...util.progress import Stages, Watcher, silent
from ..bench.baselines import choose
from ..bench.processes import WorkerProcess, compiler_cache
from ..bench.report import BUNDLE, Machine, this_machine
from .layout import Layout, read_layout

BATCHES, PROMPT, TOKENS = (1, 8, 32, 128, 256), 128, 64
"""Numbers of texts that run together, tokens of a prompt, timed tokens after it; at most what the cache can hold: see `lengths`."""

BASELINES = ("eager", "compile")
"""Eager `generate`, and `generate` with a static cache, which transformers compiles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generator:
    """The results of the bundle or of one baseline.  `firsts`: seconds from process start to the first token, for each process.
    `seconds`: seconds to the second token, which may include compilation.  `rates`: (lanes, best tokens per second of all lanes).
    `made`: the tokens generated for the first prompt.  `why`: one line that says why it was not measured, or ""."""

    name: str
    firsts: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    rates: tuple[tuple[int, float], ...] = ()
    made: tuple[int, ...] = field(default=(), repr=False)
    why: str = ""

    def same(self, other: Generator) -> int:
        """Returns how many tokens are equal to those of `other` before the first different one."""
        pairs = list(zip(self.made, other.made, strict=False))
        return next((index for index, (token, other_token) in enumerate(pairs) if token != other_token), len(pairs))


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationBenchmark:
    """Results for `tokens` tokens, generated after prompts of `prompt` tokens.  `ways`: the bundle at `path`, then baselines."""

    path: str
    name: str
    target: str
    machine: Machine
    prompt: int
    tokens: int
    batches: tuple[int, ...]
    rounds: int
    ways: tuple[Generator, ...]

    def plain(self) -> dict[str, Any]:
        """Returns all numbers, for JSON."""
        return asdict(self)


def measure_generation(
    path: str | os.PathLike[str],
    *,
    model: str,
    against: Sequence[str] = (),
    rounds: int = 3,
    threads: int | None = None,
    progress: Watcher | None = None,
) -> GenerationBenchmark:
    """Measures how fast a language model's bundle generates, and how fast transformers does with the weights of folder `model`.

    - `against`: names in BASELINES; default: both, if `model` is given.
    - `rounds`: the number of new processes for the bundle and each baseline, and of timed runs in each process.
    - `threads`: CPU threads of a call.

    A baseline that fails has a row with the reason.  Raises bench-failed for a bundle of another kind, or that does not run
    here; baseline-unknown; source-missing for a `model` without config.json, and the errors of an invalid bundle.
    """
    bundle = Archive(os.fspath(path))
    verify.check_bundle(bundle)
    layout, target = read_layout(bundle.manifest, PROMPT), bundle.manifest.target.kind
    if wrong := [name for name in against if name not in BASELINES]:
        raise BuildError("baseline-unknown", f"no baseline {wrong[0]!r} of generation: there are {', '.join(BASELINES)}")
    if model and not os.path.isfile(os.path.join(model, "config.json")):
        raise BuildError("source-missing", f"{model}: no folder with config.json; generation is compared with transformers")
    selected = list(against) or list(BASELINES)
    names, skipped = choose(selected, target) if model else ((), dict.fromkeys(selected, "skipped: it needs --model FOLDER"))
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="cgcompile-bench-") as scratch:
        prompt, tokens, batches = lengths(layout)
        job = Path(scratch, "job.json")
        job.write_text(json.dumps({
            "bundle": os.path.abspath(path), "model": os.path.abspath(model), "dtype": layout.dtype, "target": target,
            "threads": threads, "prompt": prompt, "tokens": tokens, "batches": batches, "rounds": rounds, "prefill": layout.prefill,
            "several": layout.several, "adapters": layout.adapters,
            "decode": layout.decode, "sampling": layout.sampling, "vocabulary": layout.vocabulary,
            "each": -(-(prompt + tokens + 1) // layout.page),
        }))  # fmt: skip
        answers: dict[str, list[dict[str, Any]]] = {}
        why = dict(skipped)
        with Stages(progress or silent)("generate") as tell:
            for turn in range(rounds):
                for name in (BUNDLE, *names):
                    if name in why:
                        continue
                    tell(f"round {turn + 1} of {rounds}, {name}")
                    try:
                        answers.setdefault(name, []).append(_answer(name, job, Path(scratch)))
                    except BuildError as error:
                        if error.code != "baseline-failed":
                            raise
                        if name == BUNDLE:
                            raise BuildError("bench-failed", f"the bundle does not run here: {error}", error.hint) from None
                        why[name] = f"failed: {error}"
            tell.result(f"{rounds} round{'s' if rounds > 1 else ''} of fresh processes")
    ways = [
        _generator(name, answers.get(name, []), why.get(name, ""))
        for name in (BUNDLE, *BASELINES)
        if name in answers or name in why
    ]
    return GenerationBenchmark(
        path=os.fspath(path), name=bundle.manifest.name, target=target, machine=this_machine({}, load), prompt=prompt,
        tokens=tokens, batches=batches, rounds=rounds, ways=tuple(ways),
    )  # fmt: skip


def lengths(layout: Layout) -> tuple[int, int, tuple[int, ...]]:
    """Returns the number of tokens of a prompt, the number of tokens to generate, and the batches that the cache can hold."""
    most = max(batch for batch, _ in layout.decode)
    batches = tuple([batch for batch in BATCHES if batch <= min(most, layout.slots - 1) and layout.longest(batch) >= 4])
    longest = layout.longest(max(batches))
    prompt = min(PROMPT, longest // 2)
    return prompt, min(TOKENS, longest - prompt - 1), batches


def _answer(name: str, job: Path, scratch: Path) -> dict[str, Any]:
    worker = f"cgcompile.tools.generation.{'bundle' if name == BUNDLE else 'torch'}_worker"
    arguments = [job] if name == BUNDLE else [name, job]
    environment = {} if name == BUNDLE else compiler_cache(scratch / "cache")
    with WorkerProcess(worker, *arguments, log=scratch / f"{name}.log", environment=environment) as process:
        answer = process.answer()
    if name == BUNDLE and answer["torch"]:
        raise BuildError("bench-failed", "the bundle's process imported torch, so this does not measure serving without torch")
    return answer


def _generator(name: str, answers: Sequence[dict[str, Any]], why: str) -> Generator:
    laps = [answer["laps"] for answer in answers]
    rates: dict[int, float] = {}
    for answer in answers:
        for batch, rate in answer["rates"].items():
            rates[int(batch)] = max(rate, rates.get(int(batch), 0.0))
    return Generator(
        name=name, firsts=tuple([lap["first"] for lap in laps]), seconds=tuple([lap["first"] + lap["second"] for lap in laps]),
        rates=tuple(rates.items()), made=tuple(answers[0]["made"]) if answers else (), why=why,
    )  # fmt: skip
