"""The arguments of a model's call: made from tensors, printed as Python code, and with constants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cgbundle.call.structure import flattener
from cgbundle.format.schema import EntrySpec, Parameter
from cgcompile.bundle.arguments import arranged, constants, nested, spelled
from tests.helpers.bundles.tiny_bundle import manifest

Row = tuple[str, dict[str, Any], bool, Any]
"""A parameter: name, tree, keyword only, default (... means none)."""

TENSOR = {"tensor": 0}
POINT = {"namedtuple": ["Point", ["x", "y"], [{"value": 1}, {"value": 2}]]}


def bundle(*rows: Row) -> EntrySpec:
    call = {"call": [[name, tree] for name, tree, _, _ in rows]}
    known = [Parameter(keyword=keyword, default=None if preset is ... else {"value": preset}) for _, _, keyword, preset in rows]
    return replace(manifest().entries[0], call=call, parameters=tuple(known))


def constant(value: Any) -> dict[str, Any]:
    return {"value": value}


CALLS: list[tuple[str, list[Row]]] = [
    ("ids", [("ids", TENSOR, False, ...)]),
    ("ids=ids", [("ids", TENSOR, True, ...)]),
    ("ids, temperature=2.0", [("ids", TENSOR, False, ...), ("scale", constant(None), True, None),
                              ("temperature", constant(2.0), True, 1.0)]),
    ("ids, mode='b'", [("ids", TENSOR, False, ...), ("mode", constant("b"), False, "a")]),
    ("mode='b', ids=ids", [("mode", constant("b"), False, "a"), ("ids", TENSOR, False, ...)]),
    ("ids=ids", [("mode", constant("a"), False, "a"), ("ids", TENSOR, False, ...)]),
    ("ids, flag=True", [("ids", TENSOR, False, ...), ("flag", constant(True), False, ...)]),
    ("ids, how=(1, [2.5])",
     [("ids", TENSOR, False, ...), ("how", {"tuple": [constant(1), {"list": [constant(2.5)]}]}, False, ...)]),
    ("ids, config={'scale': 2.0, 'point': (1, 2)}",
     [("ids", TENSOR, False, ...),
      ("config", {"record": ["Config", "object", ["scale", "point"], [constant(2.0), POINT]]}, False, ...)]),
    ("ids, rest_0=7", [("ids", TENSOR, False, ...), ("rest_0", constant(7), False, ...)]),
    ("mode='b', **{'class': class_}", [("mode", constant("b"), False, "a"), ("class", TENSOR, True, ...)]),
    ("**{'a b': a_b}", [("a b", TENSOR, True, ...)]),
    ("**{'0': _0}", [("0", TENSOR, True, ...)]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "rows"), CALLS)
def test_the_printed_call_is_accepted(text: str, rows: list[Row]) -> None:
    entry = bundle(*rows)
    assert spelled(entry) == text
    flatten = flattener(entry.call, entry.parameters)
    ids = object()
    assert list(
        eval(
            f"(lambda *args, **kwargs: flatten(args, kwargs))({text})",
            {**dict.fromkeys(("ids", "class_", "a_b", "_0"), ids), "flatten": flatten},
        )
    ) == [ids]
    args, kwargs = arranged(entry, [ids])
    assert list(flatten(tuple(args), kwargs)) == [ids]


def test_an_argument_of_several_parts_is_spelled_with_them() -> None:
    """The printed text is valid Python, in which tensors have the names of the signature."""
    layer = {"record": ["Layer", "object", ["keys", "size"], [{"tensor": 1}, {"value": None}]]}
    tree = {"dict": [["x", TENSOR], [7, {"tuple": [layer]}], ["more", {"list": [constant("a"), {"tuple": []}]}]]}
    entry = bundle(("batch", tree, False, ...), ("long", {"list": [{"tensor": 2}, *[constant("x" * 200)]]}, False, ...))
    specs = [replace(entry.inputs[0], name=name) for name in ("batch.x", "batch.7.0.keys", "long.0")]
    entry = replace(entry, inputs=tuple(specs))
    assert nested(entry) == ["batch = {'x': batch_x, 7: ({'keys': batch_7_0_keys, 'size': None},), 'more': ['a', ()]}"]
    held: dict[str, Any] = {"batch_x": "x", "batch_7_0_keys": "k"}
    exec("\n".join(nested(entry)), held)
    assert list(flattener({"call": entry.call["call"][:1]}, entry.parameters[:1])((held["batch"],), {})) == [
        "x",
        "k",
    ]


def test_constants_are_told_with_their_defaults() -> None:
    cache = {"dict": [["key", {"tensor": 1}], ["size", constant(8)], ["more", {"list": [constant(None)]}]]}
    entry = bundle(
        ("ids", TENSOR, False, ...), ("cache", cache, False, ...), ("mode", constant("a"), False, "a"),
        ("temperature", constant(2.0), True, 1.0),
    )  # fmt: skip
    assert [tuple(row) for row in constants(entry)] == [
        ("cache.size", 8, (), False, True), ("cache.more.0", None, (), False, True), ("mode", "a", ("a",), False, False),
        ("temperature", 2.0, (1.0,), True, True),
    ]  # fmt: skip
