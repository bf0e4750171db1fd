"""Nested inputs and outputs as data: taken apart, built, and refused where a tree is hostile."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle.format.pytree import builder, check, check_call, flattener
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
    ),
    max_leaves=8,
)


class Leaf:
    """Stands for a tensor: equal to itself only."""


def grow(shape: Any, leaves: list[Leaf]) -> tuple[dict[str, Any], Any]:
    """A shape's tree, and a value of that structure; its leaves are appended in order."""
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
    return {kind: trees}, values if kind == "list" else tuple(values)


@given(st.lists(shapes, max_size=4))
def test_what_is_built_is_taken_apart_again(given_shapes: list[Any]) -> None:
    leaves: list[Leaf] = []
    pairs = [grow(shape, leaves) for shape in given_shapes]
    call = {"call": [[f"input_{index}", tree] for index, (tree, _) in enumerate(pairs)]}
    check_call(call, len(leaves))
    flatten = flattener(call)
    values = [value for _, value in pairs]
    assert list(flatten(tuple(values), {})) == leaves
    assert list(flatten((), {f"input_{index}": value for index, value in enumerate(values)})) == leaves
    rebuilt = [builder(tree)(leaves) for tree, _ in pairs]
    assert rebuilt == values
    assert [type(value).__name__ for value in rebuilt] == [type(value).__name__ for value in values]


def test_a_named_tuple_is_made_from_its_names_alone() -> None:
    made = builder({"namedtuple": ["Output", ["logits", "hidden"], [{"tensor": 1}, {"value": None}]]})(["a", "b"])
    assert (type(made).__name__, made._fields, made.logits, made.hidden) == ("Output", ("logits", "hidden"), "b", None)


def test_a_named_tuple_is_one_class_for_all_calls() -> None:
    build = builder({"namedtuple": ["Output", ["logits"], [{"tensor": 0}]]})
    assert type(build(["a"])) is type(build(["b"]))


def test_a_dict_comes_back_in_the_models_order() -> None:
    made = builder({"dict": [["z", {"tensor": 0}], ["a", {"tensor": 1}], [3, {"value": 7}]]})([10, 11])
    assert list(made.items()) == [("z", 10), ("a", 11), (3, 7)]


def test_tensors_may_come_out_in_another_order_than_they_stand() -> None:
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
    assert list(flattener(CALL)((0, nested), {})) == [0, 1, 2, 3]


def test_inputs_may_be_given_by_position_by_name_or_both() -> None:
    flatten = flattener(CALL)
    expected = [0, 1, 2, 3]
    assert list(flatten((0, NESTED, 2), {})) == expected
    assert list(flatten((0,), {"cache": NESTED, "scale": 2})) == expected
    assert list(flatten((), {"cache": NESTED, "ids": 0})) == expected


def test_inputs_that_are_plain_tensors_may_be_named_in_any_order() -> None:
    flatten = flattener({"call": [["a", {"tensor": 0}], ["b", {"tensor": 1}]]})
    assert list(flatten((), {"b": 2, "a": 1})) == [1, 2]
    assert list(flatten((1, 2), {})) == [1, 2]


