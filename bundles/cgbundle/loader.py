"""`load`: starts the context of a GPU, then opens the bundle (program/opening.py). Imports before that delay the first call."""

from __future__ import annotations

import os

from .errors import BundleError
from .process import ContextFuture, open_directory, open_file

TYPE_CHECKING = False  # see cgbundle/__init__.py
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Literal, overload

    from .program import Program
    from .program.replicas import Replicas
    from .signatures import Keys

MANIFEST = "manifest.json"

CUDA, GLANCE = b'"kind":"cuda"', 16 << 20
"""Text in every manifest for a GPU, and how many bytes are searched for it. A wrong guess costs an unused context, or time."""

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
    path: str | os.PathLike[str], *, device: int = 0, devices: Sequence[int] | None = None, replicas: bool = False,
    mode: str = "graph", on_miss: str = "pad", outputs: str = "copy", check: str = "load", weights: str = "map",
    lazy: bool | None = None, key: Keys | None = None, threads: int | None = None, cast: bool = False, timeout: float = 30.0,
    rank: int | None = None, rendezvous: str | os.PathLike[str] | None = None, variant: str | None = None,
    state: Mapping[str, int] | None = None,
) -> Program | Replicas:  # fmt: skip
    """Loads the bundle at `path`.  The program keeps the checked files, even if the bundle is replaced or removed later.

    - `device`: the CUDA device; the cpu target ignores it.
    - `on_miss`: for calls of sizes that were not recorded.  "pad" uses the smallest recorded key that holds the call, "chunk" the
      chunks with the fewest padded rows, "error" raises key-missing.
    - `outputs`: "copy" returns tensors that the caller owns.  "view" returns views that become stale with the next call.
    - `check`: "load" checks every file except the data of the weights, "full" also checks these.
    - `weights`: "map" shares the file's pages with other processes.  "copy" reads the file into this process's memory, so that
      later writes to the file have no effect.
    - `mode`: "graph" replays recorded graphs, "stream" launches their kernels one by one.
    - `lazy` (GPU): False builds every key's graph at load, True at its first call.  None builds the first key's graph at load, and
      the others in the background, or in a call that needs one earlier.
    - `key`: public ed25519 keys, one of which must have signed the bundle: the path of a PEM file, 64 hexadecimal digits, or 32
      bytes.  Needs the extra `sign`.  The signature is checked first; then every file is hashed, as by check="full".
    - `threads`: CPU threads of a call, for the cpu target and for operations on the host beside a GPU.  Other programs and torch
      keep their own number.  If several threads call, each call uses this number.  None: OMP_NUM_THREADS, else the quota of the
      container, else the processors that the process may run on.
    - `cast`: casts inputs if the cast is lossless for all values: int32 to int64, float16 or bfloat16 to float32, bool to any.
      This is NumPy's "safe" rule without int64 to float64.  An input that the model writes to is not cast.
    - `variant`: the variant to load, such as "sm_90" or "x86-64-v3".  None: the variant of this GPU, else the CPU variant with the
      highest level that this processor has.
    - `state`: rows of state by dimension, such as {"pages": 4096}.  Other dimensions take their maximum, but at most nine tenths of
      the GPU memory that weights and temporaries leave free, or half of the host's free memory.
    - `replicas`: loads a copy on each of `devices` (None: every GPU), and returns one object that calls them: `Replicas`.
    - `devices`: for a model over several GPUs, the device of each rank; None uses the first ones.  One process drives all devices.
      A call takes the inputs once, and returns the outputs of rank 0.  `timeout`: seconds that a rank waits for another one.
    - `rank`, `rendezvous`: for a model over several GPUs with a process for each rank, on `device`.  The processes connect at the
      socket `rendezvous`, which rank 0 creates and removes, and wait there for `timeout` seconds.  All of them make the same calls,
      and get the outputs of their rank.

    Raises a CgbundleError: option-refused for `threads` if no code runs on the CPU, for `replicas` if no code runs on a GPU, and
    for `devices` without `replicas` if the model is for one device.  Raises ValueError for an unknown value of an option.
    """
    opened: Program | Replicas = _open(
        path, device, devices, replicas=replicas, mode=mode, on_miss=on_miss, outputs=outputs, check=check, weights=weights,
        lazy=lazy, key=key, threads=threads, cast=cast, timeout=timeout, rank=rank, rendezvous=rendezvous, variant=variant,
        state=state,
    )  # fmt: skip
    return opened


def open_program(path: str | os.PathLike[str], device: int = 0, **options: Any) -> Program:
    """`load` for verification. `poison`: a byte that fills the arena and undefined bytes of kernel parameters, so that a replay
    that relies on them fails. With it, state has one row more than the minimum."""
    program: Program = _open(path, device, **options)
    return program


def _open(path: Any, device: Any, devices: Any = None, *, replicas: bool = False, **options: Any) -> Any:
    """Starts the context in another thread, and imports the rest meanwhile."""
    first = devices[0] if isinstance(devices, list | tuple | range) and devices else device
    begins = type(first) is int and first >= 0 and not replicas
    context = _begin_context(path, first) if begins else ContextFuture(None)
    try:
        from .program.opening import open_bundle

        return open_bundle(path, context, device=device, devices=devices, replicas=replicas, **options)
    finally:
        context.drop()


def _begin_context(path: Any, device: int) -> ContextFuture:
    """Starts to create the GPU's context if the manifest seems to be for a GPU."""
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
    except (BundleError, OSError, TypeError):  # `open_bundle` will report the error
        return ContextFuture(None)
    if CUDA not in text:
        return ContextFuture(None)
    from .cuda.driver import Context  # imported here, not in the thread: two threads that import at once wait for each other

    return ContextFuture(lambda: Context(device))
