"""Builds for several targets, one after the other, and joins the results to a bundle with variants.  Each build loads the model.

GPUs are always cross-compiled, so all variants are compared with eager PyTorch and share one self-test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cgbundle.format.schema import Manifest
from cgbundle.format.variants import variant_name
from cgbundle.self_test import fresh

from ..bundle.proof import REPORT
from ..bundle.variants import join_variants
from ..errors import BuildError
from ..model.declared_sizes import Inputs
from ..targets.choice import Options, choose
from ..util.progress import Event, Stages, Watcher
from ..util.scratch import scratch_folder
from .build import build
from .destination import destination_path, staged_bundle
from .records import Built


def build_variants(model: Any, inputs: Inputs | None, options: Options) -> Built:
    """See `cgcompile.build`, for several targets.  Raises variants-differ, and the errors of a build for one target."""
    restorers = _generator_restorers()
    built: list[Built] = []
    with scratch_folder() as scratch:
        for number, target in enumerate(options.targets):
            for restore in restorers:
                restore()
            folder = scratch / str(number)
            folder.mkdir()
            built.append(build(model, inputs, _options_of(options, target), out_path=folder))
        folders = [scratch / str(number) for number in range(len(built))]
        destination = destination_path(options.out, built[0].manifest.name)
        stages = Stages(options.progress)
        with ExitStack() as stack:
            place = stack.enter_context(staged_bundle(destination, options.force))
            with stages("variants") as tell:
                manifests = join_variants(folders, place)
                tell.result(_verified(place, manifests))
    seconds = [pair for variant in built for pair in variant.seconds]
    return Built(
        path=destination, manifest=manifests[0], seconds=(*seconds, *stages.seconds),
        variants=tuple([variant_name(manifest.target) for manifest in manifests]),
    )  # fmt: skip


def _options_of(options: Options, target: str) -> Options:
    """Returns the options for the build of one target.  Its progress texts begin with the target's name."""
    chosen = replace(options, target=target, out=None, progress=_naming(options.progress, target))
    if choose(replace(chosen, record="auto", standalone=None)).recorder == "host":
        return chosen
    return replace(chosen, record="cross-compile" if options.record == "auto" else options.record, standalone=None)


def _naming(watcher: Watcher, target: str) -> Watcher:
    def watch(event: Event) -> None:
        watcher(replace(event, text=f"{target}: {event.text}" if event.text else event.text))

    return watch


def _generator_restorers() -> tuple[Callable[[], None], ...]:
    """Returns functions that reset random generators, so that random weights are the same for every target."""
    plain, torch_state = random.getstate(), torch.get_rng_state()
    return (lambda: random.setstate(plain)), (lambda: torch.set_rng_state(torch_state))


def _verified(folder: Path, manifests: tuple[Manifest, ...]) -> str:
    """Loads the bundle in a new process, as a server does, and replays the self-test of the variant for this machine."""
    names = ", ".join([variant_name(manifest.target) for manifest in manifests])
    answer = fresh(str(folder))
    if answer.get("code") == "wrong-machine":
        return f"{names}; none runs here"
    if "error" in answer:
        raise BuildError("proof-failed", f"the fresh process refused the bundle: {answer['error']}", answer["hint"])
    failed = next((row for row in answer["results"] if not row["passed"]), None)
    if failed is not None:
        raise BuildError("proof-failed", f"int_key {tuple(failed['key'])}: the joined bundle gives other outputs", REPORT)
    return f"{names}; the one for this machine replayed in a fresh process"
