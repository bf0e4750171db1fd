"""Dtypes, shapes and strides of a shared object's outputs are compared with the manifest. A fake torch library returns
what the test prescribes."""

from __future__ import annotations

import ctypes
from ctypes import c_void_p
from dataclasses import replace
from typing import Any

import pytest

from cgbundle.cpu.host_region import OutputLayouts, check_layout
from cgbundle.format.schema import Alias, Manifest, Value
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.tiny_bundle import manifest
from tests.helpers.raising import raises

FLOAT32, INT32 = 6, 3


class FakeTorch:
    """Tensors by handle, counted from 1: (dtype's number, shape, strides, numbers)."""

    def __init__(self) -> None:
        self.tensors: list[tuple[int, tuple[int, ...], tuple[int, ...], Any]] = []
        self.seen: list[Any] = []
        self.asked = 0

    def dtype(self, name: str) -> int:
        return {"float32": FLOAT32, "int32": INT32}[name]

    def layout(self, handle: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        self.asked += 1
        return self.tensors[handle - 1][:3]

    def data_pointer(self, handle: int, place: int) -> None:
        c_void_p.from_address(place).value = ctypes.addressof(self.tensors[handle - 1][3])

    def strides(self, handle: int, place: int) -> None:
        strides = self.tensors[handle - 1][2]
        self.seen.append((ctypes.c_int64 * len(strides))(*strides))
        c_void_p.from_address(place).value = ctypes.addressof(self.seen[-1])


def numbers(*values: float) -> Any:
    return (ctypes.c_float * len(values))(*values)


def two_outputs(*aliases: Alias, **changes: Any) -> Manifest:
    """Returns a manifest in which x[key, 3] gives y[key, 2] and z[2]. `changes` apply to the row of z."""
    base = manifest()
    second = Value(dtype="float32", shape=(2,), strides=(1,), memory="host", offset=0)
    programs = [
        replace(
            program,
            values=(*program.values, replace(second, **changes)),
            outputs=(1, 2),
            steps=(replace(program.steps[0], outputs=(1, 2)),),
        )
        for program in base.entries[0].programs
    ]
    outputs = (*base.entries[0].outputs, replace(base.entries[0].outputs[0], name="z", shape=(2,), order=(0,)))
    return edited(base, outputs=outputs, programs=tuple(programs), aliases=aliases)


def layouts_of(torch: FakeTorch, manifest: Manifest) -> OutputLayouts:
    return OutputLayouts(torch, manifest, manifest.entries[0], manifest.entries[0].programs[1])  # type: ignore[arg-type]


HANDLES = (c_void_p * 2)(1, 2)
Y = numbers(*range(8))


def test_strides_are_compared_at_every_replay_and_the_rest_at_the_first() -> None:
    torch, z = FakeTorch(), numbers(8, 9)
    layouts = layouts_of(torch, two_outputs())
    torch.tensors = [(FLOAT32, (4, 2), (2, 1), Y), (FLOAT32, (2,), (1,), z)]
    for _ in range(3):
        assert layouts.addresses(HANDLES) == [ctypes.addressof(Y), ctypes.addressof(z)]
    assert torch.asked == 2
    torch.tensors[0] = (FLOAT32, (4, 2), (3, 1), Y)
    with raises("library-refused", match=r"^host/model\.so: output 'y': expected float32 .*, got \[4, 2\] with strides \[3, 1\]"):
        layouts.addresses(HANDLES)
    torch.tensors[0] = (FLOAT32, (4, 2), (2, 3), Y)
    with raises("library-refused", match=r"output 'y': expected .*, got \[4, 2\] with strides \[2, 3\]"):
        layouts.addresses(HANDLES)
    torch.tensors[0] = (FLOAT32, (4, 2), (2, 1), Y)
    assert layouts.addresses(HANDLES)[0] == ctypes.addressof(Y)
    torch.tensors[1] = (FLOAT32, (2,), (4,), z)
    with raises("library-refused", match=r"output 'z': expected .*, got \[2\] with strides \[4\]"):
        layouts.addresses(HANDLES)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ((INT32, (4, 2), (2, 1)), "another dtype"),
        ((FLOAT32, (2, 4), (2, 1)), r"\[2, 4\]"),
        ((FLOAT32, (4, 2, 1), (2, 1, 1)), r"\[4, 2, 1\]"),
        ((FLOAT32, (4, 2), (1, 4)), r"strides \[1, 4\]"),
        ((FLOAT32, (4, 2), (2, 2)), r"strides \[2, 2\]"),
    ],
)
def test_the_first_replay_compares_all(layout: Any, message: str) -> None:
    torch = FakeTorch()
    torch.tensors = [(*layout, Y), (FLOAT32, (2,), (1,), Y)]
    layouts = layouts_of(torch, two_outputs())
    for _ in range(2):
        with raises("library-refused", match=f"output 'y': expected float32 .*, got .*{message}"):
            layouts.addresses(HANDLES)


def test_strides_of_one_element_may_change() -> None:
    row = Value(dtype="float32", shape=(1, 2), strides=(2, 1), memory="host", offset=0)
    check_layout((FLOAT32, (1, 2), (77, 1)), FLOAT32, row, "x")
    check_layout((FLOAT32, (0, 2), (9, 9)), FLOAT32, replace(row, shape=(0, 2)), "x")
    with raises("library-refused"):
        check_layout((FLOAT32, (1, 2), (2, 2)), FLOAT32, row, "x")


def test_an_output_that_shares_memory_is_not_compared() -> None:
    """The code returns a copy of such an output, but a caller gets the memory that the output shares."""
    torch = FakeTorch()
    torch.tensors = [(FLOAT32, (4, 2), (2, 1), Y), (INT32, (7,), (3,), numbers(8, 9))]
    layouts_of(torch, two_outputs(Alias(output=1, memory="outputs", index=0))).addresses(HANDLES)
