"""Handmade signatures and a fake backend: tests of guards, plans and programs use them without a bundle on disk.

The fake backend reads and writes real memory through ctypes, element by element. It reads inputs at their addresses, in the layout
of the program's values. It writes outputs into its own memory and overwrites that memory on release.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import product
from typing import Any

from cgbundle.call.locks import ExclusiveLock, locked
from cgbundle.cpu.backend import SharedLock
from cgbundle.format.file_names import SELF_TEST, all_programs
from cgbundle.format.schema import Dimension, Manifest, Parameter, Program, Region, Step, TensorSpec, Value
from cgbundle.format.shapes import dense, evaluate
from cgbundle.process import KeptFile
from tests.helpers.bundles import tiny_bundle
from tests.helpers.bundles.edits import edited

Numbers = list[Any]
"""The elements of a tensor, row-major."""

Compute = Callable[[tuple[int, ...], list[Numbers]], list[Numbers]]
"""The function of a fake model: (key, inputs) -> outputs."""

ELEMENTS = {
    "float32": ctypes.c_float, "float64": ctypes.c_double, "int64": ctypes.c_int64, "int32": ctypes.c_int32,
    "uint8": ctypes.c_uint8, "bool": ctypes.c_bool,
}  # fmt: skip

SPOILED = 0xDD


def dimension(
    name: str, *sizes: int, pad: str = "rows", chunk: bool = True, reason: str = "rows stand alone", not_chunked: str = ""
) -> Dimension:
    return Dimension(name=name, sizes=sizes, pad=pad, chunk=chunk, reason=reason, not_chunked=not_chunked)


def spec(name: str, *shape: Any, dtype: str = "float32", order: Sequence[int] | None = None) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape, order=tuple(range(len(shape)) if order is None else order))


def signature(
    dimensions: Sequence[Dimension],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    call: dict[str, Any] | None = None,
    result: dict[str, Any] | None = None,
    output_orders: Sequence[Sequence[int]] | None = None,
    parameters: tuple[Parameter, ...] = (),
) -> Manifest:
    """Returns a CPU manifest with one host region. By default a call takes the inputs by position and returns a tuple of the
    outputs. `output_orders` are the dimension orders in which the backend lays out the outputs (default: row-major).
    """
    orders = output_orders or [range(len(output.shape)) for output in outputs]

    def program(key: tuple[int, ...]) -> Program:
        sizes = {dim.name: size for dim, size in zip(dimensions, key, strict=True)}
        values = []
        for tensor, order in [*zip(inputs, [tensor.order for tensor in inputs], strict=True), *zip(outputs, orders, strict=True)]:
            shape = tuple([evaluate(size, sizes) for size in tensor.shape])
            values.append(Value(dtype=tensor.dtype, shape=shape, strides=dense(shape, tuple(order)), memory="host", offset=0))
        input_places, output_places = tuple(range(len(inputs))), tuple(range(len(inputs), len(values)))
        step = Step(kind="host", region=0, file="", inputs=input_places, outputs=output_places)
        return Program(key=key, values=tuple(values), inputs=input_places, outputs=output_places, steps=(step,), arena=0, static=0)

    keys = list(product(*[dim.sizes for dim in dimensions]))
    base, tree = tiny_bundle.manifest(), call or {"call": [[tensor.name, {"tensor": index}] for index, tensor in enumerate(inputs)]}
    return edited(
        base,
        dimensions=tuple(dimensions),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        call=tree,
        parameters=parameters or (tiny_bundle.POSITIONAL,) * len(tree["call"]),
        result=result or {"tuple": [{"tensor": index} for index in range(len(outputs))]},
        regions=(Region(name="model", kind="host", file=tiny_bundle.HOST_FILE),),
        programs=tuple(map(program, keys)),
        self_test=replace(
            base.entries[0].self_test,
            bounds=tiny_bundle.bounds(*[output.dtype for output in outputs]),
            proofs=tuple([tiny_bundle.proof(*key) for key in keys]),
        ),
    )


# --- the backend ----------------------------------------------------------------------------------------------


class FakeResults:
    """Outputs in memory that is overwritten when this object is deleted, or that the next replay reuses (`static`)."""

    device: int | None = None

    def __init__(self, buffers: Sequence[Any], static: bool) -> None:
        self.buffers, self.static = buffers, static
        self.addresses = [ctypes.addressof(buffer) for buffer in buffers]

    def release(self) -> None:
        """Does nothing: the memory lives as long as this object."""

    def transfer_ownership(self, index: int) -> object:
        assert not self.static
        owner, self.buffers = FakeResults(self.buffers[index : index + 1], static=False), list(self.buffers)
        self.buffers[index] = (ctypes.c_char * 1)()
        return owner

    def __del__(self) -> None:
        if not self.static:
            for buffer in self.buffers:
                ctypes.memset(ctypes.addressof(buffer), SPOILED, ctypes.sizeof(buffer))


def kept_self_test(folder: str) -> KeptFile:
    """Opens the self-test in a folder, as the loader passes it to a program."""
    with open(os.path.join(folder, SELF_TEST), "rb") as file:
        return KeptFile(file.fileno())


class FakeBackend:
    """Runs `compute`. `calls` lists (key, inputs) of every replay; `closed` is 1 after `close`. With `static`, replays of a program
    write to the same memory and run one at a time, as on a GPU.
    """

    device: int | None = None
    code_bytes, updated = 0, False

    def __init__(self, manifest: Manifest, compute: Compute, *, static: bool = False) -> None:
        self.manifest, self.compute, self.static = manifest, compute, static
        self.calls: list[tuple[tuple[int, ...], list[Numbers]]] = []
        self.closed = 0
        self.memory: dict[int, FakeResults] = {}
        self.running: Any = ExclusiveLock(manifest.name, alone=False) if static else SharedLock(manifest.name)

    @property
    def turn(self) -> Any:
        return self.running.turn

    def begin(self, stream: int | None) -> None:
        """Does nothing: calls have no streams."""

    def end(self, stream: None) -> None:
        """Does nothing: calls have no streams."""

    def locked(self, stream: int | None) -> Any:
        return locked(self, stream)

    def run(self, program: int, addresses: Sequence[int], device: int | None, stream: object) -> FakeResults:
        assert not self.closed, "a replay after close"
        row = all_programs(self.manifest)[program]
        input_numbers = [read_numbers(address, row.values[index]) for address, index in zip(addresses, row.inputs, strict=True)]
        self.calls.append((row.key, input_numbers))
        output_numbers = self.compute(row.key, input_numbers)
        buffers = [write_numbers(numbers, row.values[index]) for numbers, index in zip(output_numbers, row.outputs, strict=True)]
        if not self.static:
            return FakeResults(buffers, static=False)
        results = self.memory.setdefault(program, FakeResults(buffers, static=True))
        for target, source in zip(results.buffers, buffers, strict=True):
            ctypes.memmove(target, source, ctypes.sizeof(source))
        return results

    def poison(self, byte: int, *, reserved: bool = True) -> None:
        """Does nothing: every replay has new memory."""

    def close(self) -> None:
        self.running.close()
        self.closed = self.closed or 1


def read_numbers(address: int, value: Value) -> Numbers:
    kind = ELEMENTS[value.dtype]
    return [kind.from_address(address + offset * ctypes.sizeof(kind)).value for offset in _offsets(value)]


def write_numbers(numbers: Numbers, value: Value) -> Any:
    kind, offsets = ELEMENTS[value.dtype], _offsets(value)
    assert len(numbers) == len(offsets), "the fake model gives another number of elements than its output has"
    memory = (kind * (max(offsets, default=0) + 1))()
    for number, offset in zip(numbers, offsets, strict=True):
        memory[offset] = number
    return memory


def _offsets(value: Value) -> list[int]:
    places = product(*[range(size) for size in value.shape])
    return [sum(index * stride for index, stride in zip(place, value.strides, strict=True)) for place in places]


# --- the bytes of a manifest, as FORMAT.md describes them, without manifest_json.py ----------------------------


def seal_plain(plain: dict[str, Any]) -> bytes:
    """Returns the manifest file of plain JSON values, with its hash."""
    plain = plain | {"sha256": "0" * 64}
    lines = [f"{json.dumps(name)}:{json.dumps(plain[name], sort_keys=True, separators=(',', ':'))}" for name in sorted(plain)]
    return seal_text("{\n" + ",\n".join(lines) + "\n}\n")


def seal_text(text: str) -> bytes:
    """Replaces the zeros in the field `sha256` with the hash of the text."""
    data = text.encode()
    return data.replace(b'\n"sha256":"' + b"0" * 64, b'\n"sha256":"' + sha256(data).hexdigest().encode())
