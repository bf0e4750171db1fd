"""Copies of a loaded bundle on several GPUs, called as one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from ..call.entry import Entry
from ..call.outputs import View
from ..call.structure import flattener
from ..cuda.driver import device_count
from ..errors import CallError
from ..format.archive import Archive
from ..format.file_names import FORWARD, missing_attribute, missing_entry
from ..format.schema import Manifest
from ..tensors.library import library_of
from .program import Program, update_all


class Replicas:
    """A program on each of several devices; a context manager that closes all.

    `cgbundle.load(..., replicas=True)` returns it.  A call with inputs on a GPU runs on that GPU.  A call with inputs on the CPU
    runs on the copy with the fewest running calls, in turns if several have the fewest.  Any number of threads may call.

    `programs` are the copies, in the order of `devices`, and may be called directly.  `entries` are called as those of a program:
    `replicas.decode(...)`, `replicas["decode"](...)`.  `int_keys`, `inputs`, `outputs` and `manifest` are those of every copy;
    `memory` has the bytes of each memory on each device.

    A model with state is called through `session()`, which stays on one device.  Every copy has its own random numbers.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        """Takes ownership of programs of one bundle on distinct GPUs."""
        first = programs[0]
        self.programs = tuple(programs)
        self.devices = tuple([program._backend.device or 0 for program in programs])
        self.manifest, self.memory = first.manifest, first.memory
        self.int_keys, self.inputs, self.outputs = first.int_keys, first.inputs, first.outputs
        self._load = _Load(self.devices)
        self._entries = {name: ReplicatedEntry([program[name] for program in programs], self._load) for name in first.entries}
        self._main = self._entries.get(FORWARD) or (next(iter(self._entries.values())) if len(self._entries) == 1 else None)
        self._sessions = 0

    @property
    def entries(self) -> Mapping[str, ReplicatedEntry]:
        """All entries by name, in the order of the manifest."""
        return dict(self._entries)

    def __getitem__(self, name: str) -> ReplicatedEntry:
        """An entry by its name.  Raises EntryMissing, which is a KeyError."""
        if name not in self._entries:
            raise missing_entry(name, self._entries)
        return self._entries[name]

    def __getattr__(self, name: str) -> ReplicatedEntry:
        """An entry by its name.  Raises AttributeError."""
        entries: dict[str, ReplicatedEntry] = self.__dict__.get("_entries", {})
        if name in entries:
            return entries[name]
        raise missing_attribute(self, name, entries)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replays the model on one of the devices, as a call of an `Entry`.  Also raises replica-state."""
        if self._main is None:
            return self.programs[0](*args, **kwargs)  # raises EntryMissing: no entry is called forward
        return self._main(*args, **kwargs)

    def replay(self, tensors: Sequence[Any]) -> list[Any]:
        """As `Entry.replay`, for the first entry."""
        return next(iter(self._entries.values())).replay(tensors)

    def session(self) -> Program:
        """A session on the next device in turn, where its state stays.  Raises as `Program.session`."""
        with self._load.lock:
            number = self._sessions
            self._sessions = (number + 1) % len(self.programs)
        return self.programs[number].session()

    def update(self, weights: str | os.PathLike[str] | Mapping[str, Any], *, partial: bool = False) -> None:
        """Replaces the weights on all devices or on none, as `Program.update`.  Devices may start to use them at different times.
        Tensors on a GPU are refused."""
        update_all(self.programs, weights, partial=partial)

    def warmup(self, *int_keys: tuple[int, ...]) -> None:
        """`Program.warmup` on every device."""
        for program in self.programs:
            program.warmup(*int_keys)

    def close(self) -> None:
        """Closes every copy and its sessions, after waiting for their calls.  Closing twice does nothing."""
        with ExitStack() as closing:  # closes all, also if one fails
            for program in self.programs:
                closing.callback(program.close)

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<cgbundle.Replicas {self.manifest.name!r} on devices {', '.join(map(str, self.devices))}>"


class ReplicatedEntry:
    """An entry of a bundle on several devices: `name`, `int_keys`, `inputs` and `outputs` are those of every copy."""

    def __init__(self, entries: Sequence[Entry], load: _Load) -> None:
        first, manifest = entries[0], entries[0].manifest
        self.name, self.int_keys, self.inputs, self.outputs = first.name, first.int_keys, first.inputs, first.outputs
        self._copies, self._load = tuple(entries), load
        self._flatten = flattener(first.spec.call, first.spec.parameters)
        self._state = [row.name for place, row in enumerate(manifest.weights) if row.memory == "state" and place != manifest.random]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a call of an `Entry`, on one of the devices.  Raises replica-state for a model that keeps state."""
        with self._chosen(self._flatten, args, kwargs) as entry:
            return entry(*args, **kwargs)

    def replay(self, tensors: Sequence[Any]) -> list[Any]:
        """A call with lists of inputs and outputs, in the order of the signature.  Raises the errors of a call."""
        with self._chosen(lambda: tensors) as entry:
            return entry.replay(tensors)

    def __repr__(self) -> str:
        return f"<cgbundle.ReplicatedEntry {self.name!r} on {len(self._copies)} devices>"

    @contextmanager
    def _chosen(self, flatten: Callable[..., Sequence[Any]], *arguments: Any) -> Iterator[Entry]:
        if self._state:
            text = f"the model keeps {self._state[0]!r} from call to call, and the next call may go to another device"
            raise CallError("replica-state", text, "use a session: replicas.session()(...)")
        with self._load.chosen(_device(flatten(*arguments))) as number:
            yield self._copies[number]


