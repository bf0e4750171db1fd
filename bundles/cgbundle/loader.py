"""`load`: from a bundle on disk to a program, everything checked before anything runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .cuda.context_future import ContextFuture

if TYPE_CHECKING:
    from .program import Program
    from .trust.keys import Keys

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
    key: Keys | None = None,
) -> Program:
    """Loads the bundle at `path`.

    `device`: the CUDA device (the cpu target ignores it).  `mode`: "graph" replays recorded graphs, "stream" launches the same
    rows one by one.  `on_miss`: for sizes that were not recorded, "pad" takes the smallest recorded key that holds the call,
    "chunk" wastes the fewest rows, "error" refuses.  `outputs`: "copy" gives tensors of the caller's own, "view" gives guarded
    views that the next call makes stale.  `check`: "load" checks every file but the data of the weights, "full" those too.
    `lazy`: build a key's graph at its first call and not at load, for bundles with many keys (cuda).
    `key`: a public ed25519 key, or several of which one must have signed the bundle: path of a PEM file, 64 hexadecimal digits, or
    32 bytes.  Before the signature holds nothing else of the bundle is looked at, and all that it covers is checked: `check` is
    "full".

    Raises a CgbundleError (see errors.py); ValueError for an option that does not exist.
    """
    return open_program(path, device, mode, on_miss, outputs, check, lazy=lazy, key=key)


def open_program(
    path: str | os.PathLike[str], device: int = 0, mode: str = "graph", on_miss: str = "pad", outputs: str = "copy",
    check: str = "load", poison: int | None = None, lazy: bool = False, key: Keys | None = None,
) -> Program:  # fmt: skip
    """`load`; with `poison`, that byte fills the arena and every byte of kernel parameters that the recording calls undefined,
    so that a replay that relies on one goes wrong.  For verification."""
    folder = os.fspath(path)
    context = ContextFuture(folder, device)
    try:
        from .call import dispatch  # these while the context is made
        from .format import archive, manifest_json
        from .program import Program
        from .validate import bundle as verify

        _check_options(
            mode=(mode, MODES), on_miss=(on_miss, dispatch.POLICIES), outputs=(outputs, OUTPUTS), check=(check, verify.LEVELS)
        )
        data = archive.manifest_bytes(folder)
        if key is not None:
            from .trust import manifest_signature  # late: most loads check none

            manifest_signature.check(folder, data, key)
        manifest = manifest_json.decode(data)
        verify.check_bundle(folder, manifest, check if key is None else "full")
        if manifest.target.kind == "cpu":
            from .cpu.backend import CpuBackend

            return Program(manifest, CpuBackend(folder, manifest), on_miss, outputs)
        from .cuda.backend import CudaBackend

        backend = CudaBackend(folder, manifest, device, mode, context=context.take(), poison=poison, lazy=lazy)
        return Program(manifest, backend, on_miss, outputs)
    finally:
        context.drop()


def _check_options(**options: tuple[str, tuple[str, ...]]) -> None:
    for name, (value, known) in options.items():
        if value not in known:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, known))}")
