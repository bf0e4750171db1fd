"""A model with versions of its bundle, of which the highest is served: loaded, examined, switched to, closed.

A new version is loaded beside the one that serves, in a thread of its own, and replays the self-test that its build stored, which
warms it up.  Then it is switched to between two calls: requests that were taken are answered by the version that took them, which
is closed after the last.  One that cannot be loaded, or whose self-test fails, is refused, and the version before goes on.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import cgbundle
from cgbundle.format.file_names import FORWARD
from cgbundle.format.size_expressions import text
from cgbundle.self_test import replay_self_test
from cgbundle.tensors.tensor import from_bytes

from .inference_protocol import DATATYPES, Given, Port
from .request_queue import Batch, RequestQueue

Loaded = cgbundle.Program | cgbundle.Replicas

Identity = tuple[tuple[int, int, int], ...]
"""What tells a bundle from one that stands in its place later: number, size and time of each of its files."""


GPU_FAILED = "driver-failed"
"""The code of the error after which no call of this process reaches the GPU: its context is lost."""


class Refused(Exception):
    """A version that is not served; the text says why, `hint` what to do, or "".  `memory`: for want of memory."""

    def __init__(self, why: str, hint: str = "", *, memory: bool = False) -> None:
        super().__init__(why)
        self.hint, self.memory = hint, memory


@dataclass(frozen=True, slots=True)
class Options:
    """How queues behave: milliseconds that a request waits for others, requests that may wait, and seconds that one may take.
    `devices`: the GPUs that have a copy of every model each; () is the first GPU, or the CPU for a bundle that is for one."""

    wait: float = 2.0
    limit: int = 1024
    seconds: float = 30.0
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Served:
    """What a bundle is to this server: its ports, the sizes of batches that it has, () where requests cannot go together, and those
    of each dimension by name.  `entry` is served; the `others` have no place in the protocol, where a model is one function."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    batches: tuple[int, ...]
    sizes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    entry: str = FORWARD
    others: tuple[str, ...] = ()


def describe(manifest: Any) -> Served:
    """How the first entry of a bundle is served.  Raises Refused for one that this protocol has no words for."""
    entry, *others = manifest.entries
    names = [entry.name for entry in manifest.entries]
    if set(entry.mutated_buffers) - {manifest.random} or entry.mutated_inputs:
        whose = f"of {', '.join(names)} the first is served, and its calls" if others else "calls"
        raise Refused(f"{whose} change its state or its inputs: whose they are, the protocol cannot say")
    sides = []
    for specs in (entry.inputs, entry.outputs):
        unknown = [spec for spec in specs if spec.dtype not in DATATYPES]
        if unknown:
            raise Refused(f"{unknown[0].name} is {unknown[0].dtype}, which the protocol does not have")
        free = entry.data_sizes if specs is entry.outputs else ()
        sides.append(tuple([_port(spec, [row.axis for row in free if row.output == at]) for at, spec in enumerate(specs)]))
    sizes = tuple([(each.name, tuple(each.sizes)) for each in entry.dimensions])
    return Served(*sides, _batches(entry), sizes, entry.name, tuple(names[1:]))


def _port(spec: Any, free: Sequence[int]) -> Port:
    """`free`: the axes whose sizes depend on data."""
    shape = tuple([size if type(size) is int and axis not in free else -1 for axis, size in enumerate(spec.shape)])
    axes = tuple(
        [f"<={text(size)}" if axis in free else size if type(size) is int else text(size) for axis, size in enumerate(spec.shape)]
    )
    return Port(spec.name, DATATYPES[spec.dtype], shape, axes if -1 in shape else ())


def _batches(entry: Any) -> tuple[int, ...]:
    """The recorded sizes of the dimension along which requests may lie behind each other: the first axis of all tensors, and no
    other, with rows that do not depend on each other."""
    for dimension in entry.dimensions:
        shapes = [spec.shape for spec in (*entry.inputs, *entry.outputs)]
        first = all(shape and shape[0] == dimension.name for shape in shapes)
        if first and dimension.chunk and not any(dimension.name in str(shape[1:]) for shape in shapes):
            return tuple(dimension.sizes)
    return ()


