"""The meaning of --sizes and `sizes=` for a model with several entries."""

from __future__ import annotations

from typing import Any

import pytest

from cgcompile.errors import BuildError
from cgcompile.model.declared_sizes import SavedDimension, count_keys, declared_sizes, sizes_of_entries
from tests.helpers.raising import raises

DIMENSIONS = {"prefill": ("batch", "seq"), "decode": ("batch",), "reset": ()}


def sizes(options: Any, dimensions: Any = DIMENSIONS) -> dict[str, dict[str, tuple[int, ...]]]:
    by_entry = sizes_of_entries(options, dimensions)
    return {entry: declared_sizes(by_entry[entry], names, (), entry) for entry, names in dimensions.items()}


WANTED = {"prefill": {"batch": (1, 2), "seq": (128, 512)}, "decode": {"batch": (1, 8)}, "reset": {}}


@pytest.mark.parametrize(
    "options",
    [
        ["prefill:batch=1,2", "prefill:seq=128,512", "decode:batch=8,1"],
        ["prefill:batch=1,2", "seq=128,512", "decode:1,8"],
        ["batch=1,8", "prefill:batch=1,2", "prefill:seq=512,128"],
        {"prefill": {"batch": [1, 2], "seq": [128, 512]}, "decode": [1, 8]},
        {"prefill": ["batch=1,2", "seq=128,512"], "decode": "1,8"},
        {"batch": [1, 8], "seq": [128, 512], "prefill": {"batch": [1, 2]}},
    ],
)
def test_sizes_of_entries(options: Any) -> None:
    assert sizes(options) == WANTED
    assert count_keys(WANTED, 7) == 7
    with raises("too-many-keys", match="makes 7 int_keys, more than 6"):
        count_keys(WANTED, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["encode:batch=1"], r"there is no entry 'encode' \(did you mean decode\?\) \(there are prefill, decode"),
        (["prefill:seq=1", "width=3"], "'width=3' names no entry"),
        ([1, 8], "'1,8' names no entry"),
        (["batch=1", "prefill:batch=1", "prefill:batch=2", "seq=1"], "dimension 'batch' of 'prefill' is given twice"),
        (["batch=1"], "entry 'prefill': sizes: no size for dimension 'seq'"),
        (["batch=1", "seq=0"], "entry 'prefill': sizes: seq=0 is not a positive whole number"),
    ],
)
def test_sizes_that_fit_no_entry(options: Any, message: str) -> None:
    with raises("sizes-invalid", match=message):
        sizes(options)


@pytest.mark.parametrize("options", [[1, 8], "1,8", ["1,8"]])
def test_a_dimension_that_all_entries_have_need_not_be_named(options: Any) -> None:
    assert sizes(options, {"look": ("batch",), "add": ("batch",), "reset": ()}) == {
        "look": {"batch": (1, 8)}, "add": {"batch": (1, 8)}, "reset": {},
    }  # fmt: skip


def test_a_hint_names_the_entry() -> None:
    with raises("sizes-invalid") as caught:
        sizes(["batch=1"])
    assert caught.value.hint == "add --sizes prefill:seq=1,8; in Python sizes={'prefill': {'seq': [1, 8]}}"
    with raises("sizes-invalid", match="declares 2 dimensions") as caught:
        sizes(["decode:1"], {"decode": ("batch", "seq"), "reset": ()})
    words = "--sizes decode:batch=1,8 --sizes decode:seq=1,8"
    assert caught.value.hint == f"for example {words}; in Python sizes={{'decode': {{'batch': [1, 8], 'seq': [1, 8]}}}}"


def test_an_entry_without_dimensions_is_told_to_leave_sizes_out() -> None:
    with raises("sizes-invalid", match="declares no dimension") as caught:
        sizes(["reset:1"], {"decode": ("batch",), "reset": ()})
    assert caught.value.hint == "inputs() takes no parameter: leave --sizes out"


@pytest.mark.parametrize("options", [[1, 8], "1,8", ["batch=1,8"], {"batch": [1, 8]}, ["forward:batch=1,8"], {"forward": [8, 1]}])
def test_sizes_of_a_single_entry(options: Any) -> None:
    assert sizes(options, {"forward": ("batch",)}) == {"forward": {"batch": (1, 8)}}


SAVED = [SavedDimension("batch", ("x.0",), 2, 8), SavedDimension("seq", ("x.1",), 1, None)]


@pytest.mark.parametrize("saved", [SAVED, []], ids=["dynamic", "static"])
@pytest.mark.parametrize(
    "options",
    [[1, 8], "8,x", ["batch=0", "seq=4"], ["batch=4,4", "seq=4"], ["x.0=4", "batch=4"], ["bath=4"], ["batch=1", "seq=4"], ["seq="]],
)
def test_no_hint_for_a_saved_program_speaks_of_a_model_files_inputs(options: Any, saved: list[SavedDimension]) -> None:
    with pytest.raises(BuildError) as caught:
        declared_sizes(options, [dimension.name for dimension in saved], saved)
    assert caught.value.hint and "inputs()" not in caught.value.hint


def test_a_mistyped_dimension_is_told_the_nearest() -> None:
    with raises("sizes-invalid", match=r"there is no declared dimension 'sq' \(did you mean seq\?\) \(declared: batch, seq\)"):
        declared_sizes(["batch=1", "sq=16"], ["batch", "seq"])
