"""`load`: from a bundle on disk to a program, everything checked before anything runs."""

from __future__ import annotations

import os
import sys

from .cuda.background import ContextFuture
from .errors import BundleError, CallError
from .format.open_files import open_directory, open_file

TYPE_CHECKING = False  # see cgbundle/__init__.py
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Literal, overload

    from .format.archive import Archive
    from .format.schema import Manifest
    from .gpu.backend import CudaBackend
    from .program import Program
    from .program.replicas import Replicas
    from .signatures import Keys

MODES = ("graph", "stream")
OUTPUTS = ("copy", "view")
WEIGHTS = ("map", "copy")

LONGEST_WAIT = 1 << 32
"""Seconds: as nanoseconds they fit into 64 bits."""

MOST_DEVICES = 1 << 16
"""More than a machine can have."""

MANIFEST = "manifest.json"

CUDA, GLANCE = b'"kind":"cuda"', 16 << 20
"""How a manifest for a GPU spells its target, and the bytes that are searched.  A wrong guess costs an unused context, or the time
that one takes, nothing else."""

ATTEMPTS = 100
"""How often a bundle that is replaced while it is read is read again."""

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
    _check_path(path)
    _check_kinds(
        device=device, devices=devices, replicas=replicas, lazy=lazy, cast=cast, timeout=timeout, rank=rank, rendezvous=rendezvous,
        variant=variant, state=state,
    )  # fmt: skip
    options: dict[str, Any] = {
        "mode": mode, "on_miss": on_miss, "outputs": outputs, "check": check, "weights": weights, "lazy": lazy, "key": key,
        "threads": threads, "cast": cast, "variant": variant, "state": state,
    }  # fmt: skip
    meeting = None if rank is None or rendezvous is None else (rank, os.fspath(rendezvous))
    opened: Program | Replicas = _open(
        path, device, replicas=replicas, devices=devices, timeout=timeout, meeting=meeting, **options
    )
    return opened


def open_program(path: str | os.PathLike[str], device: int = 0, **options: Any) -> Program:
    """`load`; with `poison`, that byte fills the arena and every byte of kernel parameters that the recording calls undefined,
    so that a replay that relies on one goes wrong, and state has a row more than the fewest.  For verification."""
    program: Program = _open(path, device, **options)
    return program


def _open(
    path: str | os.PathLike[str], device: int = 0, mode: str = "graph", on_miss: str = "pad", outputs: str = "copy",
    check: str = "load", poison: int | None = None, weights: str = "map", lazy: bool | None = None, key: Keys | None = None,
    threads: int | None = None, cast: bool = False, devices: Sequence[int] | None = None, timeout: float = 30.0,
    meeting: tuple[int, str] | None = None, variant: str | None = None, state: Mapping[str, int] | None = None,
    replicas: bool = False,
) -> Any:  # fmt: skip
    if replicas and (device or (devices is not None and (not devices or len(set(devices)) < len(devices)))):
        raise ValueError(f"device={device}, devices={devices}: expected devices alone, different ones, at least one")
    first = devices[0] if devices else device
    context = ContextFuture(None) if replicas else _begin_context(os.fspath(path), first)
    bundle: Archive | None = None
    others: list[Archive] = []
    try:
        from .format.archive import Archive  # this too while the context is made

        bundle = Archive(os.fspath(path), copy_weights=weights == "copy")
        from .program import Program  # this while the context is made

        _check_options(mode, on_miss, outputs, check, weights)
        _check(bundle, check, key, variant, first)
        if replicas:
            from .program.replicas import check_replicas, open_replicas  # few programs are on several devices

            check_replicas(bundle.manifest)
        rows = _state_rows(bundle.manifest, state, poison)
        if threads is not None:
            _check_threads(bundle.manifest, threads)
        if devices is not None and not bundle.manifest.world and not replicas:
            text = f"devices={list(devices)}: the bundle is for one device"
            raise CallError("option-refused", text, "give replicas=True for a copy of it on each, or device= for another one")
        if meeting is not None and not bundle.manifest.world:
            raise CallError("option-refused", f"rank={meeting[0]}: the bundle is for one device")
        if bundle.manifest.target.kind == "cpu":
            from .cpu.backend import CpuBackend

            program = _program(Program, bundle, CpuBackend(bundle, threads, rows), on_miss, outputs, cast)
        else:
            from .cuda.driver import check_driver
            from .gpu.backend import CudaBackend

            check_driver(bundle.manifest.target)  # first: what making a context says where no GPU is does not name the bundle's
            if replicas:

                def opened_on(number: int) -> Program:
                    copied = CudaBackend(bundle, number, mode, lazy=lazy, threads=threads, rows=rows)
                    return _program(Program, bundle, copied, on_miss, outputs, cast)

                return open_replicas(bundle, devices, opened_on)
            if meeting is not None:
                from .program.one_rank import open_rank  # few models are over several

                backend: CudaBackend = open_rank(
                    bundle, others, device, meeting, mode, context=context, threads=threads, timeout=timeout
                )
            elif bundle.manifest.world:
                from .program.ranks import open_ranks  # likewise

                backend = open_ranks(
                    bundle, others, devices, mode, context=context, poison=poison, threads=threads, timeout=timeout
                )
            else:
                _import_libraries()
                backend = CudaBackend(bundle, device, mode, context=context, poison=poison, lazy=lazy, threads=threads, rows=rows)
            own = others[0] if others and meeting is not None else bundle
            program = _program(Program, own, backend, on_miss, outputs, cast)
            if meeting is not None and own.manifest.random is not None:
                program.seed(backend.seed)  # type: ignore[attr-defined]  # of one rank: all ranks draw the same
        try:
            for each in (bundle, *others):
                each.check_unchanged()
        except BundleError:
            program.close()
            raise
        return program
    finally:
        context.drop()
        for opened in (*others, *([bundle] if bundle is not None else [])):
            opened.close()


