"""Size expressions have the same values as in Python."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle.format.schema import Size
from cgbundle.format.shapes import evaluate, linear, names, text

DIMENSIONS = ("batch", "seq")
whole = st.integers(-20, 20)
sizes = st.recursive(
    whole | st.sampled_from(DIMENSIONS),
    lambda inner: st.tuples(st.sampled_from(["+", "-", "*", "//", "%"]), inner, inner),
    max_leaves=6,
)
values = st.fixed_dictionaries({name: st.integers(0, 50) for name in DIMENSIONS})


def spelled(size: Size) -> str:
    """Returns a Python expression with all parentheses."""
    return f"({spelled(size[1])} {size[0]} {spelled(size[2])})" if isinstance(size, tuple) else f"({size})"


def python(expression: str, numbers: dict[str, int]) -> int | None:
    """Returns the value in Python, or None for a division by zero."""
    try:
        return int(eval(expression, {}, dict(numbers)))
    except ZeroDivisionError:
        return None


@given(sizes, values)
def test_evaluate_is_pythons_arithmetic(size: Size, numbers: dict[str, int]) -> None:
    expected = python(spelled(size), numbers)
    if expected is None:
        with pytest.raises(ZeroDivisionError):
            evaluate(size, numbers)
    else:
        assert evaluate(size, numbers) == expected


@given(sizes, values)
def test_text_means_to_python_what_the_size_means(size: Size, numbers: dict[str, int]) -> None:
    assert python(text(size), numbers) == python(spelled(size), numbers)


@given(sizes)
def test_names_are_the_dimensions_that_are_spelled(size: Size) -> None:
    assert names(size) == {name for name in DIMENSIONS if name in spelled(size)}


@given(sizes, values)
def test_linear_is_scale_times_dimension_plus_offset(size: Size, numbers: dict[str, int]) -> None:
    rule = linear(size)
    if rule is not None:
        name, scale, offset = rule
        assert scale > 0
        assert evaluate(size, numbers) == scale * numbers[name] + offset


@given(st.sampled_from(DIMENSIONS), st.integers(1, 9), whole, st.booleans(), st.booleans(), values)
def test_linear_finds_the_rule_on_whichever_side_the_numbers_stand(
    name: str, scale: int, offset: int, scale_first: bool, offset_first: bool, numbers: dict[str, int]
) -> None:
    product: Size = ("*", scale, name) if scale_first else ("*", name, scale)
    size: Size = ("+", offset, product) if offset_first else ("+", product, offset)
    assert linear(size) == (name, scale, offset)


@pytest.mark.parametrize(
    "size", [7, ("*", "batch", 0), ("*", "batch", -1), ("//", "batch", 2), ("%", "batch", 2), ("-", 5, "batch")]
)
def test_linear_refuses_what_cannot_be_solved(size: Size) -> None:
    assert linear(size) is None


def test_linear_refuses_a_product_of_two_dimensions() -> None:
    assert linear(("*", "batch", "seq")) is None
    assert linear(("+", "batch", "seq")) is None


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (64, "64"),
        ("batch", "batch"),
        (("+", ("*", "batch", 2), 1), "2*batch+1"),
        (("*", ("+", "batch", 1), 2), "2*(batch+1)"),
        (("//", "seq", 2), "seq//2"),
        (("-", "batch", ("-", "seq", 1)), "batch-(seq-1)"),
    ],
)
def test_text_is_what_a_person_would_write(size: Size, expected: str) -> None:
    assert text(size) == expected


def test_an_unknown_dimension_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        evaluate(("+", "batch", "width"), {"batch": 1})
