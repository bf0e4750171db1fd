"""Nested inputs and outputs are described as data, flattened and rebuilt."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle.call.entry import builder
from cgbundle.call.structure import flattener, record_class
from cgbundle.format.pytree import RECORDS, check_call
from cgbundle.format.schema import Parameter
from tests.helpers.raising import raises

Point = namedtuple("Point", ["x", "y"])

# --- round trips -------------------------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=3)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
constants = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | texts
shapes = st.recursive(
    st.just("tensor") | constants.map(lambda value: ("value", value)),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: ("list", items))
        | st.lists(inner, max_size=3).map(lambda items: ("tuple", items))
        | st.dictionaries(names | st.integers(-5, 5), inner, max_size=3).map(lambda items: ("dict", items))
        | st.tuples(inner, inner).map(lambda items: ("namedtuple", items))
        | st.tuples(inner, inner).map(lambda items: ("object", items))
        | st.tuples(inner, inner).map(lambda items: ("mapping", items))
    ),
    max_leaves=8,
)


class Leaf:
    """Replaces a tensor; an instance equals only itself."""


def grow(shape: Any, leaves: list[Leaf]) -> tuple[dict[str, Any], Any]:
    """Returns the tree of a shape, and a value of that structure. Appends the leaves of the value to `leaves`, in order."""
    if shape == "tensor":
        leaves.append(Leaf())
        return {"tensor": len(leaves) - 1}, leaves[-1]
    kind, items = shape
    if kind == "value":
        return {"value": items}, items
    if kind == "dict":
        grown = {key: grow(item, leaves) for key, item in items.items()}
        return {"dict": [[key, tree] for key, (tree, _) in grown.items()]}, {key: value for key, (_, value) in grown.items()}
    pairs = [grow(item, leaves) for item in items]
    trees, values = [tree for tree, _ in pairs], [value for _, value in pairs]
    if kind == "namedtuple":
        return {"namedtuple": ["Point", ["x", "y"], trees]}, Point(*values)
    if kind in RECORDS:
        return {"record": ["Point", kind, ["x", "y"], trees]}, record_class("Point", kind, ("x", "y")).of(values)
    return {kind: trees}, values if kind == "list" else tuple(values)


def positional(call: dict[str, Any]) -> list[Parameter]:
    """Returns parameters that all may be passed by position. The default of a constant is its value."""
    return [Parameter(default=tree if "value" in tree else None) for _, tree in call["call"]]


@given(st.lists(shapes, max_size=4))
def test_flattening_reverses_building(random_shapes: list[Any]) -> None:
    leaves: list[Leaf] = []
    pairs = [grow(shape, leaves) for shape in random_shapes]
    call = {"call": [[f"input_{index}", tree] for index, (tree, _) in enumerate(pairs)]}
    check_call(call, len(leaves))
    call = json.loads(json.dumps(call))  # as it is after a manifest was read
    flatten = flattener(call, positional(call))
    values = [value for _, value in pairs]
    assert list(flatten(tuple(values), {})) == leaves
    assert list(flatten((), {f"input_{index}": value for index, value in enumerate(values)})) == leaves
    rebuilt = [builder(tree)(leaves) for tree, _ in pairs]
    assert rebuilt == values
    assert [type(value).__name__ for value in rebuilt] == [type(value).__name__ for value in values]


def test_a_named_tuple_is_built_without_its_class() -> None:
    output = builder({"namedtuple": ["Output", ["logits", "hidden"], [{"tensor": 1}, {"value": None}]]})(["a", "b"])
    assert (type(output).__name__, output._fields, output.logits, output.hidden) == ("Output", ("logits", "hidden"), "b", None)


def test_a_named_tuple_is_one_class_for_all_calls() -> None:
    build = builder({"namedtuple": ["Output", ["logits"], [{"tensor": 0}]]})
    assert type(build(["a"])) is type(build(["b"]))


def test_a_dict_comes_back_in_the_models_order() -> None:
    mapping = builder({"dict": [["z", {"tensor": 0}], ["a", {"tensor": 1}], [3, {"value": 7}]]})([10, 11])
    assert list(mapping.items()) == [("z", 10), ("a", 11), (3, 7)]


def test_a_result_may_use_tensors_in_any_order_and_twice() -> None:
    assert builder({"tuple": [{"tensor": 1}, {"tensor": 0}, {"tensor": 1}]})(["a", "b"]) == ("b", "a", "b")


# --- calls -------------------------------------------------------------------------------------------------------

CALL = {
    "call": [
        ["ids", {"tensor": 0}],
        ["cache", {"dict": [["key", {"tensor": 1}], ["value", {"list": [{"tensor": 2}, {"tensor": 3}]}]]}],
        ["scale", {"value": 2}],
    ]
}
NESTED = {"key": 1, "value": [2, 3]}


@pytest.mark.parametrize("nested", [NESTED, {"value": [2, 3], "key": 1}, OrderedDict(NESTED), MappingProxyType(NESTED)])
def test_a_dict_may_have_its_keys_in_any_order_and_be_any_mapping(nested: Mapping[str, Any]) -> None:
    assert list(flattener(CALL, positional(CALL))((0, nested), {})) == [0, 1, 2, 3]


def test_inputs_may_be_given_by_position_by_name_or_both() -> None:
    flatten = flattener(CALL, positional(CALL))
    expected = [0, 1, 2, 3]
    assert list(flatten((0, NESTED, 2), {})) == expected
    assert list(flatten((0,), {"cache": NESTED, "scale": 2})) == expected
    assert list(flatten((), {"cache": NESTED, "ids": 0})) == expected


def test_inputs_that_are_plain_tensors_may_be_named_in_any_order() -> None:
    flatten = flattener(
        {"call": [["a", {"tensor": 0}], ["b", {"tensor": 1}]]}, positional({"call": [["a", {"tensor": 0}], ["b", {"tensor": 1}]]})
    )
    assert list(flatten((), {"b": 2, "a": 1})) == [1, 2]
    assert list(flatten((1, 2), {})) == [1, 2]


def test_a_call_without_inputs_takes_nothing() -> None:
    flatten = flattener({"call": []}, positional({"call": []}))
    assert list(flatten((), {})) == []
    with raises("input-structure", match=r"^expected no input, got 1$"):
        flatten((1,), {})


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "input 'ids' is missing: the bundle takes ids, cache"),
        ((0,), {}, "input 'cache' is missing: the bundle takes ids, cache"),
        ((0, NESTED, 2, 9), {}, "expected at most 3 inputs"),
        ((0, NESTED), {"ids": 1}, "input 'ids' is given by position and by name"),
        ((0, NESTED), {"mask": 1}, "no input is called 'mask': the bundle takes ids, cache"),
        ((0,), {"caches": NESTED}, "no input is called 'caches' (did you mean cache?): the bundle takes ids, cache"),
        (
            (),
            {"id": 0, "caches": NESTED},
            "no input is called 'id' (did you mean ids?) or 'caches' (did you mean cache?): the bundle takes ids, cache",
        ),
        ((0, NESTED, 3), {}, "input 'scale': the bundle was built for the constant 2, got 3"),
        ((0, NESTED, True), {}, "input 'scale': the bundle was built for the constant 2, got True"),
        ((0, NESTED, 2.0), {}, "input 'scale': the bundle was built for the constant 2, got 2.0"),
        ((0, NESTED, None), {}, "input 'scale': the bundle was built for the constant 2, got None"),
        ((0, [1, 2]), {}, "input 'cache': expected a dict with the keys ['key', 'value'], got a list of 2"),
        ((0, {"key": 1}), {}, "input 'cache': expected a dict with the keys ['key', 'value'], got a dict with the keys ['key']"),
        ((0, {**NESTED, "more": 1}), {}, "got a dict with the keys ['key', 'value', 'more']"),
        ((0, {"key": 1, "value": (2, 3)}), {}, "input 'cache.value': expected a list of 2, got a tuple of 2"),
        ((0, {"key": 1, "value": [2]}), {}, "input 'cache.value': expected a list of 2, got a list of 1"),
        ((0, {"key": 1, "value": None}), {}, "input 'cache.value': expected a list of 2, got None"),
        ((0, {"key": 1, "value": 7}), {}, "input 'cache.value': expected a list of 2, got 7"),
        ((0, Leaf()), {}, "got a Leaf"),
    ],
)
def test_a_call_that_does_not_fit_says_where_and_what(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with raises("input-structure") as caught:
        flattener(CALL, positional(CALL))(args, kwargs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# --- constants of a call ---------------------------------------------------------------------------------------------


def parameters(*rows: tuple[str, dict[str, Any], bool, Any]) -> tuple[dict[str, Any], list[Parameter]]:
    """Returns a call and its parameters from rows (name, tree, keyword only, default). A default of ... means none."""
    call = {"call": [[name, tree] for name, tree, _, _ in rows]}
    return call, [Parameter(keyword=keyword, default=None if tree is ... else tree) for _, _, keyword, tree in rows]


FORWARD = parameters(
    ("ids", {"tensor": 0}, False, ...),
    ("mode", {"value": "b"}, False, {"value": "a"}),
    ("scale", {"value": None}, True, {"value": None}),
    ("temperature", {"value": 2.0}, True, {"value": 1.0}),
)
"""forward(ids, mode="a", *, scale=None, temperature=1.0), recorded with mode="b" and temperature=2.0."""


def test_only_a_constant_equal_to_the_models_default_may_be_left_out() -> None:
    flatten = flattener(*FORWARD)
    assert list(flatten((7, "b"), {"temperature": 2.0})) == [7]
    assert list(flatten((7,), {"mode": "b", "temperature": 2.0, "scale": None})) == [7]
    with raises("input-structure", match="'mode' is missing: .* constant 'b', and the model's default is 'a'"):
        flatten((7,), {"temperature": 2.0})
    with raises("input-structure", match="built for the constant 2.0, and the model's default is 1.0") as caught:
        flatten((7, "b"), {})
    assert caught.value.hint == "give temperature=2.0, or build with inputs() that leaves it out"
    with raises("input-structure", match="input 'temperature': the bundle was built for the constant 2.0, got 1.0"):
        flatten((7, "b"), {"temperature": 1.0})
    with raises("input-structure", match="input 'scale': the bundle was built for the constant None, got a Leaf"):
        flatten((7, "b"), {"temperature": 2.0, "scale": Leaf()})


def test_a_parameter_that_is_by_name_only_is_not_taken_by_position() -> None:
    flatten = flattener(*FORWARD)
    with raises("input-structure", match=r"expected at most 2 inputs by position \(ids, mode, temperature\), got 4") as caught:
        flatten((7, "b", None, 2.0), {})
    assert caught.value.hint == "give scale, temperature by name"
    tensors = flattener(*parameters(("a", {"tensor": 0}, False, ...), ("b", {"tensor": 1}, True, ...)))
    assert list(tensors((1,), {"b": 2})) == [1, 2]
    with raises("input-structure", match="expected at most 1 inputs by position"):
        tensors((1, 2), {})


def test_a_constant_without_a_default_has_to_be_given() -> None:
    """Saved programs record no defaults."""
    flatten = flattener(*parameters(("ids", {"tensor": 0}, False, ...), ("flag", {"value": True}, False, ...)))
    assert list(flatten((7, True), {})) == [7]
    with raises("input-structure", match="input 'flag' is missing: the bundle was built for the constant True$") as caught:
        flatten((7,), {})
    assert caught.value.hint == "give flag=True"


DIFFERENT: list[tuple[Any, Any]] = [
    (1, 1.0), (1, True), (1.0, True), (0, False), (0, None), ("1", 1), (0.0, -0.0), ((1, 2), [1, 2]), ((1, 2), (1, 2.0)),
    ({"a": 1}, {"a": True}), ({"a": 1}, {"b": 1}), ((), []), (None, ()), ("", None), ((1,), (1, 1)),
]  # fmt: skip
"""Pairs of different constants."""


def tree_of(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {"dict": [[key, tree_of(item)] for key, item in value.items()]}
    if isinstance(value, tuple | list):
        return {type(value).__name__: [tree_of(item) for item in value]}
    return {"value": value}


@pytest.mark.parametrize(("one", "other"), [*DIFFERENT, *[(other, one) for one, other in DIFFERENT]])
def test_constants_are_equal_only_if_value_and_type_are(one: Any, other: Any) -> None:
    tree, default = tree_of(one), tree_of(other)
    flatten = flattener(*parameters(("x", {"tensor": 0}, False, ...), ("how", tree, False, default)))
    assert list(flatten((7, one), {})) == list(flatten((7,), {"how": one})) == [7]
    with raises("input-structure", match="input 'how"):
        flatten((7, other), {})
    with raises("input-structure", match="input 'how' is missing: the bundle was built for the constant"):
        flatten((7,), {})
    assert list(flattener(*parameters(("x", {"tensor": 0}, False, ...), ("how", tree, False, tree)))((7,), {})) == [7]


def test_any_tuple_of_the_same_length_stands_for_a_named_tuple() -> None:
    flatten = flattener(
        {"call": [["point", {"namedtuple": ["Point", ["x", "y"], [{"tensor": 0}, {"tensor": 1}]]}]]},
        positional({"call": [["point", {"namedtuple": ["Point", ["x", "y"], [{"tensor": 0}, {"tensor": 1}]]}]]}),
    )
    assert list(flatten((Point(1, 2),), {})) == [1, 2]
    assert list(flatten(((1, 2),), {})) == [1, 2]
    with raises("input-structure", match="input 'point': expected a namedtuple of 2, got a list of 2"):
        flatten(([1, 2],), {})


class Anything:
    """An instance of any class, with these attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


