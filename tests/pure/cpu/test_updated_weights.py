"""Updated weights on the CPU begin at a cache line, because the code that reads them was compiled for this alignment."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

from cgbundle.call.update import contents_of
from cgbundle.cpu.host_weights import CACHE_LINE, HostWeights
from cgbundle.tensors.tensor import Tensor
from tests.helpers.bundles.tiny_bundle import manifest


class Mapped:
    """A file in which every tensor has the same address. Nothing is read from it."""

    def address(self, tensor: str) -> int:
        return 7


def tensor(size: int, fill: int) -> Tensor:
    memory = (ctypes.c_uint8 * max(1, size))(*[fill] * size)
    return Tensor(ctypes.addressof(memory), "uint8", (size,), (1,), memory)


def test_updated_weights_begin_at_cache_lines_and_lie_apart() -> None:
    sizes = [1, 63, 64, 65, 100, 0, 3, 200]
    row = replace(manifest().weights[0], dtype="uint8", strides=(1,))
    rows = [replace(row, name=f"w{i}", tensor=f"w{i}", shape=(size,)) for i, size in enumerate(sizes)]
    contents = contents_of({f"w{i}": tensor(size, i + 1) for i, size in enumerate(sizes)})
    mapped: Any = Mapped()
    first = HostWeights(mapped)
    second = first.updated(rows, [contents[row.name] for row in rows])
    places = [second.address(row.tensor) for row in rows]
    assert [place % CACHE_LINE for place in places] == [0] * len(sizes) and CACHE_LINE == 64
    assert [ctypes.string_at(place, size) for place, size in zip(places, sizes, strict=True)] == [
        bytes([i + 1]) * size for i, size in enumerate(sizes)
    ]
    assert second.address("other") == first.address("w0") == 7
    third = second.updated(rows[:1], [contents_of({"w0": tensor(1, 9)})["w0"]])
    assert ctypes.string_at(third.address("w0"), 1) == b"\t" and third.address("w1") == places[1]
    assert ctypes.string_at(places[0], 1) == b"\1", "who still reads the old ones finds them"
