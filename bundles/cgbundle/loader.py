"""`load`: begins the context of a GPU, then opens the bundle (program/opening.py).

What is imported before the context begins delays the first answer by its whole time."""

from __future__ import annotations

import os

from .cuda.background import ContextFuture
from .errors import BundleError
from .format.open_files import open_directory, open_file

TYPE_CHECKING = False  # see cgbundle/__init__.py
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Literal, overload

    from .program import Program
    from .program.replicas import Replicas
    from .signatures import Keys

MANIFEST = "manifest.json"

CUDA, GLANCE = b'"kind":"cuda"', 16 << 20
"""How a manifest for a GPU spells its target, and the bytes that are searched.  A wrong guess costs an unused context, or the time
that one takes, nothing else."""

if TYPE_CHECKING:

    @overload
    def load(
        path: str | os.PathLike[str], *, device: int = 0, devices: Sequence[int] | None = None, replicas: Literal[False] = False,
        mode: str = "graph", on_miss: str = "pad", outputs: str = "copy", check: str = "load", weights: str = "map",
        lazy: bool | None = None, key: Keys | None = None, threads: int | None = None, cast: bool = False,
        timeout: float = 30.0, rank: int | None = None, rendezvous: str | os.PathLike[str] | None = None,
        variant: str | None = None, state: Mapping[str, int] | None = None,
    ) -> Program: ...  # fmt: skip

    @overload
    def load(
        path: str | os.PathLike[str], *, device: int = 0, devices: Sequence[int] | None = None, replicas: Literal[True],
        mode: str = "graph", on_miss: str = "pad", outputs: str = "copy", check: str = "load", weights: str = "map",
        lazy: bool | None = None, key: Keys | None = None, threads: int | None = None, cast: bool = False,
        timeout: float = 30.0, rank: None = None, rendezvous: None = None, variant: str | None = None,
        state: Mapping[str, int] | None = None,
    ) -> Replicas: ...  # fmt: skip


def load(
    path: str | os.PathLike[str],
    *,
    device: int = 0,
    devices: Sequence[int] | None = None,
    replicas: bool = False,
    mode: str = "graph",
    on_miss: str = "pad",
    outputs: str = "copy",
    check: str = "load",
    weights: str = "map",
    lazy: bool | None = None,
    key: Keys | None = None,
    threads: int | None = None,
    cast: bool = False,
    timeout: float = 30.0,
    rank: int | None = None,
    rendezvous: str | os.PathLike[str] | None = None,
    variant: str | None = None,
    state: Mapping[str, int] | None = None,
) -> Program | Replicas:
    """Loads the bundle at `path`.

    `device`: the CUDA device (the cpu target ignores it).  `replicas`: a copy on each of `devices` (None: on every GPU that this
    machine shows), which are called as one: see `Replicas`.  The bundle is opened and checked once.

    `mode`: "graph" replays recorded graphs, "stream" launches the same rows one by one.  `on_miss`: for sizes that were not
    recorded, "pad" takes the smallest recorded key that holds the call, "chunk" wastes the fewest rows, "error" refuses.
    `outputs`: "copy" gives tensors of the caller's own, "view" gives guarded views that the next call makes stale.  `check`: "load"
    checks every file but the data of the weights, "full" those too.
    `weights`: "map" shares the file's pages with other processes, "copy" reads it into memory of this process, where no write into
    the file is seen.  `lazy` (cuda): build a key's graph at its first call (True) or at load (False).  None builds that of the
    first key at load, and the others in the background, or at a call that comes before.
    `key`: a public ed25519 key, or several of which one must have signed the bundle: path of a PEM file, 64 hexadecimal digits, or
    32 bytes.  It takes the extra `sign`.  Until the signature holds only the manifest is read; then every file is
    hashed, as by check="full".
    `threads`: how many a call uses on the CPU, for the cpu target and for operations on the host beside a GPU.  It holds for this
    program and its sessions alone: other programs, and torch, keep theirs.  Calls from several threads use as many each.  None:
    OMP_NUM_THREADS, which holds for the process, else all processors that it may run on, or as many as a container's quota has.
    `cast`: inputs of another dtype are cast where every value has an equal one in the expected dtype: int32 to int64, float16 or
    bfloat16 to float32, bool to any.  This is NumPy's "safe" rule, without int64 to float64.  An input that the model writes to is
    never cast.
    `devices` of a model over several GPUs: that of each rank, None for the first ones.  The process drives all of them; a call's
    inputs are given once, its outputs are rank 0's.  `timeout`: the seconds that a rank waits for another one.
    `rank` and `rendezvous`: a process for each rank instead, on `device`.  They meet at the path `rendezvous` of this host, which
    rank 0 makes and removes, and wait there for each other for `timeout` seconds.  Each calls its own program, all of them alike,
    and gets its rank's outputs.
    `variant`: of a bundle with several, the one that is loaded: "sm_90", "x86-64-v3".  None: that of the GPU, else the one for
    CPUs that uses most of this processor.
    `state`: how many rows the state has, by the dimensions that the build left open: {"pages": 4096}.  Those that are not named
    take what is free, as far as it is of use: nine tenths of the GPU's memory beside weights and temporaries, half of the host's.

    What was checked is what runs, also when the bundle is replaced or removed later.
    Raises a CgbundleError, option-refused for `threads` where nothing runs on the CPU, for `replicas` where
    nothing runs on a GPU, and for `devices` of a model for one device without it; ValueError for a value that an option does not
    have.
    """
    opened: Program | Replicas = _open(
        path, device, devices, replicas=replicas, mode=mode, on_miss=on_miss, outputs=outputs, check=check, weights=weights,
        lazy=lazy, key=key, threads=threads, cast=cast, timeout=timeout, rank=rank, rendezvous=rendezvous, variant=variant,
        state=state,
    )  # fmt: skip
    return opened


def open_program(path: str | os.PathLike[str], device: int = 0, **options: Any) -> Program:
    """`load`; with `poison`, that byte fills the arena and every byte of kernel parameters that the recording calls undefined,
    so that a replay that relies on one goes wrong, and state has a row more than the fewest.  For verification."""
    program: Program = _open(path, device, **options)
    return program


def _open(path: Any, device: Any, devices: Any = None, *, replicas: bool = False, **options: Any) -> Any:
    """Begins the context.  All else is imported while it is made."""
    first = devices[0] if isinstance(devices, list | tuple | range) and devices else device
    begins = type(first) is int and first >= 0 and not replicas
    context = _begin_context(path, first) if begins else ContextFuture(None)
    try:
        from .program.opening import open_bundle

        return open_bundle(path, context, device=device, devices=devices, replicas=replicas, **options)
    finally:
        context.drop()


def _begin_context(path: Any, device: int) -> ContextFuture:
    """The context of GPU number `device`, begun at once when the manifest looks like that of a bundle for a GPU."""
    try:
        folder = open_directory(os.fspath(path))
        try:
            manifest = open_file(MANIFEST, folder)
            try:
                text = os.pread(manifest, GLANCE, 0)
            finally:
                os.close(manifest)
        finally:
            os.close(folder)
    except (BundleError, OSError, TypeError):  # whoever opens the bundle says what it is
        return ContextFuture(None)
    if CUDA not in text:
        return ContextFuture(None)
    from .cuda.driver import Context  # here, not in the thread: two threads that import at once wait for each other

    return ContextFuture(lambda: Context(device))