LAYER = {"record": ["DynamicLayer", "object", ["keys", "values"], [{"tensor": 0}, {"tensor": 1}]]}
OUTPUT = {"record": ["Output", "mapping", ["logits", "cache", "loss"], [{"tensor": 0}, {"tensor": 1}, {"value": None}]]}


LAYERS = flattener({"call": [["layer", LAYER]]}, positional({"call": [["layer", LAYER]]}))


@pytest.mark.parametrize("layer", [Anything(keys=1, values=2, dtype="float"), {"keys": 1, "values": 2}, builder(LAYER)([1, 2])])
def test_a_record_argument_may_be_a_record_a_dict_or_an_object_with_its_attributes(layer: Any) -> None:
    assert list(LAYERS((layer,), {})) == [1, 2]


@pytest.mark.parametrize("layer", [[1, 2], None, 7, "text", {"keys": 1}, {"keys": 1, "values": 2, "more": 3}, Anything(keys=1)])
def test_the_error_for_a_missing_field_lists_all_fields_of_the_record(layer: Any) -> None:
    expected = r"input 'layer': expected a DynamicLayer with the fields \['keys', 'values'\], as attributes or as a dict, got "
    with raises("input-structure", match=expected):
        LAYERS((layer,), {})


def test_a_field_that_was_none_at_the_build_may_be_absent_or_none() -> None:
    flatten = flattener({"call": [["output", OUTPUT]]}, positional({"call": [["output", OUTPUT]]}))
    for fits in ({"logits": 1, "cache": 2}, {"logits": 1, "cache": 2, "loss": None}, Anything(logits=1, cache=2, loss=None)):
        assert list(flatten((fits,), {})) == [1, 2]
    assert list(flatten((builder(OUTPUT)([1, 2]),), {})) == [1, 2]
    with raises("input-structure", match=r"input 'output.loss': the bundle was built for the constant None, got 3"):
        flatten(({"logits": 1, "cache": 2, "loss": 3},), {})
    with raises("input-structure", match=r"expected a Output with the fields"):
        flatten(({"logits": 1},), {})


def test_a_record_of_constants_may_be_left_out_where_it_is_the_default() -> None:
    config = {"record": ["Config", "object", ["scale", "modes"], [{"value": 2.0}, {"tuple": [{"value": "a"}]}]]}
    flatten = flattener(*parameters(("x", {"tensor": 0}, False, ...), ("config", config, False, config)))
    assert list(flatten((7,), {})) == list(flatten((7,), {"config": {"scale": 2.0, "modes": ("a",)}})) == [7]
    with raises("input-structure", match=r"input 'config.scale': the bundle was built for the constant 2.0, got 1.0"):
        flatten((7,), {"config": Anything(scale=1.0, modes=("a",))})


def test_a_long_constant_does_not_flood_the_message() -> None:
    with raises("input-structure") as caught:
        flattener(CALL, positional(CALL))((0, NESTED, "x" * 10_000), {})
    assert len(str(caught.value)) < 300
