"""Builds all ranks at the same time, each in its own process, like a model for one device.  Joins them to one bundle.

Rank 0's files are at the top of the bundle.  The others are in `ranks/1`, `ranks/2`, and so on, without the kernel images that rank
0 has.  All processes run the same stages.  They synchronize at each collective that eager PyTorch runs: see `bundle/ranks.py`.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cgbundle.errors import BundleError
from cgbundle.format import archive, file_names
from cgbundle.format.archive import Archive
from cgbundle.format.file_names import rank_folder
from cgbundle.format.schema import Manifest
from cgbundle.validate import bundle as verify

from ...bundle.emit import describe_size, seal
from ...errors import BuildError
from ...targets.choice import Options, choose
from ...util.model_file import name_of
from ...util.progress import Stages, Tell, silent
from ...util.scratch import scratch_folder
from ...util.workers import Kind, Request, ask, processors
from ..destination import destination_path, staged_bundle
from ..records import Built
from .worker import RankJob


def build_world(model: Any, options: Options) -> Built:
    """Runs `cgcompile.build` with `world`.  Raises the errors of a rank's build, and bundle-refused for ranks that do not match."""
    assert options.world is not None
    size, stages = options.world, Stages(options.progress)
    label = os.fspath(model)
    chosen = choose(replace(options, record="cross-compile", standalone=None))
    with ExitStack() as stack:
        destination = destination_path(options.out, name_of(label))
        folder = stack.enter_context(staged_bundle(destination, options.force))
        scratch = stack.enter_context(scratch_folder())
        rank_options = replace(options, target=chosen.target, record="cross-compile", progress=silent)  # a watcher is not pickled
        with stages("ranks") as tell:
            jobs = {
                rank: Request(
                    content=RankJob(
                        model=label,
                        options=rank_options,
                        rank=rank,
                        size=size,
                        meeting=scratch / "meeting",
                        folder=folder / rank_folder(rank),
                        progress_file=scratch / "told",
                    ),
                    what=f"building rank {rank}",
                )
                for rank in range(size)
            }
            tell(f"{size} processes, for {chosen.target}")
            threads = str(max(1, processors() // size))
            kind = Kind(
                module="cgcompile.pipeline.world.worker", folder=scratch, died="worker-died",
                environment={"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"},
            )  # fmt: skip
            with _piped_events(scratch / "told", tell):
                seconds = dict(ask(kind, jobs, workers=size))
            tell.result(", ".join([f"{name} {spent:.1f} s" for name, spent in seconds[0]]))
        with stages("verify") as tell:
            manifest = _joined(folder, size)
            tell.result(f"{size} ranks, {describe_size(folder)}: every hash and invariant, the same exchanges on all of them")
    return Built(path=destination, manifest=manifest, seconds=tuple(stages.seconds))


@contextmanager
def _piped_events(path: Path, tell: Tell) -> Iterator[None]:
    """Creates a pipe at `path` and reports the events that arrive while the body runs.  Each event is a line of JSON."""
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR)  # also for writing, so that the reader gets no end of file when another writer closes the pipe

    def listen() -> None:
        with open(pipe, closefd=False) as lines:
            for line in iter(lines.readline, "\n"):
                event = json.loads(line)
                if event["text"]:
                    tell(f"{event['stage']}: {event['text']}")

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield
    finally:
        os.write(pipe, b"\n")
        thread.join()
        os.close(pipe)


def _joined(folder: Path, size: int) -> Manifest:
    """Joins the bundles of all ranks in `folder` to one.  Raises bundle-refused."""
    first_folder = folder / rank_folder(0)
    for path in list(first_folder.iterdir()):
        path.rename(folder / path.name)
    first_folder.rmdir()
    manifest = archive.read_manifest(str(folder))
    for rank in range(1, size):
        kernels = folder / rank_folder(rank) / file_names.KERNELS
        for image in list(kernels.iterdir()):
            if (folder / file_names.KERNELS / image.name).exists():
                image.unlink()
        with suppress(OSError):
            kernels.rmdir()
    sealed = seal(folder, replace(manifest, files=()))
    archive_of_bundle = Archive(str(folder))
    try:
        for rank_archive in verify.check_ranks(archive_of_bundle, "full"):
            rank_archive.close()
    except BundleError as error:
        raise BuildError("bundle-refused", f"the ranks of the bundle that was built: {error}") from None
    finally:
        archive_of_bundle.close()
    return sealed
