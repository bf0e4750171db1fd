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
    """Loads the bundle at `path`.  The program runs what was checked, even if the bundle is replaced or removed later.

    - `device`: the CUDA device; the cpu target ignores it.
    - `on_miss`: what a call does whose size was not recorded.  "pad" takes the smallest recorded key that holds the call, "chunk"
      wastes the fewest rows, "error" refuses.
    - `outputs`: "copy" gives tensors that the caller owns.  "view" gives views that become stale with the next call.
    - `check`: "load" checks every file but the data of the weights, "full" checks that, too.
    - `weights`: "map" shares the file's pages with other processes.  "copy" reads the file into this process's memory, where later
      writes to the file do not show.
    - `mode`: "graph" replays recorded graphs, "stream" launches their kernels one by one.
    - `lazy` (GPU): False builds every key's graph at load, True at its first call.  None builds the first key's graph at load,
      and the others in the background, or in a call that needs one before.
    - `key`: public ed25519 keys, one of which must have signed the bundle: the path of a PEM file, 64 hexadecimal digits, or 32
      bytes.  Needs the extra `sign`.  The signature is checked first; then every file is hashed, as by check="full".
    - `threads`: CPU threads of a call, for the cpu target and for operations on the host beside a GPU.  Other programs and torch
      keep their number.  Calls from several threads use this number each.  None: OMP_NUM_THREADS, else the quota of the
      container, else the processors that the process may run on.
    - `cast`: casts inputs where every value has an equal one in the expected dtype: int32 to int64, float16 or bfloat16 to
      float32, bool to any.  This is NumPy's "safe" rule without int64 to float64.  An input that the model writes to is not cast.
    - `variant`: the variant to load, such as "sm_90" or "x86-64-v3".  None: that of the GPU, else the one for CPUs that uses most
      of this processor.
    - `state`: rows of state by dimension, such as {"pages": 4096}.  Dimensions that are not named take what is of use, at most
      nine tenths of the GPU memory that weights and temporaries leave, or half of the host's free memory.
    - `replicas`: loads a copy on each of `devices` (None: every GPU), and gives one object that calls them: `Replicas`.
    - `devices`: for a model over several GPUs, the device of each rank; None takes the first ones.  One process drives all.
      Inputs are given once, outputs are those of rank 0.  `timeout`: seconds that a rank waits for another one.
    - `rank`, `rendezvous`: for a model over several GPUs with a process for each rank, on `device`.  The processes meet at the
      path `rendezvous`, which rank 0 makes and removes, and wait there for `timeout` seconds.  All of them make equal calls, and
      get the outputs of their rank.

    Raises a CgbundleError; option-refused for `threads` if nothing runs on the CPU, for `replicas` if nothing runs on a GPU, and
    for `devices` of a model for one device without `replicas`; ValueError for a value that an option does not have.
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
