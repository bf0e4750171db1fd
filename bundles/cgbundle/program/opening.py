"""Opens a bundle on disk as a program, after all checks. Imported while a GPU's context is created."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..call.plan import POLICIES
from ..errors import BundleError, CallError, MachineError
from ..format.archive import Archive
from ..format.file_names import SELF_TEST
from ..process import ContextFuture
from ..validate.contents import LEVELS, check_loaded
from .program import Program

if TYPE_CHECKING:
    from ..gpu.backend import CudaBackend
    from ..signatures import Keys
    from .replicas import Replicas


MODES = ("graph", "stream")

WORDS = {
    "mode": MODES, "on_miss": POLICIES, "outputs": ("copy", "view"), "check": LEVELS, "weights": ("map", "copy"),
}  # fmt: skip
"""Values of options."""

LONGEST_WAIT = 1 << 32  # seconds: as nanoseconds they fit into 64 bits
MOST_DEVICES = 1 << 16  # more than a machine can have
ATTEMPTS = 100  # how often a bundle that is replaced meanwhile is read again


def _is_device(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST_DEVICES


def _is_word(words: tuple[str, ...], value: Any) -> bool:
    return isinstance(value, str) and value in words


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "replicas": (lambda value: isinstance(value, bool), "True or False"),
    "cast": (lambda value: isinstance(value, bool), "True or False"),
    "lazy": (lambda value: value is None or isinstance(value, bool), "True or False, or None"),
    "device": (_is_device, "the number of a CUDA device"),
    "devices": (lambda value: value is None or (isinstance(value, list | tuple | range) and all(map(_is_device, value))),
        "a list of numbers of CUDA devices, or None"),
    "timeout": (lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LONGEST_WAIT,
        f"more than 0 seconds, and less than {LONGEST_WAIT}"),
    "rank": (lambda value: value is None or type(value) is int, "the number of a rank, or None"),
    "rendezvous": (lambda value: value is None or isinstance(value, str | os.PathLike), "a path, or None"),
    "variant": (lambda value: value is None or isinstance(value, str), "the name of a variant, or None"),
    "state": (lambda value: value is None or (isinstance(value, dict) and all(type(count) is int for count in value.values())),
        "numbers of rows by dimension, such as {'pages': 4096}, or None"),
}  # fmt: skip
"""Checks of other options, and their values in words."""


def open_bundle(
    path: str | os.PathLike[str], context: ContextFuture, *, device: int = 0, devices: Sequence[int] | None = None,
    replicas: bool = False, mode: str = "graph", on_miss: str = "pad", outputs: str = "copy", check: str = "load",
    poison: int | None = None, weights: str = "map", lazy: bool | None = None, key: Keys | None = None, threads: int | None = None,
    cast: bool = False, timeout: float = 30.0, rank: int | None = None, rendezvous: str | os.PathLike[str] | None = None,
    variant: str | None = None, state: Mapping[str, int] | None = None,
) -> Program | Replicas:  # fmt: skip
    """`loader.load` with the context that is being created; `poison` as for `loader.open_program`."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"path: expected text or an os.PathLike, got {type(path).__name__}")
    _check_options({
        "device": device, "devices": devices, "replicas": replicas, "mode": mode, "on_miss": on_miss, "outputs": outputs,
        "check": check, "weights": weights, "lazy": lazy, "cast": cast, "timeout": timeout, "rank": rank, "rendezvous": rendezvous,
        "variant": variant, "state": state,
    })  # fmt: skip
    bundle: Archive | None = None
    others: list[Archive] = []
    try:
        bundle = Archive(os.fspath(path), copy_weights=weights == "copy")
        _check(bundle, check, key, variant, devices[0] if devices else device)
        manifest = bundle.manifest
        rows = _check_options_of_bundle(bundle, devices, rank, threads, state, replicas=replicas, poison=poison)
        if manifest.target.kind == "cpu":
            from ..cpu.backend import CpuBackend

            program = _program(bundle, CpuBackend(bundle, threads, rows), on_miss, outputs, cast)
        else:
            from ..gpu.backend import CudaBackend
            from ..gpu.device_bundle import check_driver

            check_driver(manifest.target)  # first: without a GPU, the context's error does not name the bundle's GPU
            if replicas:
                from .replicas import open_replicas  # few programs are on several devices

                def opened_on(number: int) -> Program:
                    backend = CudaBackend(bundle, number, mode, lazy=lazy, threads=threads, rows=rows)
                    return _program(bundle, backend, on_miss, outputs, cast)

                return open_replicas(bundle, devices, opened_on)
            if manifest.world:
                from .ranks import open_rank, open_ranks  # few models are over several

                options: Any = {"context": context, "threads": threads, "timeout": timeout}
                if rank is not None and rendezvous is not None:
                    backend: CudaBackend = open_rank(bundle, others, device, (rank, os.fspath(rendezvous)), mode, **options)
                else:
                    backend = open_ranks(bundle, others, devices, mode, poison=poison, **options)
            else:
                _import_libraries()
                backend = CudaBackend(bundle, device, mode, context=context, poison=poison, lazy=lazy, threads=threads, rows=rows)
            rank_bundle = others[0] if others and rank is not None else bundle
            program = _program(rank_bundle, backend, on_miss, outputs, cast)
            if rank is not None and rank_bundle.manifest.random is not None:
                program.seed(backend.seed)  # type: ignore[attr-defined]  # of one rank; equal on all ranks
        try:
            for archive in (bundle, *others):
                archive.check_unchanged()
        except BundleError:
            program.close()
            raise
        return program
    finally:
        for opened in (*others, *([bundle] if bundle is not None else [])):
            opened.close()


