"""Well-formed trees are accepted, and others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from cgbundle.format.pytree import check, check_call
from tests.helpers.raising import raises


def test_every_kind_of_tree_is_accepted() -> None:
    check({"record": ["Output", "mapping", ["logits", "class"], [{"tensor": 0}, {"record": ["A", "object", [], []]}]]}, "result", 1)
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
        ({"record": ["A", "object", ["x"]]}, "result"),
        ({"record": ["A", "class", ["x"], [{"tensor": 0}]]}, "result"),
        ({"record": ["A", ["object"], ["x"], [{"tensor": 0}]]}, "result"),
        ({"record": ["A", "object", ["x"], []]}, "result"),
        ({"record": ["A", "object", "x", [{"tensor": 0}]]}, "result"),
        ({"record": ["A", "object", ["x", "x"], [{"tensor": 0}, {"value": 1}]]}, "result"),
        ({"record": ["A", "object", ["__class__"], [{"tensor": 0}]]}, "result"),
        ({"record": ["A", "object", [""], [{"tensor": 0}]]}, "result"),
        ({"record": ["A", "object", ["two\nlines"], [{"tensor": 0}]]}, "result"),
        ({"record": ["A", "object", [7], [{"tensor": 0}]]}, "result"),
        ({"record": ["a b", "object", ["x"], [{"tensor": 0}]]}, "result"),
        ({"record": [7, "object", ["x"], [{"tensor": 0}]]}, "result"),
        ({"record": ["A", "mapping", ["x"], [{"tuple": [{"bad": 0}]}]]}, r"result\.x\[0\]"),
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
