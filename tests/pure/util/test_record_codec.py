"""Records as bytes: a reader gets back what was written with its types, and other bytes are refused."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cgcompile.offline.compile.kernels import KernelImage
from cgcompile.offline.interpret.interpret import Outcome
from cgcompile.offline.lowered import Lowered
from cgcompile.util.record_codec import decode, encode


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Other:
    text: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    pair: tuple[str, int]
    items: tuple[Leaf | Other | int | float | bool, ...]
    seconds: float
    blob: bytes = field(repr=False)


@pytest.mark.parametrize("kind", [Lowered, KernelImage, Outcome, Tree])
@settings(max_examples=15, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(data=st.data())
def test_what_is_written_comes_back(kind: type, data: st.DataObject) -> None:
    record = data.draw(st.from_type(kind))
    again = decode(kind, encode(record))
    assert type(again) is kind and repr(again) == repr(record)  # `repr` tells 1 from 1.0 and True, and knows NaN
    assert encode(again) == encode(record)


@settings(max_examples=50)
@given(st.from_type(Tree), st.data())
def test_damage_is_a_value_error_or_another_record(record: Tree, data: st.DataObject) -> None:
    whole = bytearray(encode(record))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(ValueError):
        assert type(decode(Tree, bytes(whole))) is Tree


@given(st.binary(max_size=64))
def test_garbage_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(Tree, data)


def written(plain: object, rest: bytes = b"") -> bytes:
    text = json.dumps(plain).encode()
    return len(text).to_bytes(8, "little") + text + rest


LEAF = {"Leaf": [{"bytes": 2}]}


@pytest.mark.parametrize(
    ("plain", "rest"),
    [
        (LEAF, b"a"),
        (LEAF, b"abc"),
        ({"Leaf": [{"bytes": -1}]}, b""),
        ({"Leaf": [{"bytes": True}]}, b"a"),
        ({"Leaf": [{"bytes": 2, "more": 1}]}, b"ab"),
        ({"Leaf": []}, b""),
        ({"Leaf": {"data": 1}}, b""),
        ({"Leaf": ["ab"]}, b""),
        ({"Tree": [{"bytes": 2}]}, b"ab"),
        ([LEAF], b"ab"),
        (7, b""),
        (None, b""),
    ],
)
def test_other_values_are_refused(plain: object, rest: bytes) -> None:
    assert decode(Leaf, written(LEAF, b"ab")) == Leaf(data=b"ab")
    with pytest.raises(ValueError):
        decode(Leaf, written(plain, rest))


@pytest.mark.parametrize("depth", [1000, 100_000])
def test_depth_is_a_value_error(depth: int) -> None:
    text = b"[" * depth + b"]" * depth
    with pytest.raises(ValueError):
        decode(Leaf, len(text).to_bytes(8, "little") + text)


@pytest.mark.parametrize("value", [[1], {1: 2}, {1}, 1j, object(), bytearray(b"a"), Leaf])
def test_what_cannot_come_back_is_not_written(value: object) -> None:
    with pytest.raises(TypeError, match="a record cannot hold"):
        encode(Other(text=value))  # type: ignore[arg-type]
