"""`load`: from a bundle on disk to a program, everything checked before anything runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .cuda.early_context import EarlyContext

if TYPE_CHECKING:
    from .format.schema import Manifest
    from .program import Backend, Program

MODES = ("graph", "stream")
OUTPUTS = ("copy", "view")


def load(
    path: str | os.PathLike[str],
    *,
    device: int = 0,
    mode: str = "graph",
    on_miss: str = "pad",
    outputs: str = "copy",
    check: str = "load",
    lazy: bool = False,
) -> Program:
    """Loads the bundle at `path`.

    `device`: the CUDA device (the cpu target ignores it).  `mode`: "graph" replays recorded graphs, "stream" launches the same
    rows one by one.  `on_miss`: for sizes that were not recorded, "pad" takes the smallest recorded key that holds the call,
    "chunk" wastes the fewest rows, "error" refuses.  `outputs`: "copy" gives tensors of the caller's own, "view" gives guarded
    views that the next call makes stale.  `check`: "load" checks every file but the data of the weights, "full" those too.
    `lazy`: build a key's graph at its first call and not at load, for bundles with many keys (cuda).

    Raises a CgbundleError (see errors.py); ValueError for an option that does not exist.
    """
    return open_program(path, device, mode, on_miss, outputs, check, lazy=lazy)


def open_program(
    path: str | os.PathLike[str],
    device: int = 0,
    mode: str = "graph",
    on_miss: str = "pad",
    outputs: str = "copy",
    check: str = "load",
    poison: int | None = None,
    lazy: bool = False,
) -> Program:
    """`load`; with `poison`, that byte fills the arena and every byte of kernel parameters that the recording calls undefined,
    so that a replay that relies on one goes wrong.  For verification."""
    folder = os.fspath(path)
    early = EarlyContext(folder, device)
    try:
        from .call import dispatch
        from .format.archive import read_manifest
        from .program import Program
        from .session.sessions import begin
        from .validate import bundle as verify  # while the context is made

        _check_options(
            mode=(mode, MODES), on_miss=(on_miss, dispatch.POLICIES), outputs=(outputs, OUTPUTS), check=(check, verify.LEVELS)
        )
        manifest = read_manifest(folder)
        verify.check_bundle(folder, manifest, check)
        backend = _backend(folder, manifest, device, mode, early, poison, lazy)
        kind = Program
        if manifest.written:
            from .call.written_inputs import WritingProgram as kind
        if manifest.aliases:
            from .call.output_aliases import AliasingProgram as kind
        program = kind(manifest, backend, on_miss, outputs)
        try:
            begin(program)
        except BaseException:
            program.close()
            raise
        return program
    finally:
        early.drop()


def _check_options(**options: tuple[str, tuple[str, ...]]) -> None:
    for name, (value, known) in options.items():
        if value not in known:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, known))}")


def _backend(
    folder: str, manifest: Manifest, device: int, mode: str, early: EarlyContext, poison: int | None, lazy: bool
) -> Backend:
    if manifest.target.kind == "cpu":
        from .cpu.backend import CpuBackend

        return CpuBackend(folder, manifest)
    if manifest.written:
        from .cuda.written_inputs import WritingCalls

        return WritingCalls(folder, manifest, device, mode, early.take(), poison, lazy)
    from .cuda.backend import CudaCalls

    return CudaCalls(folder, manifest, device, mode, early.take(), poison, lazy)
