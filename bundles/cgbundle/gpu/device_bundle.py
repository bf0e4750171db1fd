"""What the sessions of a bundle share on one GPU: context, memory weights, kernel images."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..cuda.driver import Context, Relaxed, call, driver_version, free_bytes, require
from ..cuda.kernels import Modules
from ..cuda.memory import SMALLEST, WEIGHTS, Memories, Piece, allocate
from ..cuda.upload import Upload, listed
from ..errors import MachineError
from ..format.archive import Archive
from ..format.file_names import KERNELS, all_programs
from ..format.file_names import WEIGHTS as FILE
from ..format.schema import STATE, Target
from ..process import ContextFuture

if TYPE_CHECKING:
    from ..cpu.host_weights import HostWeights, InitialState
    from ..validate.module_state import ModuleState
    from .moves import Relocation


class DeviceBundle:
    """A bundle on GPU `device`; parameters and errors as for `CudaBackend`. It has one share, more by `retain`; the last `release`
    frees it. Hold `lock` to create graphs or load modules, `updating` to change weights or create a session over them. `hosted`:
    weights of host regions, or None. `programs` of all entries, `entries` the entry of each, `shared_files` recordings of several
    steps, `donated` places of donated inputs (see `moves.donated_places`), `relocation` of state that was moved."""

    def __init__(
        self, bundle: Archive, device: int, mode: str, poison: int | None, context: Context | ContextFuture | None,
        threads: int | None, peer: int = 0, rows: Mapping[str, int] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        manifest = bundle.manifest
        self.threads, self.peer = threads, peer
        self.bundle, self.manifest, self.mode, self.poison = bundle, manifest, mode, poison
        self.entries = [entry for entry in manifest.entries for _ in entry.programs]
        self.programs = list(all_programs(manifest))
        files = Counter(step.file for program in self.programs for step in program.steps if step.file)
        self.shared_files = {file for file, times in files.items() if times > 1}
        self.donated: dict[int, dict[int, dict[int, int]]] = {}
        if manifest.donations:
            from .moves import donated_places  # few bundles have any

            self.donated = donated_places(manifest)
        self.lock = threading.RLock()  # reentrant: a session may be collected, and release its share, at any point of this thread
        self.updating, self.updated = threading.RLock(), False
        self._shares = 1
        self._uploads: list[Upload] = []
        with ExitStack() as undo:
            if isinstance(context, Context):
                undo.callback(context.release)
            if manifest.target.features:
                from ..cpu.machine import check_features  # only host regions need features

                check_features(manifest.target.features)
            pieces = listed(bundle)
            constants = any(region.kind == "host" and region.constants for region in manifest.regions)
            self.hosted = _host_weights(bundle) if constants else None
            self._states: tuple[ModuleState, ...] = ()
            if manifest.module_state:
                from ..validate.module_state import states  # few bundles have any

                self._states = states(bundle)
            check_driver(manifest.target)
            if not isinstance(context, Context):  # before this, the context was being created
                context = (context and context.take()) or Context(device)
                undo.callback(context.release)
            check_device(manifest.target, context)
            self.context = context
            self.relocation: Relocation | None = None
            if manifest.state_dimensions:
                from ..cpu.host_weights import gpu_room, resized  # few bundles have any
                from .moves import Relocation

                with context:
                    self.manifest = resized(manifest, rows, gpu_room(free_bytes(), dict(manifest.memories)))
                self.relocation = Relocation(manifest, self.manifest)
            self.sizes = dict(self.manifest.memories)
            self.initial: InitialState | None = None
            if self.sizes.get(STATE):
                from ..cpu.host_weights import InitialState  # few models keep state

                self.initial = InitialState(bundle, self.manifest)
            self._cleanup = ExitStack()
            undo.callback(self._give_back)
            with context, Relaxed():
                self._open(self._cleanup, pieces)
            undo.pop_all()

    def _open(self, cleanup: ExitStack, pieces: dict[str, list[Piece]]) -> None:
        self.base = 0
        if WEIGHTS in self.sizes:
            self.base = allocate(max(self.sizes[WEIGHTS], SMALLEST), f"memory {WEIGHTS}")
            cleanup.callback(call, "cuMemFree", self.base)
        # From here on other threads upload the weights while this one loads modules and builds graphs.
        for file, parts in pieces.items():
            self._uploads.append(Upload(self.context, self.bundle.descriptor(file), parts, self.base, name=file))
            cleanup.callback(self._uploads[-1].stop)
        images = {f"{KERNELS}{state.image}" for state in self._states}
        self.code_bytes = sum(file.bytes for file in self.manifest.files if file.path in images)
        self._modules = Modules(self.bundle)
        cleanup.callback(self._modules.close)

    def modules(self, memories: Memories, cleanup: ExitStack) -> Modules:
        """The kernel images for a session; those with variables that kernels may write are loaded for each session, because
        sessions run concurrently."""
        if not self._states:
            return self._modules
        modules = Modules(self.bundle, self._states, memories, self._modules)
        cleanup.callback(modules.close)
        return modules

    def settle(self) -> None:
        for upload in self._uploads:
            upload.wait()
        self._uploads = []

    def retain(self) -> None:
        with self.lock:
            self._shares += 1

    def release(self) -> None:
        with self.lock:
            self._shares -= 1
            last = self._shares == 0
        if last:
            try:
                self._give_back()
            finally:
                self.context.release()

    def _give_back(self) -> None:
        with self.context, Relaxed(), self._cleanup:
            pass


def _host_weights(bundle: Archive) -> HostWeights:
    from ..cpu.host_weights import HostWeights  # few bundles have host regions that read weights

    return HostWeights(bundle.mapped(FILE))


# --- whether a bundle can run here: checked before anything is put on the GPU ---------------------------------------------


def check_driver(target: Target) -> None:
    """Raises wrong-machine, process-forked or driver-too-old."""
    if target.kind != "cuda":
        raise MachineError("wrong-machine", f"the bundle is for the {target.kind} target, not for a GPU")
    try:
        require()
    except MachineError as error:
        raise MachineError(
            "wrong-machine",
            f"the bundle is for {target.arch}: {error}",
            "copy it to a machine with such a GPU; here `cgcompile verify` without --run checks it; or build for this machine "
            "with --target cpu",
        ) from None
    version = driver_version()
    if version < target.driver:
        raise MachineError(
            "driver-too-old",
            f"the bundle needs a driver for CUDA {_version(target.driver)}, this machine's is for {_version(version)}",
            "upgrade the NVIDIA driver, or build the bundle on this machine",
        )


def check_device(target: Target, context: Context) -> None:
    """Raises wrong-architecture unless the GPU can run the bundle's machine code."""
    if context.arch != target.arch.rstrip("af"):
        raise MachineError(
            "wrong-architecture",
            f"the bundle is for {target.arch}, device {context.index} ({context.name}) is {context.arch}",
            f"build the bundle with --target {context.arch}",
        )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