class _Load:
    def __init__(self, devices: Sequence[int]) -> None:
        self.lock = threading.Lock()
        self._places = {device: number for number, device in enumerate(devices)}
        self._running, self._last = [0] * len(devices), len(devices) - 1

    @contextmanager
    def chosen(self, device: int | None) -> Iterator[int]:
        """The number of the copy for inputs on a CUDA device; on the CPU (None), of the copy with the fewest calls, in turn. Raises
        input-device."""
        if device is not None and device not in self._places:
            there = ", ".join(map(str, self._places))
            raise CallError("input-device", f"the inputs lie on CUDA device {device}, and the bundle is on {there}")
        with self.lock:
            count = len(self._running)
            order = [(self._last + 1 + step) % count for step in range(count)]
            number = min(order, key=self._running.__getitem__) if device is None else self._places[device]
            self._running[number] += 1
            self._last = number
        try:
            yield number
        finally:
            with self.lock:
                self._running[number] -= 1


def _device(tensors: Sequence[Any]) -> int | None:
    """The device of the first input; None for values that the copy's guards will refuse."""
    first = tensors[0] if tensors else None
    if type(first) is View:
        first = first.tensor
    try:
        return library_of(first).take(first, "")[1][4] if tensors else None
    except CallError:
        return None


def check_replicas(manifest: Manifest) -> None:
    """Raises option-refused or ranks-refused for a bundle that does not run on one GPU."""
    if manifest.target.kind != "cuda":
        text = f"replicas=True: the bundle is for {manifest.target.arch}, and nothing of it runs on a GPU"
        raise CallError("option-refused", text)
    if manifest.world:
        text = f"replicas=True: the model is over {manifest.world.size} GPUs, and no copy of it on one"
        raise CallError("ranks-refused", text, "leave replicas out")


def open_replicas(bundle: Archive, devices: Sequence[int] | None, opened: Callable[[int], Program]) -> Replicas:
    """Loads copies in parallel from one checked bundle. `devices`: None for all."""
    chosen = range(device_count()) if devices is None else devices
    with ThreadPoolExecutor(len(chosen), "cgbundle-replica") as pool:
        loading = [pool.submit(opened, number) for number in chosen]
    try:
        replicas = Replicas([future.result() for future in loading])
        bundle.check_unchanged()
    except BaseException:
        for future in loading:
            if future.exception() is None:
                future.result().close()
        raise
    return replicas
