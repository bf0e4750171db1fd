"""Lifetimes over the steps of a program: no value is overwritten before its last read, and a planted overlap is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle.errors import BundleError
from cgbundle.format.schema import Program, Step, Value
from cgbundle.format.shapes import Spans, span
from cgbundle.format.table import Table
from cgbundle.validate.contents import check_tables
from cgbundle.validate.programs import check_lifetimes, check_order, check_overwrites
from cgcompile.bundle import recordings as tables
from tests.helpers.bundles import cuda_bundles
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.edits import edited
from tests.helpers.raising import raises


def value(memory: str, offset: int, words: int = 8) -> Value:
    return Value(dtype="float32", shape=(words,), strides=(1,), memory=memory, offset=offset)


def step(kind: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Step:
    return Step(kind=kind, region=0, file="", inputs=inputs, outputs=outputs)


def program(values: list[Value], steps: list[Step], outputs: tuple[int, ...], inputs: tuple[int, ...] = (0,)) -> Program:
    return Program(key=(), values=tuple(values), inputs=inputs, outputs=outputs, steps=tuple(steps), arena=0, static=0)


def chain() -> Program:
    """Returns x (0) -> graph -> 1, 2; 1 -> copy -> 3 -> host -> 4 -> copy -> 5; 2, 5 -> graph -> 6, the output."""
    return program(
        [value("inputs", 0), value("arena", 0), value("arena", 32), value("host", 0), value("host", 32), value("arena", 64),
         value("arena", 96)],
        [step("graph", (0,), (1, 2)), step("copy", (1,), (3,)), step("host", (3,), (4,)), step("copy", (4,), (5,)),
         step("graph", (2, 5), (6,))],
        (6,),
    )  # fmt: skip


def moved(program: Program, index: int, **changes: object) -> Program:
    values = list(program.values)
    values[index] = replace(values[index], **changes)  # type: ignore[arg-type]
    return replace(program, values=tuple(values))


def test_a_chain_is_sound() -> None:
    check_order(chain(), "p")
    check_lifetimes(chain(), "p")


@pytest.mark.parametrize(
    ("index", "offset", "message"),
    [
        (5, 32, r"p\.steps\[3\]: writes value 5 over value 2, which steps\[4\] reads"),
        (5, 4, r"p\.steps\[3\]: writes value 5 over value 2, which steps\[4\] reads"),
        (5, 63, r"p\.steps\[3\]: writes value 5 over value 2, which steps\[4\] reads"),
        (4, 28, r"p\.steps\[2\]: value 4, an output, lies over value 3 of this step"),
    ],
)
def test_a_planted_overlap_is_caught(index: int, offset: int, message: str) -> None:
    with raises("manifest-invalid", match=message):
        check_lifetimes(moved(chain(), index, offset=offset), "p")


def test_what_is_dead_may_be_written_over() -> None:
    check_lifetimes(moved(chain(), 5, offset=0), "p")  # value 1 is not needed any more: the copy before was its last reader
    check_lifetimes(moved(chain(), 6, offset=32), "p")  # a graph step may overwrite its own input: the recording orders its nodes


def test_a_gap_between_rows_belongs_to_the_value() -> None:
    program = moved(chain(), 2, shape=(2, 1), strides=(16, 1))
    with raises("manifest-invalid", match="writes value 5 over value 2"):
        check_lifetimes(program, "p")


def test_an_output_of_the_call_lives_to_the_end() -> None:
    program = replace(chain(), outputs=(1, 6))
    check_lifetimes(program, "p")
    with raises("manifest-invalid", match=r"p\.steps\[4\]: writes value 6 over value 1, which is an output of the call"):
        check_lifetimes(moved(program, 6, offset=16), "p")


def test_what_nobody_reads_still_writes() -> None:
    base = chain()
    base = replace(base, values=(*base.values, value("arena", 32)), steps=(*base.steps[:4], replace(base.steps[4], outputs=(6,))))
    unread = step("copy", (4,), (7,))
    base = replace(base, steps=(*base.steps[:4], unread, base.steps[4]))
    with raises("manifest-invalid", match=r"p\.steps\[4\]: writes value 7 over value 2, which steps\[5\] reads"):
        check_lifetimes(base, "p")


def test_views_of_one_tensor_among_the_outputs_of_a_graph() -> None:
    check_lifetimes(moved(chain(), 2, offset=16), "p")


def test_outputs_of_a_host_step_lie_apart() -> None:
    plan = program(
        [value("inputs", 0), value("host", 0), value("host", 32), value("host", 48), value("arena", 0), value("arena", 32)],
        [step("copy", (0,), (1,)), step("host", (1,), (2, 3)), step("copy", (2,), (4,)), step("copy", (3,), (5,))],
        (4, 5),
    )
    with raises("manifest-invalid", match=r"p\.steps\[1\]: value 3, an output, lies over value 2 of this step"):
        check_lifetimes(plan, "p")
    check_lifetimes(moved(plan, 3, offset=64), "p")


def test_a_tensor_without_elements_lies_nowhere() -> None:
    program = moved(chain(), 5, offset=32, shape=(0,))
    assert span(program.values[5]) == 0
    check_lifetimes(program, "p")


def test_the_same_place_of_another_memory_is_another_place() -> None:
    spans = Spans([("arena", 0, 32, 7)])
    assert (spans.over("arena", 31, 35), spans.over("arena", 32, 36), spans.over("host", 0, 32)) == (7, None, None)


# --- recordings -------------------------------------------------------------------------------------------------------


def kept_beside(offset: int) -> Program:
    """Returns x -> copy -> 1; the recording of `cuda_bundles` on x gives 2; 1 -> copy -> 3. Value 1 is at `offset` of the arena."""
    return program(
        [
            value("inputs", 0),
            value("arena", offset),
            value("arena", cuda_bundles.RESULT, 64),
            value("arena", 3072),
        ],
        [step("copy", (0,), (1,)), step("graph", (0,), (2,)), step("copy", (1,), (3,))],
        (2, 3),
    )


@pytest.fixture(scope="module")
def table() -> Table:
    return Table(tables.encode(cuda_bundles.recording("ab" * 32, 4)), "g.bin")


def test_a_recording_beside_a_value_that_lives_on(table: Table) -> None:
    check_overwrites(kept_beside(cuda_bundles.OUTPUT), 1, table)
    check_overwrites(kept_beside(cuda_bundles.SUM + 256), 1, table)  # the tensor of the recording ends there


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (cuda_bundles.SUM, r"^g\.bin: a node uses value 1, which steps\[2\] reads, and the step does not name it"),
        (cuda_bundles.SUM - 28, r"^g\.bin: a node uses value 1, which steps\[2\] reads"),
        (cuda_bundles.ONE, r"^g\.bin: a node writes over value 1, which steps\[2\] reads"),
        (cuda_bundles.ONE + 252, r"^g\.bin: a node writes over value 1, which steps\[2\] reads"),
        (cuda_bundles.TWO + 252, r"^g\.bin: a node writes over value 1, which steps\[2\] reads"),
    ],
    ids=["argument", "argument-inside", "memset", "memset-end", "memcpy-end"],
)
def test_a_recording_over_a_value_that_lives_on(table: Table, offset: int, message: str) -> None:
    with raises("table-invalid", match=message):
        check_overwrites(kept_beside(offset), 1, table)
    dead = kept_beside(offset)
    check_overwrites(replace(dead, steps=dead.steps[:2], outputs=(2,)), 1, table)


def test_a_recording_may_read_what_its_step_names(table: Table) -> None:
    program = kept_beside(cuda_bundles.SUM)
    named = replace(program, steps=(program.steps[0], step("graph", (0, 1), (2,)), program.steps[2]))
    check_overwrites(named, 1, table)
    filled = moved(named, 1, offset=cuda_bundles.ONE)
    with raises("table-invalid", match="a node writes over value 1"):
        check_overwrites(filled, 1, table)


def test_a_bundle_with_such_a_recording_is_refused(tmp_path: Path) -> None:
    manifest = cuda_bundles.write(tmp_path, b"an image")
    row = manifest.entries[0].programs[0]
    kept = kept_beside(cuda_bundles.SUM)
    steps = (kept.steps[0], replace(kept.steps[1], file=row.steps[0].file), kept.steps[2])
    broken = edited(manifest, programs=(replace(kept, key=row.key, steps=steps),))
    with raises("table-invalid", match=r"^graphs/g0-4\.bin: a node uses value 1"):
        check_tables(ArchiveOf(tmp_path, broken))


def test_state_and_weights_need_no_writer() -> None:
    plan = program([value("state", 0), value("weights", 0), value("arena", 0)], [step("graph", (0, 1), (2,))], (2, 1), inputs=())
    check_order(plan, "p")


@given(st.data())
def test_caught_exactly_where_a_later_read_finds_other_data(data: st.DataObject) -> None:
    """The check is compared with a run of copy steps on a small memory: a program is valid only if every read finds the bytes of
    its value."""
    count = data.draw(st.integers(1, 6))
    places = data.draw(st.lists(st.integers(0, 12), min_size=count, max_size=count))
    words = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    values = [
        Value(dtype="uint8", shape=(size,), strides=(1,), memory="arena", offset=at) for at, size in zip(places, words, strict=True)
    ]
    reads = [
        data.draw(st.lists(st.integers(0, stop - 1), unique=True, max_size=stop) if stop else st.just([])) for stop in range(count)
    ]
    steps = [step("host", tuple(reads[index]), (index,)) for index in range(count)]
    outputs = tuple(data.draw(st.lists(st.integers(0, count - 1), unique=True)))
    plan = program(values, steps, outputs, inputs=())
    check_order(plan, "p")

    memory: list[int | None] = [None] * 16
    sound = True
    for index, host_step in enumerate(steps):
        here = range(places[index], places[index] + words[index])
        for read in host_step.inputs:
            span = range(places[read], places[read] + words[read])
            sound &= all(memory[at] == read for at in span) and not set(span) & set(here)
        for at in here:
            memory[at] = index
    for read in outputs:
        sound &= all(memory[at] == read for at in range(places[read], places[read] + words[read]))
    try:
        check_lifetimes(plan, "p")
    except BundleError:
        assert not sound
    else:
        assert sound


def test_a_copy_gives_a_changed_input_its_new_value() -> None:
    """x (0) -> copy -> 1 -> host -> 2 -> copy -> 3, at the place of x."""
    values = [value("inputs", 0), value("host", 0), value("host", 32), value("inputs", 0), value("arena", 0)]
    steps = [step("copy", (0,), (1,)), step("host", (1,), (2,)), step("copy", (2,), (3,))]
    plan = program(values, steps, (3,))
    check_order(plan, "p", changed=(0,))
    check_lifetimes(plan, "p")
    with raises("manifest-invalid", match="copies over value 0, an input of the call"):
        check_order(plan, "p")
    with raises("manifest-invalid", match="copies over value 0, an input of the call"):
        check_order(moved(plan, 3, shape=(4,)), "p", changed=(0,))
    late = replace(plan, steps=(*steps, step("graph", (0,), (4,))))
    with raises("manifest-invalid", match=r"steps\[3\]: reads value 0, which an earlier step has written over"):
        check_order(late, "p", changed=(0,))
