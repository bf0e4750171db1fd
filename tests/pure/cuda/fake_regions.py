"""Host regions of Python functions and tensors of ctypes arrays, for tests of host steps without torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p
from typing import Any

from cgbundle.format.schema import Region
from tests.helpers.drivers.fake_driver import floats

DOUBLE, ADD = "host/double.so", "host/add.so"
FLOAT32, INT32 = 6, 3
"""torch's numbers of dtypes."""


class FakeTorch:
    """Tensors by handle: (dtype's number, shape, strides, memory)."""

    def __init__(self) -> None:
        self.tensors: dict[int, tuple[int, tuple[int, ...], tuple[int, ...], Any]] = {}
        self.count = 0

    def dtype(self, name: str) -> int:
        return {"float32": FLOAT32, "int32": INT32}[name]

    def tensor(self, numbers: Sequence[float], shape: tuple[int, ...], strides: tuple[int, ...], dtype: int = FLOAT32) -> int:
        self.count += 1
        self.tensors[self.count] = (dtype, shape, strides, (ctypes.c_float * max(1, len(numbers)))(*numbers))
        return self.count

    def layout(self, handle: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        return self.tensors[handle][:3]

    def data_pointer(self, handle: int, place: Any) -> None:
        place._obj.value = ctypes.addressof(self.tensors[handle][3])

    def delete(self, handle: int) -> None:
        memory = self.tensors.pop(handle)[3]
        ctypes.memset(ctypes.addressof(memory), 0xDD, ctypes.sizeof(memory))


class FakeRegion:
    """Computes twice its input (`DOUBLE`) or its input plus one (`ADD`). Both apply `changes` to their output."""

    def __init__(self, name: str, torch: FakeTorch) -> None:
        self.name, self.torch, self.closed, self.counts = name, torch, 0, (1, 1)
        self.calls: list[str] = []
        self.seen: list[list[float]] = []
        self.addresses: list[int] = []
        self.changes: dict[str, Any] = {}
        self.error: Exception | None = None

    def check_counts(self, inputs: int, outputs: int) -> None:
        assert (inputs, outputs) == self.counts

    def run(self, addresses: Sequence[int], layouts: Sequence[Any], outputs: ctypes.Array[c_void_p]) -> None:
        assert not self.closed
        if self.error is not None:
            raise self.error
        self.calls.append(self.name)
        ((address,), (layout,)) = addresses, layouts
        shape, strides = tuple(layout.shape), tuple(layout.strides)
        values = list(floats(address, shape[0] * shape[1]))
        self.addresses.append(address)
        self.seen.append(values)
        result = [x * 2 if self.name == DOUBLE else x + 1 for x in values]
        fields = {"numbers": result, "shape": shape, "strides": strides} | self.changes
        outputs[0] = self.torch.tensor(**fields)

    def close(self) -> None:
        self.closed += 1


class Regions:
    """Replaces `open_region` and `libtorch.load`."""

    def __init__(self) -> None:
        self.torch = FakeTorch()
        self.opened: dict[str, FakeRegion] = {}
        self.loads: list[str] = []

    def load(self, needed: str, threads: int | None = None) -> FakeTorch:
        self.loads.append(needed)
        return self.torch

    def open(self, folder: str, region: Region, listed: Any, mapped: Any, torch: FakeTorch) -> FakeRegion:
        assert region.file not in self.opened or self.opened[region.file].closed, "opened twice"
        assert (mapped is not None) == bool(region.constants)
        self.opened[region.file] = FakeRegion(region.file, torch)
        return self.opened[region.file]
