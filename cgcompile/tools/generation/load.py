"""A load of requests for a server of OpenAI's protocol: when they come, how long they are, and what is told of the answers.

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
"""What prompts are made of: tokens that small vocabularies of tests have, too."""

SPEC = "requests=256,rate=8,arrivals=poisson,prompt=32-2000,answer=16-512,shared=0,clients=64,lengths=FILE,seed=0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """`requests` that come at `rate` a second (infinite: all at once), in "poisson" or "fixed" `arrivals`; `clients` are open at
    most (0: all).  A prompt has `prompt` tokens and an answer `answer`, uniformly from the first to the second, or both as
    `lengths` says, again and again; the first `shared` tokens of all prompts are the same."""

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
    """A request: the seconds after which it comes, its prompt, and how many tokens are to be made."""

    after: float
    prompt: tuple[int, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of a request: the seconds to each piece of its answer, the tokens of prompt and answer, and the error, or ""."""

    times: tuple[float, ...]
    seconds: float
    prompt: int
    tokens: int
    error: str = ""


def read_load(text: str) -> Load:
    """A load by words `name=value` between commas.  Raises option-invalid."""
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
    """A file of lines with the tokens of a prompt and of its answer.  Raises option-invalid."""
    try:
        lines = [line.replace(",", " ").split() for line in Path(path).read_text().splitlines() if line.strip()]
        lengths = tuple([(int(prompt), int(answer)) for prompt, answer in lines])
    except OSError as error:
        raise BuildError("option-invalid", f"{path}: {error.strerror}", "give a file of lengths") from None
    except ValueError:
        lengths = ()
    if not lengths or any(min(pair) < 1 for pair in lengths):
        what = f"{path}: expected lines of two positive numbers, tokens of a prompt and of its answer"
        raise BuildError("option-invalid", what, "for example: 512 128")
    return lengths


def planned(load: Load) -> list[Planned]:
    """The requests, in the order in which they come; of one seed always the same."""
    order, shared, at, plan = random.Random(load.seed), random.Random(-1), 0.0, []
    beginning = tuple(shared.choices(TOKENS, k=load.shared))
    for number in range(load.requests):
        if load.lengths:
            prompt, answer = load.lengths[number % len(load.lengths)]
        else:
            prompt, answer = order.randint(*load.prompt), order.randint(*load.answer)
        plan.append(Planned(at, (*beginning, *order.choices(TOKENS, k=prompt))[: load.shared + prompt], answer))
        if math.isfinite(load.rate):
            at += order.expovariate(load.rate) if load.arrivals == "poisson" else 1 / load.rate
    return plan


def summary(load: Load, model: str, answers: Sequence[Answered], duration: float) -> dict[str, Any]:
    """The numbers, by the names of vLLM's `bench serve`."""
    right = [answer for answer in answers if not answer.error]
    output_tokens, read = sum(answer.tokens for answer in right), sum(answer.prompt for answer in right)
    firsts = [answer.times[0] for answer in right if answer.times]
    whole = [(answer.seconds - answer.times[0]) / (answer.tokens - 1) for answer in right if answer.times and answer.tokens > 1]
    between = [later - sooner for answer in right for sooner, later in zip(answer.times, answer.times[1:], strict=False)]
    numbers: dict[str, Any] = {
        "model_id": model, "num_prompts": load.requests, "request_rate": load.rate if math.isfinite(load.rate) else "inf",
        "max_concurrency": load.clients or None, "duration": duration, "completed": len(right), "failed": len(answers) - len(right),
        "total_input_tokens": read, "total_output_tokens": output_tokens, "request_throughput": len(right) / duration,
        "output_throughput": output_tokens / duration, "total_token_throughput": (output_tokens + read) / duration,
    }  # fmt: skip
    for name, seconds in (
        ("ttft", firsts), ("tpot", whole), ("itl", between), ("e2el", [answer.seconds for answer in right]),
    ):  # fmt: skip
        numbers |= spread(name, [value * 1e3 for value in seconds])
    return numbers | {"errors": sorted({answer.error for answer in answers if answer.error})}


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and the 99th of 100, in milliseconds."""
    ordered = sorted(values) or [0.0]
    place = 0.99 * (len(ordered) - 1)
    low = math.floor(place)
    high = ordered[min(low + 1, len(ordered) - 1)]
    return {
        f"mean_{name}_ms": statistics.fmean(ordered), f"median_{name}_ms": statistics.median(ordered),
        f"std_{name}_ms": statistics.pstdev(ordered), f"p99_{name}_ms": ordered[low] + (high - ordered[low]) * (place - low),
    }  # fmt: skip
