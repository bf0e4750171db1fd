"""An entry of a bundle as a model of the Open Inference Protocol: its ports, its queue, and the calls that answer requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cgbundle.format.size_expressions import text
from cgbundle.tensors.tensor import from_bytes

from ..batching.request_queue import Batch, RequestQueue
from .inference_protocol import DATATYPES, Given, Port


class NotServable(Exception):
    """An entry that the protocol has no words for; the text says why."""


@dataclass(frozen=True, slots=True)
class Ports:
    """What an entry is to the protocol: its inputs and outputs, the sizes of batches that it has, () where requests cannot go
    together, and those of each dimension by name."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    batches: tuple[int, ...]
    sizes: tuple[tuple[str, tuple[int, ...]], ...] = ()


def describe(entry: Any, random: int | None) -> Ports:
    """How an entry is served; `random`: the manifest's buffer of random numbers.  Raises NotServable."""
    if set(entry.mutated_buffers) - {random} or entry.mutated_inputs:
        raise NotServable("its calls change its state or its inputs: whose they are, the protocol cannot say")
    sides = list[tuple[Port, ...]]()
    for specs in (entry.inputs, entry.outputs):
        unknown = [spec for spec in specs if spec.dtype not in DATATYPES]
        if unknown:
            raise NotServable(f"{unknown[0].name} is {unknown[0].dtype}, which the protocol does not have")
        free = entry.data_sizes if specs is entry.outputs else ()
        sides.append(tuple([_port(spec, [row.axis for row in free if row.output == at]) for at, spec in enumerate(specs)]))
    return Ports(sides[0], sides[1], _batches(entry), tuple([(row.name, tuple(row.sizes)) for row in entry.dimensions]))


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


class TensorEntry:
    """`async with TensorEntry(...) as entry:` ... `await entry.answer(tensors, seconds)`.  Its requests go together where their
    rows may lie in one call."""

    def __init__(
        self, entry: Any, ports: Ports, thread: ThreadPoolExecutor, copies: int, wait: float, limit: int,
        watch: Callable[[Batch], None],
    ) -> None:  # fmt: skip
        """`entry`: of a loaded bundle, or of its replicas.  `copies`: calls at once, in `thread`; `wait`: seconds that a request
        waits for others; `limit`: requests that may wait; `watch` is told of every batch."""
        self.ports = ports
        self._queue = RequestQueue(_caller(entry, ports), thread, (ports.batches or (1,))[-1], wait, limit, watch, copies)

    async def __aenter__(self) -> TensorEntry:
        await self._queue.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Answers what waits, and takes nothing more."""
        await self._queue.__aexit__()

    @property
    def waiting(self) -> int:
        """Requests that wait for their call."""
        return self._queue.waiting

    def pause(self, calls: int) -> int:
        """The seconds that so many calls take, about, and those that wait; at least 1."""
        return self._queue.pause(calls)

    async def answer(self, tensors: Sequence[Given], seconds: float) -> list[Given]:
        """The outputs for one request's tensors, within `seconds`.  Raises as RequestQueue, and a CgbundleError."""
        batches = self.ports.batches
        rows = tensors[0].shape[0] if batches else 1
        alone = not rows or not batches or len({tensor.shape[0] for tensor in tensors}) > 1  # the guards will say so
        group = object() if alone else tuple([tensor.shape[1:] for tensor in tensors])
        return list(await self._queue.answer(tensors, group, rows, seconds))


def _caller(entry: Any, ports: Ports) -> Callable[[Sequence[Sequence[Given]]], list[list[Given]]]:
    """Requests, each its tensors, to the outputs of each, by one replay."""
    names = {datatype: name for name, datatype in DATATYPES.items()}
    dtypes = [names[port.datatype] for port in ports.inputs]

    def call(requests: Sequence[Sequence[Given]]) -> list[list[Given]]:
        rows = [request[0].shape[0] for request in requests] if ports.batches else [1]
        columns = [[request[index] for request in requests] for index in range(len(dtypes))]
        tensors = [
            from_bytes(column[0].data if len(column) == 1 else b"".join([part.data for part in column]), dtype, _stacked(column))
            for column, dtype in zip(columns, dtypes, strict=True)
        ]
        answers: list[list[Given]] = [[] for _ in requests]
        for output in entry.replay(tensors):
            data, shape, at = output.tobytes(), tuple(output.shape), 0
            step = len(data) // max(1, sum(rows))
            for answer, count in zip(answers, rows, strict=True):
                whole = len(requests) == 1
                answer.append(Given(shape if whole else (count, *shape[1:]), data if whole else data[at : at + count * step]))
                at += count * step
        return answers

    return call


def _stacked(column: Sequence[Given]) -> tuple[int, ...]:
    first = column[0].shape
    return first if len(column) == 1 else (sum(tensor.shape[0] for tensor in column), *first[1:])
