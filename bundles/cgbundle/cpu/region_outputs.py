"""The outputs of a replay on the CPU: tensors of the code's own, which are freed with their last holder, and the dtypes, shapes and
strides that they are held to."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from ctypes import Array, addressof, c_int64, c_void_p, sizeof, string_at
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any

from ..errors import MachineError
from ..format.open_files import make_calls, when_gone
from ..format.schema import EntrySpec, Manifest, Program, Value
from ..format.spans import moving
from .libtorch import LibTorch

POINTER_BYTES, STRIDE_BYTES = sizeof(c_void_p), sizeof(c_int64)

Found = tuple[int, tuple[int, ...], tuple[int, ...]]
"""What `LibTorch.layout` gives: torch's number of the dtype, shape, strides in elements."""


@lru_cache(maxsize=256)
def handles_type(count: int) -> type[Array[c_void_p]]:
    """The array of so many handles of tensors."""
    return c_void_p * count


ALL: Any = itemgetter(slice(None))
"""The elements of an array, as a list: an array of ctypes' is slow to go through."""


class RegionOutputs:
    """The `count` output tensors of one replay, in memory of torch's allocator until `release`, or until the last reference to this
    goes.

    The replay puts their handles into `handles`, which are 0 before: it may be interrupted at any point, and each tensor is freed
    once, by functions of C.  To be made takes microseconds: `free` has those that were released, for the next replays.
    """

    __slots__ = ("__weakref__", "_free", "_left", "_torch", "addresses", "handles")

    device: int | None = None
    static = False

    def __init__(self, torch: LibTorch, count: int, free: deque[RegionOutputs] | None = None) -> None:
        self._torch, self._free, self.handles = torch, free, handles_type(count)()
        self._left: list[int | None] = []  # handles to be freed, on top of a 0
        self.addresses: Sequence[int] = ()
        rest = chain.from_iterable(map(ALL, (self.handles, self._left)))
        when_gone(self, map(torch.delete, filter(None, rest)))

    def own(self, index: int) -> RegionOutputs:
        """The tensor, which is no longer kept here."""
        kept = RegionOutputs(self._torch, 1)
        kept.handles[0], self.handles[index] = self.handles[index], None
        return kept

    def release(self) -> None:
        """Frees the tensors; nobody uses them any more."""
        left, handles = self._left, self.handles
        left[:], handles[:] = [0, *handles[:]], [None] * len(handles)  # at once: nothing is called
        make_calls(map(self._torch.delete, filter(None, iter(left.pop, 0))))
        if self._free is not None:
            self._free.append(self)


def check_layout(layout: Found, dtype: int, row: Value, where: str) -> None:
    """Raises library-refused unless a tensor of the code's is laid out as `row` says; `dtype` is torch's number of the row's.

    `where` names the shared object and the output.  Strides of axes of one element, and of empty tensors, do not count.
    """
    number, shape, strides = layout
    same = number == dtype
    if not same or shape != row.shape or moving(shape, strides) != moving(shape, row.strides):
        expected = f"{row.dtype} {list(row.shape)} with strides {list(row.strides)}"
        got = f"{'the same dtype' if same else 'another dtype'}, {list(shape)} with strides {list(strides)}"
        raise MachineError("library-refused", f"{where} is {got}, the bundle says {expected}", "build the bundle again")


class OutputLayouts:
    """How the outputs of a program of the cpu target have to lie.

    Dtypes and shapes follow from those of the inputs: they are compared at the first replay.  Strides may follow from what the
    inputs hold, as those of a column of a tensor as wide as a sum: they are compared at every replay.

    An output that shares memory is read there; the code gives a copy.
    """

    __slots__ = ("_handed", "_rows", "_strides", "_torch", "_where")

    def __init__(self, torch: LibTorch, manifest: Manifest, entry: EntrySpec, program: Program) -> None:
        shared = {alias.output for alias in entry.aliases}
        self._torch, self._where = torch, manifest.regions[program.steps[0].region].file
        self._rows = [
            (place, torch.dtype(value.dtype), value, f"output {entry.outputs[place].name!r}")
            for place, value in enumerate([program.values[index] for index in program.outputs])
            if place not in shared
        ]
        self._handed = c_void_p * (2 * len(program.outputs))
        self._strides: list[tuple[int, int, bytes]] | None = None

    def addresses(self, handles: Array[c_void_p]) -> list[int]:
        """Where the tensors of one replay begin.  Raises library-refused, naming the output, for one that lies otherwise."""
        torch, words = self._torch, self._handed()
        place = addressof(words)
        for handle in handles:
            torch.data_pointer(handle, place)
            torch.strides(handle, place + POINTER_BYTES)
            place += 2 * POINTER_BYTES
        if self._strides is None:
            self._check(handles)
            sizes = [(2 * place + 1, len(row.shape) * STRIDE_BYTES) for place, _, row, _ in self._rows if row.shape]
            self._strides = [(place, size, string_at(words[place] or 0, size)) for place, size in sizes]
        else:
            for place, size, seen in self._strides:
                if string_at(words[place] or 0, size) != seen:
                    self._check(handles)
        return [address or 0 for address in words[::2]]

    def _check(self, handles: Array[c_void_p]) -> None:
        for place, dtype, row, name in self._rows:
            check_layout(self._torch.layout(handles[place] or 0), dtype, row, f"{self._where}: {name}")
