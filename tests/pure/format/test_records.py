"""Records behave like frozen dataclasses, and no load imports `dataclasses`."""

from __future__ import annotations

import dataclasses
import pickle
from copy import deepcopy
from typing import get_type_hints

import pytest

from cgbundle.format.records import replace
from cgbundle.format.schema import Alias, Parameter, Region, Value

VALUE = Value(dtype="float32", shape=(2, 3), strides=(3, 1), memory="arena")


def test_the_standard_library_takes_them_for_dataclasses() -> None:
    assert dataclasses.is_dataclass(Value) and dataclasses.is_dataclass(VALUE)
    assert [field.name for field in dataclasses.fields(VALUE)] == ["dtype", "shape", "strides", "memory", "offset"]
    assert [field.name for field in dataclasses.fields(Value) if field.default is dataclasses.MISSING][-1] == "memory"
    assert dataclasses.replace(VALUE, offset=8) == replace(VALUE, offset=8) != VALUE
    assert dataclasses.asdict(Parameter(default={"value": 1})) == {"keyword": False, "default": {"value": 1}}
    assert get_type_hints(Region)["file"] is str


def test_equal_fields_of_one_class_make_equal_records() -> None:
    again = Value(dtype="float32", shape=(2, 3), strides=(3, 1), memory="arena", offset=0)
    assert again == VALUE and hash(again) == hash(VALUE) and {VALUE: 1}[again] == 1
    assert Value(dtype="float32", shape=(2, 3), strides=(3, 1), memory="arena", offset=1) != VALUE
    assert VALUE != ("float32", (2, 3), (3, 1), "arena", 0)
    assert repr(Alias(output=0, memory="inputs", index=1)) == "Alias(output=0, memory='inputs', index=1)"


def test_they_are_frozen_and_have_no_other_attributes() -> None:
    with pytest.raises(AttributeError, match="Value is frozen: offset cannot be set"):
        VALUE.offset = 8  # type: ignore[misc]
    with pytest.raises(AttributeError, match="Value is frozen: offset cannot be deleted"):
        del VALUE.offset
    assert not hasattr(VALUE, "__dict__")


def test_they_are_copied_and_pickled() -> None:
    assert pickle.loads(pickle.dumps(VALUE)) == VALUE and deepcopy(VALUE) == VALUE


def test_arguments_that_are_missing_or_unknown_are_named() -> None:
    with pytest.raises(TypeError, match="Alias: arguments that are missing or unknown: index"):
        Alias(output=0, memory="inputs")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Alias: arguments that are missing or unknown: place"):
        Alias(output=0, memory="inputs", index=1, place=2)  # type: ignore[call-arg]