def recorded_rows(rows: int, batches: Sequence[int]) -> int:
    """The rows that are computed for so many: those of the next recorded size, or of several calls of the largest."""
    if not batches:
        return rows
    full, rest = divmod(rows, batches[-1])
    return full * batches[-1] + (next(size for size in batches if size >= rest) if rest else 0)


def caller(
    program: cgbundle.Program | cgbundle.Replicas, served: Served
) -> Callable[[Sequence[Sequence[Given]]], list[list[Given]]]:
    """Requests, each its tensors, to the outputs of each, by one replay."""
    names = [spec.dtype for spec in program.inputs]

    def call(requests: Sequence[Sequence[Given]]) -> list[list[Given]]:
        rows = [request[0].shape[0] for request in requests] if served.batches else [1]
        columns = [[request[index] for request in requests] for index in range(len(names))]
        tensors = [
            from_bytes(b"".join([each.data for each in column]), dtype, _stacked(column))
            for column, dtype in zip(columns, names, strict=True)
        ]
        answers: list[list[Given]] = [[] for _ in requests]
        for made in program.replay(tensors):
            data, shape, at = made.tobytes(), tuple(made.shape), 0
            step = len(data) // max(1, sum(rows))
            for answer, count in zip(answers, rows, strict=True):
                whole = len(requests) == 1
                answer.append(Given(shape if whole else (count, *shape[1:]), data if whole else data[at : at + count * step]))
                at += count * step
        return answers

    return call


def _stacked(column: Sequence[Given]) -> tuple[int, ...]:
    first = column[0].shape
    return first if len(column) == 1 else (sum(each.shape[0] for each in column), *first[1:])


# --- versions ---------------------------------------------------------------------------------------------------------


class Version:
    """A version that serves, from `opened` until `close` has answered what it took.  Calls run in threads of its own, one for each
    copy.  `failure`: how its GPU failed, where it did; then the process is of no use any more."""

    def __init__(self, number: int, identity: Identity) -> None:
        self.number, self.identity = number, identity
        self.served = Served((), (), ())
        self.memory: Mapping[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.failure: cgbundle.CgbundleError | None = None
        self._cleanup = AsyncExitStack()

    async def open(self, path: Path, options: Options, watch: Callable[[Version, Batch], None]) -> None:
        """Loads the bundle, replays its self-test, and takes requests.  Raises Refused."""
        self._options = options
        copies = max(1, len(options.devices))
        self._thread = ThreadPoolExecutor(copies, f"version-{self.number}")
        try:
            program = await asyncio.get_running_loop().run_in_executor(self._thread, self._load, path)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        self._program, self.memory = program, program.memory
        self._queue = await self._cleanup.enter_async_context(
            RequestQueue(
                caller(program, self.served), self._thread, (self.served.batches or (1,))[-1], options.wait / 1000, options.limit,
                lambda batch: watch(self, batch), copies,
            )
        )  # fmt: skip

    async def answer(self, tensors: Sequence[Given], seconds: float) -> list[Given]:
        """The outputs for one request's tensors, within `seconds` (0: the options').  Raises as RequestQueue, CallError."""
        allowed = min(seconds or self._options.seconds, self._options.seconds)
        rows = tensors[0].shape[0] if self.served.batches else 1
        alone = not rows or not self.served.batches or len({tensor.shape[0] for tensor in tensors}) > 1  # the guards will say so
        group = object() if alone else tuple([tensor.shape[1:] for tensor in tensors])
        try:
            return list(await self._queue.answer(tensors, group, rows, allowed))
        except cgbundle.MachineError as error:
            if error.code == GPU_FAILED:
                self.failure = self.failure or error
            raise

    @property
    def waiting(self) -> int:
        """Requests that wait for their call."""
        return self._queue.waiting

    async def close(self) -> None:
        """Answers what was taken, then gives the memory back."""
        await self._cleanup.aclose()
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._program.close)
        except cgbundle.MachineError as error:
            if error.code != GPU_FAILED:  # then there is nothing that could be given back
                raise
        self._thread.shutdown()

    def _load(self, path: Path) -> Loaded:
        began, devices = time.perf_counter(), self._options.devices
        try:
            program = cgbundle.load(path, devices=devices, replicas=True) if devices else cgbundle.load(path)
        except cgbundle.CgbundleError as error:
            raise Refused(" ".join(str(error).split()), error.hint, memory=isinstance(error, cgbundle.OutOfMemory)) from None
        self.seconds["load"] = time.perf_counter() - began
        try:
            self.served = describe(program.manifest)
            compare = {entry.name: entry.self_test.compare for entry in program.manifest.entries}
            copies = program.programs if isinstance(program, cgbundle.Replicas) else (program,)
            for result in chain.from_iterable(map(replay_self_test, copies)):
                if not result.passed(compare[result.entry]):
                    raise Refused(
                        f"the self-test fails at int_key {result.key}: error {result.error:.1e}, allowed {result.tolerance:.1e}"
                    )
        except cgbundle.CgbundleError as error:
            program.close()
            raise Refused(" ".join(str(error).split()), error.hint) from None
        except BaseException:
            program.close()
            raise
        self.seconds["self_test"] = time.perf_counter() - began - self.seconds["load"]
        return program


