"""`cgcompile bench`: compares a bundle with eager PyTorch, torch.compile, CUDA graphs captured by hand and ONNX Runtime."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import FINDINGS, INTERRUPTED, UsageError
from ..options import BundlePath, Threads, baseline_names, check_writable, recorded_keys
from ..output import complain, count, write_json
from ..progress import begin, watching


def bench(
    bundle: BundlePath,
    against: Annotated[
        str,
        typer.Option(
            "--against",
            metavar="BASELINES",
            help="Some of eager, compile, compile-warm, manual, ort. Default: all.",
            autocompletion=baseline_names,
        ),
    ] = "",
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--size",
            metavar="KEY",
            help="Measure this int_key: 8, or 8x128; may be repeated. Default: all, at most 4.",
            autocompletion=recorded_keys,
        ),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, metavar="N", help="Number of rounds, each with fresh processes.")] = 5,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="PyTorch runs this model.py instead of the bundle's program; with --generate, a folder with config.json.",
        ),
    ] = "",
    generate: Annotated[
        bool,
        typer.Option("--generate", help="Measure generation by a bundle and by transformers' generate() (eager, compile)."),
    ] = False,
    load: Annotated[
        str,
        typer.Option(
            "--load",
            metavar="WORDS",
            help="The load for a running server (--generate, BUNDLE http://HOST:PORT), joined by commas: requests=256, rate=8 a "
            "second, prompt=32-2000 and answer=16-512 tokens, shared=0 equal tokens in front of every prompt.",
        ),
    ] = "",
    entry: Annotated[
        str, typer.Option("--entry", metavar="NAME", help="The entry, if there are several. Default: forward, or the first one.")
    ] = "",
    threads: Threads = None,
    plot: Annotated[str, typer.Option("--plot", metavar="FILE", help="Draw the medians as an SVG file.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
) -> None:
    """Measure a bundle beside other ways to serve its model.

    Measure cold start by phases, time of a call, and memory. Every cold
    start is a fresh process. In each round the bundle and the baselines
    take turns. All outputs are compared with those of the self-test.
    Baselines run the program in the bundle. A baseline that fails has a row
    with the reason. Exit status 1 if outputs are wrong.

    \b
    cgcompile bench gpt.cgb
    cgcompile bench gpt.cgb --against eager,compile --model gpt.py
    cgcompile bench qwen.cgb --generate --model ~/models/Qwen3-0.6B
    cgcompile bench http://localhost:8000 --generate --load rate=8,shared=1500
    """
    from cgbundle.format.file_names import entry_named
    from cgbundle.validate.bundle import checked_manifest
    from cgcompile.tools.bench.baselines import choose
    from cgcompile.tools.bench.measure import measure
    from cgcompile.tools.bench.plot import svg

    from .. import int_keys
    from ..benchmark import show_benchmark

    if generate:
        if plot or sizes or entry:
            raise UsageError("--generate takes no --plot, --size or --entry", "leave them out: it measures prefill and decode")
        if bundle.startswith("http"):
            _load(bundle, load, quiet, as_json)
            return
        if load:
            raise UsageError("--load needs a running server", "give http://HOST:PORT instead of the bundle")
        _generation(bundle, against.replace(",", " ").split(), model, rounds, threads, quiet, as_json)
        return
    manifest = checked_manifest(bundle)
    spec = entry_named(manifest, entry)
    if plot:
        check_writable(plot)
    baselines = against.replace(",", " ").split()
    measured, _ = choose(baselines, manifest.target.kind)
    if not quiet:  # the first process takes seconds
        begin("measure", f"{manifest.name} beside {', '.join(measured) or 'nothing'}, {count(rounds, 'round')}")
    with watching(quiet) as progress:
        report = measure(
            bundle,
            against=baselines,
            keys=[int_keys.parse(spec, text) for text in sizes or ()],
            entry=spec.name,
            rounds=rounds,
            model=model,
            threads=threads,
            progress=progress,
        )
    if plot and report.bundle.starts:
        with open(plot, "w", encoding="utf-8") as file:
            file.write(svg(report))
    if as_json:
        write_json(report.plain())
    else:
        show_benchmark(report)
    wrong = report.wrong()
    for sentence in wrong:
        complain(f"wrong outputs: {sentence}", "")
    if report.interrupted:
        complain("interrupted: what was measured by then is above" if report.bundle.starts else "interrupted", "")
        raise typer.Exit(INTERRUPTED)
    if wrong:
        raise typer.Exit(FINDINGS)


def _load(url: str, words: str, quiet: bool, as_json: bool) -> None:
    """Runs `--generate` against a running server."""
    from cgcompile.tools.generation.load import read_load
    from cgcompile.tools.generation.load_client import measure_load

    from ..benchmark import show_load

    load = read_load(words)
    if not quiet:
        begin("measure", f"{url}, {count(load.requests, 'request')}")
    numbers = measure_load(url, load)
    if as_json:
        write_json(numbers)
    else:
        show_load(numbers)
    if numbers["failed"]:
        complain(f"{count(numbers['failed'], 'request')} failed: {numbers['errors'][0]}", "")
        raise typer.Exit(FINDINGS)


def _generation(bundle: str, against: list[str], model: str, rounds: int, threads: int | None, quiet: bool, as_json: bool) -> None:
    """Runs `--generate` for a bundle."""
    from cgcompile.tools.generation.measure import measure_generation

    from ..benchmark import show_generation

    if not quiet:
        begin("measure", f"generation, {count(rounds, 'round')}")
    with watching(quiet) as progress:
        report = measure_generation(bundle, model=model, against=against, rounds=rounds, threads=threads, progress=progress)
    if as_json:
        write_json(report.plain())
    else:
        show_generation(report)