def _import_libraries() -> None:
    """What a first call needs for the caller's tensor libraries: it costs nothing while the context is made."""
    if "numpy" in sys.modules:
        from .tensors import numpy_arrays  # noqa: F401
    if "torch" in sys.modules:
        from .gpu import fast_path  # noqa: F401
        from .tensors import torch_tensors  # noqa: F401


def _program(made: type[Program], bundle: Archive, backend: Any, on_miss: str, outputs: str, cast: bool) -> Program:
    """A program over a backend, which is closed where that fails."""
    from .format.file_names import SELF_TEST

    try:
        manifest = backend.manifest if bundle.manifest.state_dimensions else bundle.manifest
        return made(manifest, backend, on_miss, outputs, cast, bundle.kept(SELF_TEST))
    except BaseException:
        backend.close()
        raise


def _begin_context(path: str, device: int) -> ContextFuture:
    """The context of GPU number `device`, begun at once when the manifest looks like that of a bundle for a GPU."""
    try:
        folder = open_directory(path)
        try:
            manifest = open_file(MANIFEST, folder)
            try:
                text = os.pread(manifest, GLANCE, 0)
            finally:
                os.close(manifest)
        finally:
            os.close(folder)
    except (BundleError, OSError):  # whoever opens the bundle says what it is
        return ContextFuture(None)
    if CUDA not in text:
        return ContextFuture(None)
    from .cuda.driver import Context  # here, not in the thread: two threads that import at once wait for each other

    return ContextFuture(lambda: Context(device))


def _check(bundle: Archive, level: str, key: Keys | None, variant: str | None, device: int) -> None:
    """Checks the bundle, or the one that stands in its place by now: a build may replace it while it is read."""
    for _ in range(ATTEMPTS):
        try:
            return _check_once(bundle, level, key, variant, device)
        except BundleError:
            if not bundle.is_replaced():
                raise
            bundle.reopen()
    _check_once(bundle, level, key, variant, device)


def _check_once(bundle: Archive, level: str, key: Keys | None, variant: str | None, device: int) -> None:
    from .validate.contents import check_loaded  # imported while the context is made

    if key is not None:
        from . import signatures  # late: most loads need none

        signatures.check(bundle, key)  # before the manifest is as much as parsed
    if variant is not None or len(bundle.variants) > 1:
        _choose_variant(bundle, variant, device)
    if bundle.manifest.world and bundle.manifest.world.rank:
        raise CallError("ranks-refused", f"{bundle.path}: the bundle of one rank", "load the folder that its `ranks` lies in")
    if key is None and level == "load":
        return check_loaded(bundle)
    from .validate.bundle import check_bundle  # most loads leave the weights' hashes out

    check_bundle(bundle, "full")


def _state_rows(manifest: Manifest, state: Mapping[str, int] | None, poison: int | None = None) -> Mapping[str, int]:
    """The numbers of rows that are asked for.  Raises option-refused."""
    if state and not manifest.state_dimensions:
        text = f"state={dict(state)}: the bundle's state has the sizes that it was built with"
        raise CallError("option-refused", text, "leave it out, or build the bundle with state()")
    if poison is None:
        return state or {}
    return {each.name: manifest.weights[each.weights[0]].shape[0] + 1 for each in manifest.state_dimensions}


