"""No value is overwritten before its last read. The check walks through memory; here it is compared with a comparison of all pairs
of values."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgbundle.errors import BundleError
from cgbundle.format.schema import Program, Step, Value
from cgbundle.format.shapes import Spans, span
from cgbundle.validate.programs import check_lifetimes
from tests.helpers.frugal import cost
from tests.helpers.raising import raises

places = st.tuples(st.sampled_from(["arena", "inputs"]), st.integers(0, 12), st.integers(0, 6))


def value(memory: str, begin: int, size: int) -> Value:
    return Value(dtype="uint8", shape=(size,), strides=(1,), memory=memory, offset=begin)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draws steps that write each value once, at random places."""
    rows = draw(st.lists(places, min_size=1, max_size=9))
    writers = [draw(st.integers(-1, 4)) for _ in rows]  # -1: an input of the call
    readers = [draw(st.lists(st.integers(0, 5), max_size=2)) for _ in rows]
    steps = tuple(
        [
            Step(
                kind=draw(st.sampled_from(["graph", "host"])),
                region=0,
                file="",
                inputs=tuple([index for index, read in enumerate(readers) if number in read and writers[index] < number]),
                outputs=tuple([index for index, writer in enumerate(writers) if writer == number]),
            )
            for number in range(5)
        ]
    )
    outputs = tuple([index for index, read in enumerate(readers) if 5 in read])
    return Program(key=(), values=tuple([value(*row) for row in rows]), inputs=(), outputs=outputs, steps=steps, arena=0, static=0)


def overlap(one: Value, other: Value) -> bool:
    """Returns whether two values share a byte."""
    apart = one.offset + span(one) <= other.offset or other.offset + span(other) <= one.offset
    return one.memory == other.memory and bool(span(one) and span(other)) and not apart


def is_sound(program: Program) -> bool:
    """Returns whether no pair of values breaks the rule."""
    values = program.values
    last = {index: number for number, step in enumerate(program.steps) for index in step.inputs}
    last |= dict.fromkeys(program.outputs, len(program.steps))
    for number, step in enumerate(program.steps):
        earlier = [index for step in program.steps[:number] for index in step.outputs if last.get(index, -1) > number]
        operands = [] if step.kind == "graph" else [*step.inputs, *step.outputs]
        for index in step.outputs:
            if any(other != index and overlap(values[index], values[other]) for other in (*earlier, *operands)):
                return False
    return True


@settings(max_examples=400, deadline=None)
@given(programs())
def test_it_finds_what_comparing_all_pairs_does(program: Program) -> None:
    try:
        check_lifetimes(program, "p")
        accepted = True
    except BundleError as error:
        assert error.code == "manifest-invalid"
        accepted = False
    assert accepted == is_sound(program)


@pytest.mark.parametrize("begin", [0, 2], ids=["before", "behind"])
def test_the_message_names_the_two_values(begin: int) -> None:
    """Step 1 overwrites its own input (allowed), step 2 a value that step 3 reads. `begin`: the offset of step 1's value."""
    steps = [Step(kind="graph", region=0, file="", inputs=inputs, outputs=(index,)) for index, inputs in enumerate([(), (0,), ()])]
    steps.append(Step(kind="graph", region=0, file="", inputs=(1, 2), outputs=()))
    values = (value("arena", 0, 4), value("arena", begin, 4), value("arena", 0, 4))
    program = Program(key=(), values=values, inputs=(), outputs=(), steps=tuple(steps), arena=8, static=0)
    with raises("manifest-invalid", match=r"^p.steps\[2\]: writes value 2 over value 1, which steps\[3\] reads$"):
        check_lifetimes(program, "p")


def test_the_message_names_the_two_values_of_a_step() -> None:
    step = Step(kind="host", region=0, file="", inputs=(), outputs=(0, 1))
    values = (value("arena", 0, 4), value("arena", 3, 4))
    program = Program(key=(), values=values, inputs=(), outputs=(), steps=(step,), arena=8, static=0)
    with raises("manifest-invalid", match=r"^p.steps\[0\]: value 1, an output, lies over value 0 of this step$"):
        check_lifetimes(program, "p")


@given(st.lists(places, max_size=8), places)
def test_a_piece_is_found_among_others(rows: list[tuple[str, int, int]], asked: tuple[str, int, int]) -> None:
    spans = Spans((memory, begin, begin + size, number) for number, (memory, begin, size) in enumerate(rows))
    memory, begin, size = asked
    piece_number = spans.over(memory, begin, begin + size)
    over = [number for number, row in enumerate(rows) if overlap(value(*row), value(*asked))]
    assert (piece_number in over) if over else piece_number is None


def test_many_values_that_all_live_to_the_end_are_checked_in_little_time() -> None:
    """A quadratic check would take half a minute."""
    count = 8000
    values = tuple([value("arena", 16 * index, 16) for index in range(count)])
    steps = tuple([Step(kind="host", region=0, file="", inputs=(), outputs=(index,)) for index in range(count)])
    program = Program(key=(), values=values, inputs=(), outputs=tuple(range(count)), steps=steps, arena=0, static=0)

    def work() -> str:
        check_lifetimes(program, "p")
        return "sound"

    verdict, seconds, _ = cost(work)
    assert verdict == "sound" and seconds < 2, (verdict, seconds)
