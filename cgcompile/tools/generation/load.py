"""Plans the requests for a server with OpenAI's protocol, and summarizes the answers.

The numbers have the names that vLLM's `bench serve` writes.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import BuildError

TOKENS = range(3, 120)
"""Token ids for prompts, which even small test vocabularies contain."""

SPEC = "requests=256,rate=8,arrivals=poisson,prompt=32-2000,answer=16-512,shared=0,clients=64,lengths=FILE,seed=0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """`requests` arrive at `rate` per second (infinite: all at once), with "poisson" or "fixed" `arrivals`.  At most `clients`
    requests are open (0: no limit).  The numbers of tokens are uniform in the ranges `prompt` and `answer`.  If `lengths` is not
    empty, its (prompt, answer) pairs are used instead, in order and repeatedly.  Every prompt begins with `shared` more tokens,
    which are the same in all requests."""

    requests: int = 256
    rate: float = math.inf
    arrivals: str = "poisson"
    prompt: tuple[int, int] = (32, 2000)
    answer: tuple[int, int] = (16, 512)
    shared: int = 0
    clients: int = 0
    lengths: tuple[tuple[int, int], ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """A request: the second at which it is sent, its prompt, and the number of tokens to generate."""

    after: float
    prompt: tuple[int, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The result of a request.  `times`: seconds until each part of the answer arrived; `seconds`: until its end; `prompt` and
    `tokens`: the numbers of tokens of prompt and answer; `error`: its text, or ""."""

    times: tuple[float, ...]
    seconds: float
    prompt: int
    tokens: int
    error: str = ""


def read_load(text: str) -> Load:
    """Parses a load: words `name=value`, separated by commas.  Raises option-invalid."""
    values: dict[str, Any] = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        try:
            if name in ("requests", "shared", "clients", "seed"):
                values[name] = int(value)
            elif name == "rate":
                values[name] = float(value)
            elif name == "arrivals" and value in ("poisson", "fixed"):
                values[name] = value
            elif name in ("prompt", "answer"):
                low, _, high = value.partition("-")
                values[name] = int(low), int(high or low)
            elif name == "lengths":
                values[name] = read_lengths(value)
            else:
                raise ValueError
        except ValueError:
            raise BuildError("option-invalid", f"--load {word}: expected words of {SPEC}", "the defaults are these") from None
    load = Load(**values)
    small = min(load.requests, *load.prompt, *load.answer) < 1 or min(load.shared, load.clients) < 0 or not load.rate > 0
    if small or load.prompt[0] > load.prompt[1] or load.answer[0] > load.answer[1]:
        raise BuildError("option-invalid", f"--load {text}: numbers must be positive, and ranges ascending")
    return load


def read_lengths(path: str) -> tuple[tuple[int, int], ...]:
    """Reads a file of lines with the tokens of a prompt and of its answer.  Raises option-invalid."""
    try:
        lines = [line.replace(",", " ").split() for line in Path(path).read_text().splitlines() if line.strip()]
        lengths = tuple([(int(prompt), int(answer)) for prompt, answer in lines])
    except OSError as error:
        raise BuildError("option-invalid", f"{path}: {error.strerror}", "give a file of lengths") from None
    except ValueError:
        lengths = ()
    if not lengths or any(min(pair) < 1 for pair in lengths):
        problem = f"{path}: expected lines of two positive numbers, tokens of a prompt and of its answer"
        raise BuildError("option-invalid", problem, "for example: 512 128")
    return lengths


def planned(load: Load) -> list[Planned]:
    """Returns the requests in the order of arrival; they depend only on the load and its seed."""
    generator, shared, time, plan = random.Random(load.seed), random.Random(-1), 0.0, []
    beginning = tuple(shared.choices(TOKENS, k=load.shared))
    for number in range(load.requests):
        if load.lengths:
            prompt, answer = load.lengths[number % len(load.lengths)]
        else:
            prompt, answer = generator.randint(*load.prompt), generator.randint(*load.answer)
        plan.append(Planned(time, (*beginning, *generator.choices(TOKENS, k=prompt))[: load.shared + prompt], answer))
        if math.isfinite(load.rate):
            time += generator.expovariate(load.rate) if load.arrivals == "poisson" else 1 / load.rate
    return plan


def summary(load: Load, model: str, answers: Sequence[Answered], duration: float) -> dict[str, Any]:
    """Returns the numbers with the names of vLLM's `bench serve`."""
    valid = [answer for answer in answers if not answer.error]
    output_tokens, input_tokens = sum(answer.tokens for answer in valid), sum(answer.prompt for answer in valid)
    firsts = [answer.times[0] for answer in valid if answer.times]
    per_token = [(answer.seconds - answer.times[0]) / (answer.tokens - 1) for answer in valid if answer.times and answer.tokens > 1]
    intervals = [later - sooner for answer in valid for sooner, later in zip(answer.times, answer.times[1:], strict=False)]
    numbers: dict[str, Any] = {
        "model_id": model, "num_prompts": load.requests, "request_rate": load.rate if math.isfinite(load.rate) else "inf",
        "max_concurrency": load.clients or None, "duration": duration, "completed": len(valid), "failed": len(answers) - len(valid),
        "total_input_tokens": input_tokens, "total_output_tokens": output_tokens, "request_throughput": len(valid) / duration,
        "output_throughput": output_tokens / duration, "total_token_throughput": (output_tokens + input_tokens) / duration,
    }  # fmt: skip
    for name, seconds in (
        ("ttft", firsts), ("tpot", per_token), ("itl", intervals), ("e2el", [answer.seconds for answer in valid]),
    ):  # fmt: skip
        numbers |= spread(name, [value * 1e3 for value in seconds])
    return numbers | {"errors": sorted({answer.error for answer in answers if answer.error})}


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Returns mean, median, standard deviation and 99th percentile, in milliseconds."""
    ordered = sorted(values) or [0.0]
    position = 0.99 * (len(ordered) - 1)
    low = math.floor(position)
    high = ordered[min(low + 1, len(ordered) - 1)]
    return {
        f"mean_{name}_ms": statistics.fmean(ordered), f"median_{name}_ms": statistics.median(ordered),
        f"std_{name}_ms": statistics.pstdev(ordered), f"p99_{name}_ms": ordered[low] + (high - ordered[low]) * (position - low),
    }  # fmt: skip
