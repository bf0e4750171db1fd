"""Records replace instances of the user's classes, which the runtime does not have: they can be read in the same ways."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping

import pytest

from cgbundle.call.entry import builder
from cgbundle.call.structure import MappingRecord, Record, record_class

LAYER = {"record": ["DynamicLayer", "object", ["keys", "values"], [{"tensor": 1}, {"tensor": 2}]]}
TREE = {
    "record": ["CausalLMOutput", "mapping", ["loss", "logits", "cache"], [{"value": None}, {"tensor": 0}, {"list": [LAYER]}]],
}
BUILD = builder(TREE)


def test_a_mapping_is_read_as_an_output_of_transformers_is() -> None:
    out = BUILD(["logits", "k", "v"])
    assert type(out).__name__ == "CausalLMOutput" and isinstance(out, Mapping)
    assert out.logits == out["logits"] == out[0] == "logits" and out.loss is None
    assert list(out) == list(out.keys()) == ["logits", "cache"] and len(out) == 2 and "loss" not in out and "logits" in out
    assert out.to_tuple() == out[:] == ("logits", out.cache) and out[1] is out[-1] is out.cache
    assert out.get("loss", 7) == 7 and dict(out) == {"logits": "logits", "cache": out.cache}
    with pytest.raises(KeyError, match="loss"):
        out["loss"]
    with pytest.raises(AttributeError):
        out.attentions  # noqa: B018


def test_an_object_is_read_by_its_attributes_which_may_be_called_as_anything() -> None:
    layer = BUILD(["logits", "k", "v"]).cache[0]
    assert (layer.keys, layer.values, layer["keys"], layer[1], layer[:]) == ("k", "v", "k", "v", ("k", "v"))
    assert not isinstance(layer, Mapping) and vars(layer) == {"keys": "k", "values": "v"}
    with pytest.raises(TypeError):
        iter(layer)
    layer.keys = "other"
    assert layer["keys"] == "other"


def test_a_mapping_may_have_a_field_that_is_called_as_a_method() -> None:
    record = record_class("Pairs", "mapping", ("items", "of", "values")).of([1, None, 3])
    assert (record.items, record["items"], record[1], list(record)) == (1, 1, 3, ["items", "values"])
    assert record == pickle.loads(pickle.dumps(record)) == {"items": 1, "values": 3} != {"items": 1}


def test_records_are_equal_by_class_name_fields_and_values() -> None:
    one, other = BUILD(["logits", "k", "v"]), BUILD(["logits", "k", "w"])
    assert one == BUILD(["logits", "k", "v"]) != other and one.cache[0] != other.cache[0]
    assert one.cache[0] != {"keys": "k", "values": "v"} and one.cache[0] != ("k", "v")
    assert one == {"logits": "logits", "cache": one.cache} and one != 7
    assert record_class("A", "object", ("x",)).of([1]) != record_class("B", "object", ("x",)).of([1])
    assert record_class("A", "object", ("x",)).of([1]) != record_class("A", "object", ("y",)).of([1])
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_a_record_is_spelled_copied_and_pickled() -> None:
    out = BUILD(["logits", "k", "v"])
    assert repr(out) == "CausalLMOutput(loss=None, logits='logits', cache=[DynamicLayer(keys='k', values='v')])"
    for same in (pickle.loads(pickle.dumps(out)), copy.copy(out), copy.deepcopy(out)):
        assert same == out and repr(same) == repr(out) and isinstance(same, MappingRecord)
        assert isinstance(same.cache[0], Record)


def test_a_class_is_made_once_for_all_calls() -> None:
    assert type(BUILD([1, 2, 3])) is type(BUILD([4, 5, 6]))