def _check_options_of_bundle(
    bundle: Archive, devices: Sequence[int] | None, rank: int | None, threads: int | None, state: Mapping[str, int] | None, *,
    replicas: bool, poison: int | None,
) -> Mapping[str, int]:  # fmt: skip
    """Raises bundle-kind, option-refused, ranks-refused. Returns the requested rows of state."""
    manifest = bundle.manifest
    if manifest.engine is not None:
        raise CallError("bundle-kind", f"{bundle.path}: holds graphs of an engine, not a program")
    if replicas:
        from .replicas import check_replicas  # few programs are on several devices

        check_replicas(manifest)
    if state and not manifest.state_dimensions:
        text = f"state={dict(state)}: the bundle's state has the sizes that it was built with"
        raise CallError("option-refused", text, "leave it out, or build the bundle with state()")
    if threads is not None:
        from ..cpu.machine import check_number  # few loads set it

        check_number(threads)
        if not any(region.kind == "host" for region in manifest.regions):
            text = f"threads={threads}: the bundle is for {manifest.target.arch}, and nothing of it runs on the CPU"
            raise CallError("option-refused", text)
    if devices is not None and not manifest.world and not replicas:
        text = f"devices={list(devices)}: the bundle is for one device"
        raise CallError("option-refused", text, "give replicas=True for a copy of it on each, or device= for another one")
    if rank is not None and not manifest.world:
        raise CallError("option-refused", f"rank={rank}: the bundle is for one device")
    if poison is None:
        return state or {}
    return {dimension.name: manifest.weights[dimension.weights[0]].shape[0] + 1 for dimension in manifest.state_dimensions}


def _import_libraries() -> None:
    """Imports what a first call needs for the caller's tensor library, while the context is created."""
    if "torch" in sys.modules:
        from ..gpu import fast_path  # noqa: F401
        from ..tensors import torch_tensors  # noqa: F401
    elif "numpy" in sys.modules:
        from ..tensors import numpy_arrays  # noqa: F401
    else:
        from ..tensors import tensor  # noqa: F401


