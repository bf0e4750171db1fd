"""An entry of a bundle as a model of the Open Inference Protocol: its ports, its queue, and its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cgbundle.format.shapes import text
from cgbundle.tensors.tensor import from_bytes

from ..batching.request_queue import Batch, RequestQueue
from .inference_protocol import DATATYPES, Port, TensorData


class NotServable(Exception):
    """The protocol cannot express the entry; the text says why."""


@dataclass(frozen=True, slots=True)
class Ports:
    """An entry in the protocol: inputs and outputs, recorded batch sizes (() if requests cannot share a call), and the sizes of
    each dimension by name."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    batches: tuple[int, ...]
    sizes: tuple[tuple[str, tuple[int, ...]], ...] = ()


def describe(entry: Any, random: int | None) -> Ports:
    """Returns the ports of an entry; `random`: the index of the buffer of random numbers.  Raises NotServable."""
    if set(entry.mutated_buffers) - {random} or entry.mutated_inputs:
        raise NotServable("its calls change its state or its inputs, and requests of the protocol have no session")
    sides = list[tuple[Port, ...]]()
    for specs in (entry.inputs, entry.outputs):
        unknown = [spec for spec in specs if spec.dtype not in DATATYPES]
        if unknown:
            raise NotServable(f"{unknown[0].name} is {unknown[0].dtype}, which the protocol does not have")
        free = entry.data_sizes if specs is entry.outputs else ()
        sides.append(tuple([_port(spec, [row.axis for row in free if row.output == i]) for i, spec in enumerate(specs)]))
    return Ports(sides[0], sides[1], _batches(entry), tuple([(row.name, tuple(row.sizes)) for row in entry.dimensions]))


def _port(spec: Any, free: Sequence[int]) -> Port:
    """Returns a port.  `free`: the axes whose sizes depend on data."""
    shape = tuple([size if type(size) is int and axis not in free else -1 for axis, size in enumerate(spec.shape)])
    axes = tuple(
        [f"<={text(size)}" if axis in free else size if type(size) is int else text(size) for axis, size in enumerate(spec.shape)]
    )
    return Port(spec.name, DATATYPES[spec.dtype], shape, axes if -1 in shape else ())


def _batches(entry: Any) -> tuple[int, ...]:
    """Returns the recorded sizes of the batch dimension, or ().  It is the first axis of all tensors and no other axis, and its
    rows are independent."""
    for dimension in entry.dimensions:
        shapes = [spec.shape for spec in (*entry.inputs, *entry.outputs)]
        first = all(shape and shape[0] == dimension.name for shape in shapes)
        if first and dimension.chunk and not any(dimension.name in str(shape[1:]) for shape in shapes):
            return tuple(dimension.sizes)
    return ()


def recorded_rows(rows: int, batches: Sequence[int]) -> int:
    """Returns how many rows are computed for `rows` rows: the next recorded size, or the sum over several calls."""
    if not batches:
        return rows
    full, rest = divmod(rows, batches[-1])
    return full * batches[-1] + (next(size for size in batches if size >= rest) if rest else 0)


class TensorEntry:
    """`async with TensorEntry(...) as entry:` ... `await entry.answer(tensors, seconds)`.  Requests share a call if their rows can
    be stacked."""

    def __init__(
        self, entry: Any, ports: Ports, thread: ThreadPoolExecutor, copies: int, wait: float, limit: int,
        watch: Callable[[Batch], None],
    ) -> None:  # fmt: skip
        """`entry`: of a loaded bundle, or of its replicas.  `copies`: concurrent calls in `thread`; `wait`: seconds that a request
        waits for others; `limit`: maximum waiting requests; `watch` gets every batch."""
        self.ports = ports
        self._queue = RequestQueue(_caller(entry, ports), thread, (ports.batches or (1,))[-1], wait, limit, watch, copies)

    async def __aenter__(self) -> TensorEntry:
        await self._queue.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Answers the waiting requests, and accepts no more."""
        await self._queue.__aexit__()

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    def pause(self, calls: int) -> int:
        """Estimates the seconds for all waiting requests and `calls` more calls; at least 1."""
        return self._queue.pause(calls)

    async def answer(self, tensors: Sequence[TensorData], seconds: float) -> list[TensorData]:
        """Returns the outputs for one request's tensors, within `seconds`.  Raises the errors of RequestQueue.answer."""
        batches = self.ports.batches
        rows = tensors[0].shape[0] if batches else 1
        alone = not rows or not batches or len({tensor.shape[0] for tensor in tensors}) > 1  # with unequal rows the call raises
        group = object() if alone else tuple([tensor.shape[1:] for tensor in tensors])
        return list(await self._queue.answer(tensors, group, rows, seconds))


def _caller(entry: Any, ports: Ports) -> Callable[[Sequence[Sequence[TensorData]]], list[list[TensorData]]]:
    """Returns a function that answers several requests, each a list of tensors, with one replay."""
    names = {datatype: name for name, datatype in DATATYPES.items()}
    dtypes = [names[port.datatype] for port in ports.inputs]

    def call(requests: Sequence[Sequence[TensorData]]) -> list[list[TensorData]]:
        rows = [request[0].shape[0] for request in requests] if ports.batches else [1]
        columns = [[request[index] for request in requests] for index in range(len(dtypes))]
        tensors = [
            from_bytes(column[0].data if len(column) == 1 else b"".join([part.data for part in column]), dtype, _stacked(column))
            for column, dtype in zip(columns, dtypes, strict=True)
        ]
        answers: list[list[TensorData]] = [[] for _ in requests]
        for output in entry.replay(tensors):
            data, shape, pos = output.tobytes(), tuple(output.shape), 0
            step = len(data) // max(1, sum(rows))
            for answer, count in zip(answers, rows, strict=True):
                only = len(requests) == 1
                answer.append(TensorData(shape if only else (count, *shape[1:]), data if only else data[pos : pos + count * step]))
                pos += count * step
        return answers

    return call


def _stacked(column: Sequence[TensorData]) -> tuple[int, ...]:
    first = column[0].shape
    return first if len(column) == 1 else (sum(tensor.shape[0] for tensor in column), *first[1:])