def test_a_call_without_inputs_takes_nothing() -> None:
    flatten = flattener({"call": []})
    assert list(flatten((), {})) == []
    with raises("input-structure", match=r"expected at most 0 inputs \(\), got 1"):
        flatten((1,), {})


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "input 'ids' is missing: the bundle takes ids, cache"),
        ((0,), {}, "input 'cache' is missing: the bundle takes ids, cache"),
        ((0, NESTED, 2, 9), {}, "expected at most 3 inputs"),
        ((0, NESTED), {"ids": 1}, "input 'ids' is given by position and by name"),
        ((0, NESTED), {"mask": 1}, "no input is called 'mask': the bundle takes ids, cache"),
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
        flattener(CALL)(args, kwargs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_named_tuple_is_given_as_any_tuple_of_its_length() -> None:
    flatten = flattener({"call": [["point", {"namedtuple": ["Point", ["x", "y"], [{"tensor": 0}, {"tensor": 1}]]}]]})
    assert list(flatten((Point(1, 2),), {})) == [1, 2]
    assert list(flatten(((1, 2),), {})) == [1, 2]
    with raises("input-structure", match="input 'point': expected a namedtuple of 2, got a list of 2"):
        flatten(([1, 2],), {})


def test_a_long_constant_does_not_flood_the_message() -> None:
    with raises("input-structure") as caught:
        flattener(CALL)((0, NESTED, "x" * 10_000), {})
    assert len(str(caught.value)) < 300


# --- hostile trees -----------------------------------------------------------------------------------------------


def test_every_kind_of_tree_is_accepted() -> None:
    check(
        {"namedtuple": ["_Output", ["a", "b"], [{"tensor": 0}, {"dict": [["k", {"tuple": []}], [1, {"value": 2.5}]]}]]}, "result", 1
    )


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({}, "result"),
        ([], "result"),
        (None, "result"),
        ({"tensor": 0, "value": 1}, "result"),
        ({"tensor": True}, "result"),
        ({"tensor": "0"}, "result"),
        ({"value": [1]}, "result"),
        ({"value": {}}, "result"),
        ({"tuple": {}}, "result"),
        ({"list": None}, "result"),
        ({"set": []}, "result"),
        ({"tuple": [{"tensor": 0}, 7]}, r"result\[1\]"),
        ({"dict": [["a"]]}, "result"),
        ({"dict": [[None, {"tensor": 0}]]}, "result"),
        ({"dict": [[1.5, {"tensor": 0}]]}, "result"),
        ({"dict": [[True, {"tensor": 0}]]}, "result"),
        ({"dict": [["a", {"tensor": 0}], ["a", {"value": 1}]]}, "result"),
        ({"dict": [["a", {"bad": 0}]]}, r"result\.a"),
        ({"namedtuple": ["A", ["x"], []]}, "result"),
        ({"namedtuple": ["A", ["x", "x"], [{"tensor": 0}, {"value": 1}]]}, "result"),
        ({"namedtuple": ["A", ["_x"], [{"tensor": 0}]]}, "result"),
        ({"namedtuple": ["A", ["class"], [{"tensor": 0}]]}, "result"),
        ({"namedtuple": ["A", ["x y"], [{"tensor": 0}]]}, "result"),
        ({"namedtuple": ["A", [7], [{"tensor": 0}]]}, "result"),
        ({"namedtuple": ["import os", ["x"], [{"tensor": 0}]]}, "result"),
        ({"namedtuple": ["A", ["x=__import__('os')"], [{"tensor": 0}]]}, "result"),
        ({"namedtuple": ["A", ["fi", "\ufb01"], [{"tensor": 0}, {"value": 1}]]}, "result"),
        ({"tuple": [{"call": [["x", {"tensor": 0}]]}]}, r"result\[0\]"),
        ({"call": [["x", {"tensor": 0}]]}, "result"),
    ],
)
def test_a_hostile_tree_is_refused_with_its_path(tree: Any, path: str) -> None:
    with raises("manifest-invalid", match=f"^{path}: "):
        check(tree, "result", 1)


@pytest.mark.parametrize(
    "tree",
    [
        {"tensor": 0},
        {"tuple": []},
        {"call": [[1, {"tensor": 0}]]},
        {"call": [["x", {"tensor": 0}], ["x", {"value": 1}]]},
        {"call": [["x", {"call": [["y", {"tensor": 0}]]}]]},
    ],
)
def test_the_tree_of_a_call_names_each_parameter_once(tree: Any) -> None:
    with raises("manifest-invalid", match="^call"):
        check_call(tree, 1)


@pytest.mark.parametrize("positions", [[], [0], [1, 0], [0, 0], [0, 2], [0, 1, 2], [-1, 0]])
def test_tensors_must_be_named_once_and_in_order(positions: list[int]) -> None:
    with raises("manifest-invalid", match="expected each of 2 once, in order"):
        check({"tuple": [{"tensor": position} for position in positions]}, "result", 2)


@pytest.mark.parametrize("depth", [200, 5000])
def test_a_tree_nested_too_deeply_is_refused(depth: int) -> None:
    tree: Any = {"tensor": 0}
    for _ in range(depth):
        tree = {"tuple": [tree]}
    with raises("manifest-invalid", match="nested too deeply"):
        check(tree, "result", 1)


def test_the_key_of_a_dict_cannot_break_the_line() -> None:
    with raises("manifest-invalid") as caught:
        check({"dict": [["two\nlines\x1b[2J", {"bad": 0}]]}, "result", 0)
    assert str(caught.value).isprintable()
