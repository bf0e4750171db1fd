"""Arguments and options of several commands, and their shell completion."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from .errors import UsageError

Words = list[tuple[str, str]]
"""Completions with their descriptions."""


def target_names(incomplete: str) -> Words:
    from cgcompile.targets.architectures import ARCHES
    from cgcompile.targets.instruction_sets import LEVELS

    words = [
        ("auto", "a GPU that is here, else the CPU"),
        ("cpu", "processors like this one"),
        ("cuda", "the GPU of this machine"),
    ]
    words += [(row.name, "processors of that level") for row in LEVELS] + [(row.name, row.gpu) for row in ARCHES]
    return _with_prefix(words, incomplete)


def chosen_by_default(target: str) -> str:
    """Describes what "auto" chose, and why."""
    return "for cpu (no GPU is here; for one: --target cuda)" if target == "cpu" else f"for {target} (the GPU of this machine)"


def baseline_names(incomplete: str) -> Words:
    """Completes the last name in `--against`."""
    from cgcompile.tools.bench.baselines import BASELINES

    prefix, comma, _ = incomplete.rpartition(",")
    words = prefix.split(",")
    return _with_prefix([(f"{prefix}{comma}{name}", text) for name, text in BASELINES.items() if name not in words], incomplete)


def rule_names(incomplete: str) -> Words:
    from cgcompile.util.explanations import explanations

    return _with_prefix(
        [(explanation.name, explanation.headline) for explanation in explanations() if explanation.kind == "finding"], incomplete
    )


def recorded_keys(context: typer.Context, incomplete: str) -> Words:
    """Completes an int_key of the first entry of the command's bundle; [] without a bundle."""
    from cgbundle.errors import CgbundleError
    from cgbundle.self_test import name_key
    from cgbundle.validate.bundle import checked_manifest

    from .int_keys import spell

    path = context.params.get("bundle") or next(iter(context.args), "")  # parsing stops at an option without value
    try:
        entries = checked_manifest(str(path)).entries[:1]
    except (CgbundleError, OSError):
        return []
    return _with_prefix(
        [(spell(program.key), name_key(entry, program.key)) for entry in entries for program in entry.programs], incomplete
    )


def _with_prefix(words: Words, incomplete: str) -> Words:
    return [word for word in words if word[0].startswith(incomplete)]


BundlePath = Annotated[str, typer.Argument(metavar="BUNDLE", help="The bundle's directory.", show_default=False)]

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="model.py, package.module:attribute, a .pt2 file, a folder with config.json, or a .gguf file.",
        show_default=False,
    ),
]

Context = Annotated[
    int | None,
    typer.Option("--context", min=1, metavar="N", help="For a folder: tokens of the longest text."),
]

Lanes = Annotated[
    str | None, typer.Option("--lanes", metavar="LANES", help="For a folder: how many texts share a call, e.g. 1,8,32.")
]

Chunk = Annotated[
    str | None,
    typer.Option("--chunk", metavar="TOKENS", help="For a folder: how many tokens of prompts a call reads, e.g. 128,512,2048."),
]

Weights = Annotated[
    str | None, typer.Option("--weights", metavar="TYPE", help="For a folder, on a CPU: int8, weights stored in 8 bits.")
]

Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="DTYPE", help="For a folder: bfloat16, float16 or float32. Default: as in config.json, on a CPU float32."
    ),
]

Adapters = Annotated[
    int | None,
    typer.Option(
        "--adapters", min=1, metavar="N", help="For a folder: how many LoRA adapters a loaded bundle can hold. Default: none."
    ),
]

AdapterRank = Annotated[
    int | None,
    typer.Option("--adapter-rank", min=1, metavar="N", help="With --adapters: their largest rank. Default: 16."),
]

Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, metavar="N", help="Threads of a call on the CPU. Default: OpenMP's own number."),
]

AnyTarget = Annotated[
    str,
    typer.Option(
        "--target",
        metavar="TARGET",
        help="auto (as for build), cuda, a GPU architecture such as sm_90, or cpu; needs no GPU.",
        autocompletion=target_names,
    ),
]
"""The option --target of commands that build nothing."""

MaxPaths = Annotated[
    int,
    typer.Option(
        "--max-paths", min=1, metavar="N", help="Maximum number of paths through the model's Python code (if, while on tensors)."
    ),
]

FallbackOps = Annotated[
    list[str] | None,
    typer.Option("--fallback-op", metavar="NAME", help="Run an operator on the host, e.g. mylib::op; may be repeated."),
]


def check_writable(path: str) -> None:
    """Raises UsageError if a file cannot be written.  Commands call this before their work."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(folder, os.W_OK) or (os.path.exists(path) and not os.access(path, os.W_OK)):
        raise UsageError(f"{path}: cannot be written", "name a file in a folder that exists")