def _choose_variant(bundle: Archive, variant: str | None, device: int) -> None:
    """Chooses the variant that was asked for, or that of this machine.  Raises option-refused, wrong-machine."""
    from .cpu.machine import BY_NAME_ALONE, processor_flags
    from .format.variants import fitting_variant, named_variant

    targets = bundle.variants.targets()
    if variant is not None:
        return bundle.choose(named_variant(targets, variant))
    gpu = ""
    if any(target.kind == "cuda" for target in targets):
        from .cuda.driver import device_arch

        gpu = device_arch(device)
    bundle.choose(fitting_variant(targets, gpu, os.uname().machine, processor_flags() | BY_NAME_ALONE))


def _check_threads(manifest: Manifest, threads: int) -> None:
    from .cpu.machine import check_number  # few programs are given a number

    check_number(threads)
    if not any(region.kind == "host" for region in manifest.regions):
        target = manifest.target.arch
        raise CallError("option-refused", f"threads={threads}: the bundle is for {target}, and nothing of it runs on the CPU")


def _check_options(mode: str, on_miss: str, outputs: str, check: str, weights: str) -> None:
    from .call import plan as dispatch  # while the context is made
    from .validate.contents import LEVELS

    _check_words(LEVELS, dispatch.POLICIES, mode=mode, on_miss=on_miss, outputs=outputs, check=check, weights=weights)


def _check_path(path: Any) -> None:
    """Raises TypeError for what is no path."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"path: expected text or an os.PathLike, got {type(path).__name__}")


def _check_kinds(
    *, device: Any, devices: Any, replicas: Any, lazy: Any, cast: Any, timeout: Any, rank: Any, rendezvous: Any, variant: Any,
    state: Any,
) -> None:  # fmt: skip
    """Raises ValueError for a value that an option does not have, and for options that contradict each other."""
    for name, value in (("replicas", replicas), ("cast", cast), *((("lazy", lazy),) if lazy is not None else ())):
        if not isinstance(value, bool):
            raise _wrong(name, value, f"True or False{', or None' if name == 'lazy' else ''}")
    if not _is_device(device):
        raise _wrong("device", device, "the number of a CUDA device")
    if devices is not None and not _are_devices(devices):
        raise _wrong("devices", devices, "a list of numbers of CUDA devices, or None")
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not number or not 0 < timeout < LONGEST_WAIT:
        raise _wrong("timeout", timeout, f"more than 0 seconds, and less than {LONGEST_WAIT}")
    if rank is not None and type(rank) is not int:
        raise _wrong("rank", rank, "the number of a rank, or None")
    if rendezvous is not None and not isinstance(rendezvous, str | os.PathLike):
        raise _wrong("rendezvous", rendezvous, "a path, or None")
    if variant is not None and not isinstance(variant, str):
        raise _wrong("variant", variant, "the name of a variant, or None")
    if state is not None and not (isinstance(state, dict) and all(type(each) is int for each in state.values())):
        raise _wrong("state", state, "numbers of rows by dimension, such as {'pages': 4096}, or None")
    if (rank is None) != (rendezvous is None) or (rank is not None and devices is not None):
        raise ValueError(f"rank={rank}, rendezvous={rendezvous!r}, devices={devices}: expected both of the first, and no devices")
    if replicas and rank is not None:
        raise ValueError(f"replicas=True, rank={rank}: expected one of them: a rank is one share of a model, a replica all of it")
    if device and devices is not None:
        raise ValueError(f"device={device}, devices={devices}: expected devices alone, different ones, at least one")


def _check_words(levels: Sequence[str], policies: Sequence[str], **given: Any) -> None:
    """Raises ValueError for a word that an option does not have."""
    known = {"mode": MODES, "on_miss": policies, "outputs": OUTPUTS, "check": levels, "weights": WEIGHTS}
    for name, value in given.items():
        if not isinstance(value, str) or value not in known[name]:
            raise _wrong(name, value, f"one of {', '.join(map(repr, known[name]))}")


def _is_device(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST_DEVICES


def _are_devices(value: Any) -> bool:
    return isinstance(value, list | tuple | range) and all(map(_is_device, value))


def _wrong(name: str, value: Any, expected: str) -> ValueError:
    """Values of Python's own are shown, of others the class alone: what they say of themselves may raise."""
    plain = value is None or type(value) in (str, bytes, bool, int, float)
    return ValueError(f"{name}={repr(value)[:100] if plain else type(value).__name__}: expected {expected}")
