"""Outputs whose sizes depend on data: the arrays that a call returns, and which manifests are valid."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from cgbundle.call.outputs import View
from cgbundle.errors import CallError
from cgbundle.format import manifest_json
from cgbundle.format.schema import Alias, DataSize, Manifest
from cgbundle.program import Program
from cgbundle.tensors.tensor import Tensor, from_bytes
from cgbundle.validate.manifest import check_signature
from cgcompile.bundle import manifest_text
from tests.helpers.bundles.edits import edited
from tests.helpers.bundles.fabricate import FakeBackend, Numbers, dimension, signature, spec
from tests.helpers.raising import raises

numpy = pytest.importorskip("numpy")

OUTPUTS = [spec("rows", "n", 2), spec("columns", 2, "n"), spec("total", 1), spec("rows.rows", dtype="int64")]
SIZES = (DataSize(output=0, axis=0, count=3), DataSize(output=1, axis=1, count=3))


def manifest(**changes: Any) -> Manifest:
    """Returns the manifest: the outputs are the rows of the input [n, 2] with a positive first element, the same transposed, and
    their number."""
    tree = {"dict": [[output.name, {"tensor": index}] for index, output in enumerate(OUTPUTS[:3])]}
    base = signature([dimension("n", 3, pad="no", chunk=False)], [spec("x", "n", 2)], OUTPUTS, result=tree)
    return edited(base, data_sizes=SIZES, **changes)


def compute(key: tuple[int, ...], inputs: list[Numbers]) -> list[Numbers]:
    (x,) = inputs
    rows = [x[2 * row : 2 * row + 2] for row in range(key[0]) if x[2 * row] > 0]
    padded = [*rows, *[[0.0, 0.0]] * (key[0] - len(rows))]
    columns = [row[column] for column in (0, 1) for row in padded]
    return [[value for row in padded for value in row], columns, [sum(x)], [len(rows)]]


def program(outputs: str = "copy") -> Program:
    return Program(manifest(), FakeBackend(manifest(), compute, static=outputs == "view"), "pad", outputs)


X = [[1.0, 2.0], [-1.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize("kind", ["numpy", "tensor"])
@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_a_call_returns_the_true_sizes(kind: str, outputs: str) -> None:
    run = program(outputs)
    for rows in (X, [[-1.0, 0.0]] * 3, [[1.0, 2.0]] * 3):
        x = numpy.array(rows, numpy.float32)
        result = run(x if kind == "numpy" else tensor(rows))
        wanted = x[x[:, 0] > 0]
        assert list(result) == ["rows", "columns", "total"]
        assert result["rows"].shape == wanted.shape and result["columns"].shape == wanted.T.shape
        assert numbers_of(result["rows"]) == wanted.tolist()
        assert numbers_of(result["columns"]) == wanted.T.tolist()
        assert (type(result["rows"]) is View) == (outputs == "view")


def test_columns_are_given_row_major() -> None:
    assert program()(numpy.array(X, numpy.float32))["columns"].flags["C_CONTIGUOUS"]


def test_a_view_of_what_counts_is_stale_after_the_next_call() -> None:
    run = program("view")
    first = run(tensor(X))["rows"]
    run(tensor(X))
    with pytest.raises(CallError, match="was read after call 2"):
        first.tensor  # noqa: B018


def test_a_flat_call_returns_the_counts_too() -> None:
    rows, columns, total, count = program().replay([tensor(X)])
    assert (rows.shape, columns.shape, total.shape, count.tolist()) == ((2, 2), (2, 2), (1,), 2)
    whole = program()["forward"].replay_whole([tensor(X)])
    assert [output.shape for output in whole] == [(3, 2), (2, 3), (1,), ()]


def test_a_size_that_was_not_recorded_is_refused() -> None:
    with raises("key-missing"):
        program()(tensor(X[:2]))


def test_the_manifest_says_so_only_where_there_are_any() -> None:
    assert manifest_json.decode(manifest_text.encode(manifest())).entries[0].data_sizes == SIZES
    assert b"data_sizes" not in manifest_text.encode(edited(manifest(), data_sizes=()))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"data_sizes": SIZES[::-1]}, "not ascending"),
        ({"data_sizes": (SIZES[0], SIZES[0])}, "an axis occurs twice"),
        ({"data_sizes": (replace(SIZES[0], count=2),)}, "not the last outputs"),
        ({"data_sizes": (replace(SIZES[0], count=4),)}, "not the last outputs"),
        ({"data_sizes": (replace(SIZES[0], output=3),)}, "no such axis"),
        ({"data_sizes": (replace(SIZES[0], axis=2),)}, "no such axis"),
        ({"data_sizes": (replace(SIZES[0], output=-1),)}, "no such axis"),
        ({"outputs": (*OUTPUTS[:3], spec("count", dtype="int32"))}, "not an int64 of no axes"),
        ({"outputs": (*OUTPUTS[:3], spec("count", 1, dtype="int64"))}, "not an int64 of no axes"),
        ({"aliases": (Alias(output=0, memory="inputs", index=0),)}, "shares memory"),
        ({"dimensions": (dimension("n", 3, pad="zeros", chunk=False),)}, "depend on data"),
        ({"result": {"tuple": [{"tensor": index} for index in range(4)]}}, "names the tensors"),
    ],
)
def test_what_a_manifest_may_not_say(changes: dict[str, Any], match: str) -> None:
    check_signature(manifest().entries[0])
    with raises("manifest-invalid", match=match):
        check_signature(replace(manifest().entries[0], **changes))


def tensor(rows: list[list[float]]) -> Tensor:
    return from_bytes(array("f", [value for row in rows for value in row]), "float32", (len(rows), 2))


def numbers_of(value: Any) -> Any:
    return (value.tensor if type(value) is View else value).tolist()