def _program(bundle: Archive, backend: Any, on_miss: str, outputs: str, cast: bool) -> Program:
    try:
        manifest = backend.manifest if bundle.manifest.state_dimensions else bundle.manifest
        return Program(manifest, backend, on_miss, outputs, cast, bundle.kept(SELF_TEST))
    except BaseException:
        backend.close()
        raise


def _check(bundle: Archive, level: str, key: Keys | None, variant: str | None, device: int) -> None:
    """Checks the bundle, or its replacement: a build may replace it while it is read."""
    for attempt in range(ATTEMPTS + 1):
        try:
            return _check_once(bundle, level, key, variant, device)
        except BundleError:
            if attempt == ATTEMPTS or not bundle.is_replaced():
                raise
            bundle.reopen()


def _check_once(bundle: Archive, level: str, key: Keys | None, variant: str | None, device: int) -> None:
    if key is not None:
        from .. import signatures  # most loads have no key

        signatures.check(bundle, key)  # before the manifest is parsed
    if variant is not None or len(bundle.variants) > 1:
        _choose_variant(bundle, variant, device)
    if bundle.manifest.world and bundle.manifest.world.rank:
        raise CallError("ranks-refused", f"{bundle.path}: the bundle of one rank", "load the folder that its `ranks` lies in")
    if key is None and level == "load":
        return check_loaded(bundle)
    from ..validate.bundle import check_bundle  # most loads do not hash weights

    check_bundle(bundle, "full")


def _choose_variant(bundle: Archive, variant: str | None, device: int) -> None:
    """Chooses the requested variant, or that of this machine. Raises option-refused, wrong-machine."""
    from ..cpu.machine import BY_NAME_ALONE, processor_flags
    from ..format.variants import fitting_variant, named_variant

    targets = bundle.variants.targets()
    if variant is not None:
        return bundle.choose(named_variant(targets, variant))
    gpu = _device_arch(device) if any(target.kind == "cuda" for target in targets) else ""
    bundle.choose(fitting_variant(targets, gpu, os.uname().machine, processor_flags() | BY_NAME_ALONE))


def _device_arch(index: int) -> str:
    """The architecture of a GPU ("sm_90"); "" without a driver or such a GPU. Creates no context."""
    from ..cuda.driver import call, device_count, require
    from ..cuda.libcuda import COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR

    try:
        require()
        if not 0 <= index < device_count():
            return ""
        device = call("cuDeviceGet", index)
        numbers = (COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR)
        return "sm_" + "".join([str(call("cuDeviceGetAttribute", number, device)) for number in numbers])
    except MachineError:
        return ""


def _check_options(options: Mapping[str, Any]) -> None:
    """Raises ValueError for unknown values and contradicting options."""
    checks = {name: (fits, expected) for name, (fits, expected) in KINDS.items()}
    for name, known in WORDS.items():
        checks[name] = partial(_is_word, known), f"one of {', '.join(map(repr, known))}"
    for name, (fits, expected) in checks.items():
        value = options[name]
        if not fits(value):  # the repr of the caller's classes may raise
            plain = value is None or type(value) in (str, bytes, bool, int, float)
            raise ValueError(f"{name}={repr(value)[:100] if plain else type(value).__name__}: expected {expected}")
    device, devices, rank, rendezvous = [options[name] for name in ("device", "devices", "rank", "rendezvous")]
    if (rank is None) != (rendezvous is None) or (rank is not None and devices is not None):
        raise ValueError(f"rank={rank}, rendezvous={rendezvous!r}, devices={devices}: expected both of the first, and no devices")
    if options["replicas"] and rank is not None:
        raise ValueError(f"replicas=True, rank={rank}: expected one of them: a rank is one share of a model, a replica all of it")
    conflict = options["replicas"] and (device or (devices is not None and len(set(devices)) < max(1, len(devices))))
    if conflict or (device and devices is not None):
        raise ValueError(f"device={device}, devices={devices}: expected devices alone, different ones, at least one")