class Model:
    """A model of the folder: the version that serves, None before the first, and why others do not.  `short`: the last one that was
    refused lacked memory."""

    def __init__(self, name: str, options: Options, watch: Callable[[str, Version, Batch], None]) -> None:
        self.name, self.current, self.refused = name, None, dict[int, tuple[Identity, str]]()
        self.current: Version | None
        self._options, self.short = options, False
        self._watch = lambda version, batch: watch(name, version, batch)
        self._closing: set[asyncio.Task[None]] = set()

    async def refresh(self, found: Mapping[int, tuple[Path, Identity]], tell: Callable[[dict[str, Any]], None]) -> None:
        """Serves the highest version of `found` that can be served.  `tell` is told of each load, switch and refusal."""
        self.refused = {number: told for number, told in self.refused.items() if number in found and found[number][1] == told[0]}
        for number in sorted(found, reverse=True):
            path, identity = found[number]
            if self.current is not None and (self.current.number, self.current.identity) == (number, identity):
                return
            if number in self.refused:
                continue
            version = Version(number, identity)
            try:
                await version.open(path, self._options, self._watch)
            except Refused as error:
                self.refused[number], self.short = (identity, str(error)), error.memory
                told = {"why": str(error)} | ({"hint": error.hint} if error.hint else {})
                tell({"event": "refused", "model": self.name, "version": number, **told, **_rounded(version.seconds)})
                continue
            before, served = self._switch(version), version.served
            entries = {"entry": served.entry, "not_served": served.others} if served.others else {}
            told = {"model": self.name, "version": number, "before": before, **entries}
            tell({"event": "serving", **told, **_rounded(version.seconds)})
            return
        if self.current is not None and self.current.number not in found:
            tell({"event": "gone", "model": self.name, "version": self._switch(None)})

    async def close(self) -> None:
        """Answers what was taken, and closes all versions."""
        self._switch(None)
        while self._closing:
            await asyncio.gather(*self._closing)

    def _switch(self, version: Version | None) -> int | None:
        """From here on `version` takes the requests; the number of the one before, which is closed when its calls are done."""
        before, self.current = self.current, version
        if before is None:
            return None
        task = asyncio.create_task(before.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return before.number


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {f"{phase}_seconds": round(value, 3) for phase, value in seconds.items()}


def log(event: Mapping[str, Any]) -> None:
    """A line of JSON on stderr."""
    print(json.dumps(event), file=sys.stderr, flush=True)
