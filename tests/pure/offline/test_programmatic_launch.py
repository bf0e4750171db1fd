"""Kernels that start before the previous one has ended: which kernels do so, and which loads they make before the wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cgcompile.offline.compile.programmatic_launch import BEGIN_NEXT, WAIT, begin_early
from cgcompile.offline.lowered import (
    INPUT,
    TEMPORARY,
    WEIGHT,
    Allocate,
    Begin,
    Buffer,
    Copy,
    End,
    Event,
    Fill,
    HostRead,
    KernelVariant,
    Launch,
    Lowered,
    LoweredProgram,
    NextBody,
    Pointer,
    RegionEvents,
    Release,
    SetCondition,
)

PRODUCT = """
def product(x, w, bias, out, n, BLOCK: tl.constexpr):
    n = 768
    row = tl.program_id(0)
    at: tl.constexpr = tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(x + at, inside, other=0.0).to(tl.float32)
    b = tl.load(w + (at + n * row), inside, other=0.0).to(tl.float32)
    c = tl.load(bias + row)
    which = tl.load(x + n)
    d = tl.load(w + which)
    total = tl.sum(a * b, 0)
    tl.store(out + row, total + c + d)
"""

SIGNATURE = (("x", "*fp32"), ("w", "*fp32"), ("bias", "*fp32"), ("out", "*fp32"), ("n", "i32"), ("BLOCK", "constexpr"))

X, W, BIAS, OUT, STATE = range(5)
BUFFERS = (
    Buffer(kind=INPUT, name="0", nbytes=64),
    Buffer(kind=WEIGHT, name="w", nbytes=64),
    Buffer(kind=WEIGHT, name="bias", nbytes=64),
    Buffer(kind=TEMPORARY, name="out", nbytes=64),
    Buffer(kind=WEIGHT, name="state", nbytes=64),
)


def kernel(
    source: str = PRODUCT, name: str = "product", signature: Sequence[tuple[str, str]] = SIGNATURE, **options: Any
) -> KernelVariant:
    return KernelVariant(
        name=name, source=source.lstrip(), signature=tuple(signature), constants=(("BLOCK", 8),), divisible=(), warps=4, stages=1,
        options=tuple(options.items()), selected_by="only",
    )  # fmt: skip


def at(buffer: int) -> Pointer:
    return Pointer(buffer=buffer, offset=0)


def launch(*buffers: int, variant: int = 0, grid: tuple[int, int, int] = (2, 1, 1)) -> Launch:
    return Launch(variant=variant, grid=grid, arguments=(*[at(buffer) for buffer in buffers], 768))


USUAL = launch(X, W, BIAS, OUT)


def program(
    events: Iterable[Event], *variants: KernelVariant, cuts: Sequence[int] = (), written: Sequence[int] = ()
) -> LoweredProgram:
    events = tuple(events)
    lowered = Lowered(
        key=(1,), buffers=BUFFERS, variants=variants or (kernel(),), events=events, inputs=(), outputs=(), written=tuple(written)
    )
    bounds = [0, *cuts, len(events)]
    regions = [
        RegionEvents(name=f"g{number}", start=start, stop=stop, inputs=(), outputs=())
        for number, (start, stop) in enumerate(pairwise(bounds))
    ]
    return LoweredProgram(lowered=lowered, regions=tuple(regions))


def parts(program: LoweredProgram) -> str:
    """Returns a letter for every launch: "w" if it waits, "b" if it lets the next one start, "x" for both, "." for neither."""
    letters = ""
    for event in program.lowered.events:
        if isinstance(event, Launch):
            variant = program.lowered.variants[event.variant]
            assert (BEGIN_NEXT in variant.source) == variant.begins_next
            letters += ".wbx"[(WAIT in variant.source) + 2 * variant.begins_next]
    return letters


def lines(program: LoweredProgram, number: int) -> tuple[list[str], list[str]]:
    """Returns the lines of a launch's kernel before the wait, and those after it."""
    launches = [event for event in program.lowered.events if isinstance(event, Launch)]
    body = [line.strip() for line in program.lowered.variants[launches[number].variant].source.splitlines()[1:]]
    return body[: body.index(WAIT)], body[body.index(WAIT) + 1 :]


def test_weights_are_read_before_the_wait_and_all_else_behind_it() -> None:
    before, behind = lines(begin_early(program([USUAL, launch(OUT, W, BIAS, OUT), USUAL])), 1)
    assert before == [
        "n = 768",
        "row = tl.program_id(0)",
        "at: tl.constexpr = tl.arange(0, BLOCK)",
        "inside = at < n",
        "b = tl.load(w + (at + n * row), inside, other=0.0).to(tl.float32)",
        "c = tl.load(bias + row)",
        BEGIN_NEXT,
    ]
    assert behind == [
        "a = tl.load(x + at, inside, other=0.0).to(tl.float32)",
        "which = tl.load(x + n)",
        "d = tl.load(w + which)",
        "total = tl.sum(a * b, 0)",
        "tl.store(out + row, total + c + d)",
    ]


def early(program: LoweredProgram, number: int) -> str:
    """Returns the names that a launch's kernel reads before its wait."""
    return " ".join(line.split(" ")[0] for line in lines(program, number)[0] if "tl.load" in line)


READING = launch(X, W, BIAS, OUT)
CHANGING = launch(X, W, OUT, STATE)  # reads `out`, writes to state


def test_what_the_chain_writes_to_is_read_behind_the_wait() -> None:
    assert early(begin_early(program([READING, launch(OUT, STATE, BIAS, X)], written=[X, STATE])), 1) == "b c"
    assert early(begin_early(program([READING, launch(OUT, OUT, BIAS, X)], written=[X, STATE])), 1) == "c"
    assert early(begin_early(program([CHANGING, launch(OUT, STATE, BIAS, OUT)], written=[STATE])), 1) == "a c which"


def test_what_was_written_before_the_chain_is_read_early() -> None:
    copy = Copy(source=at(X), target=at(W), nbytes=4)
    events = [CHANGING, copy, READING, launch(OUT, STATE, BIAS, X)]
    assert early(begin_early(program(events, written=[X, STATE])), 2) == "b c"
    assert early(begin_early(program([CHANGING, *events[2:]], written=[X, STATE])), 2) == "c"


def test_a_kernel_may_write_to_what_it_hands_on() -> None:
    for text in ("tl.atomic_add(bias + row, 1.0)", "c += helper(bias)", "where = bias + row", "c += tl.load(helper(bias))"):
        other = replace(kernel(PRODUCT.replace("    total =", f"    {text}\n    total =")), name="product")
        events = [replace(READING, variant=1), launch(X, BIAS, W, OUT)]
        assert early(begin_early(program(events, kernel(), other, written=[BIAS])), 1) == "a c which", text
        assert early(begin_early(program(events, kernel(), other)), 1) == "a b c which d", text


def test_what_a_chain_writes_to_before_one_launch_is_late_in_all() -> None:
    before, behind = lines(begin_early(program([USUAL, USUAL, launch(X, W, OUT, OUT), USUAL])), 1)
    assert "b = tl.load(w + (at + n * row), inside, other=0.0).to(tl.float32)" in before
    assert "c = tl.load(bias + row)" in behind


NOTHING = [
    Allocate(buffer=OUT),
    Release(buffer=OUT),
    Copy(source=at(X), target=at(OUT), nbytes=0),
    Fill(target=at(OUT), value=0, element=4, count=0),
]
NODES = [
    Copy(source=at(X), target=at(OUT), nbytes=4),
    Fill(target=at(OUT), value=0, element=4, count=1),
    HostRead(buffer=OUT),
    Begin(conditional=0, type="while"),
]


def test_a_chain_has_a_first_kernel_and_a_last_one() -> None:
    assert parts(begin_early(program([USUAL]))) == "."
    assert parts(begin_early(program([USUAL] * 4))) == "bxxw"
    assert parts(begin_early(program([USUAL] * 4, cuts=[2]))) == "bwbw"


@pytest.mark.parametrize("event", NOTHING, ids=lambda event: type(event).__name__)
def test_what_is_no_node_does_not_end_a_chain(event: Event) -> None:
    assert parts(begin_early(program([USUAL, event, USUAL]))) == "bw"
    assert parts(begin_early(program([USUAL, launch(X, W, BIAS, OUT, grid=(0, 1, 1)), USUAL]))) == "b.w"


@pytest.mark.parametrize("event", NODES, ids=lambda event: type(event).__name__)
def test_a_node_that_cannot_wait_ends_a_chain(event: Event) -> None:
    end = [End(conditional=0)] if isinstance(event, Begin) else []
    assert parts(begin_early(program([USUAL, USUAL, event, *end, USUAL, USUAL]))) == "bwbw"


def test_the_kernel_that_sets_a_condition_waits() -> None:
    body = [
        Begin(conditional=0, type="while"),
        USUAL,
        USUAL,
        SetCondition(byte=at(OUT), conditional=0),
        NextBody(conditional=0),
        USUAL,
        End(conditional=0),
        USUAL,
    ]
    assert parts(begin_early(program([USUAL, SetCondition(byte=at(OUT), conditional=0), *body]))) == "bbx.."


@pytest.mark.parametrize(
    "other",
    [
        kernel(launch_cooperative_grid=True),
        kernel(num_ctas=2),
        kernel(PRODUCT.replace("    n = 768\n", "    tl.extra.cuda.gdc_wait()\n")),
        kernel("def product(x, w, bias, out, n, BLOCK): tl.store(out, 1.0)\n"),
        kernel(PRODUCT.replace("    n = 768\n", "    n = 768; n = 769\n")),
    ],
    ids=["cooperative", "cluster", "waits by itself", "one line", "two statements in a line"],
)
def test_a_kernel_that_has_to_stay_as_it_is_ends_a_chain(other: KernelVariant) -> None:
    original = program([USUAL, USUAL, replace(USUAL, variant=1), USUAL, USUAL], kernel(), other)
    pdl = begin_early(original)
    assert parts(replace(pdl, lowered=replace(pdl.lowered, events=pdl.lowered.events[:2] + pdl.lowered.events[3:]))) == "bwbw"
    assert pdl.lowered.variants[pdl.lowered.events[2].variant] == other  # type: ignore[union-attr]


def test_a_product_on_tensor_cores_lets_the_next_begin_and_does_not_begin_early() -> None:
    other = kernel(PRODUCT.replace("    total = ", "    c += tl.dot(a, b)\n    total = "))
    product = replace(USUAL, variant=1)
    pdl = begin_early(program([USUAL, USUAL, product, USUAL, product, product, USUAL], kernel(), other))
    assert parts(pdl) == "bwbw.bw"


def test_what_a_product_on_tensor_cores_writes_to_is_read_late() -> None:
    other = kernel(PRODUCT.replace("    total = ", "    c += tl.dot(a, b)\n    total = "))
    events = [launch(X, W, BIAS, STATE), replace(launch(X, W, BIAS, OUT), variant=1), launch(OUT, STATE, BIAS, X)]
    assert early(begin_early(program(events, kernel(), other, written=[X, STATE])), 2) == "b c"


def test_everything_but_the_texts_and_their_numbers_stays() -> None:
    original = program([Allocate(buffer=OUT), USUAL, USUAL, Release(buffer=OUT)], cuts=[1])
    pdl = begin_early(original)
    assert pdl.regions == original.regions
    assert [replace(event, variant=0) if isinstance(event, Launch) else event for event in pdl.lowered.events] == list(
        original.lowered.events
    )
    for variant in pdl.lowered.variants:
        plain = [line for line in variant.source.splitlines() if line.strip() not in (WAIT, BEGIN_NEXT)]
        assert sorted(plain) == sorted(kernel().source.splitlines())


NAMES = ["a", "b", "c", "n"]


@st.composite
def statements(draw: st.DrawFn) -> str:
    """Draws the body of a kernel: loads, sums and stores. Some names are read and then assigned again."""
    known, body = ["n", "p"], []
    for _ in range(draw(st.integers(1, 9))):
        index, target = draw(st.sampled_from(known)), draw(st.sampled_from(NAMES))
        text = draw(
            st.sampled_from([
                f"{target} = tl.load(w + {index} % 7)",
                f"{target} = tl.load(x + {index} % 7)",
                f"{target} = {index} + {draw(st.sampled_from(known))}",
                f"{target} = tl.program_id(0)",
                f"{target} = tl.where({index} > 3, 1, {index})",
                f"tl.store(out + {index} % 7, {draw(st.sampled_from(known))})",
                f"if {index} > 3:\n        {target if target in known else 'n'} = 5",
            ])
        )  # fmt: skip
        body.append(text)
        if text.startswith(f"{target} ="):
            known.append(target)
    return "\n".join(["def drawn(x, w, out, n, p):", *["    " + line for line in [*body, f"tl.store(out, {known[-1]})"]], ""])


def ran(source: str, late: bool) -> list[int]:
    """Returns what a kernel writes. The previous kernel writes `x` and `out` during this kernel's wait (`late`), or before its
    start."""
    memory = {"x": [0] * 8, "w": [3, 1, 4, 1, 5, 9, 2, 6], "out": [0] * 8}

    def earlier() -> None:
        memory["x"], memory["out"] = [2, 7, 1, 8, 2, 8, 1, 8], [5] * 8

    class Place(SimpleNamespace):
        def __add__(self, number: int) -> Place:
            return Place(name=self.name, at=self.at + number)

    def store(place: Place, value: int) -> None:
        memory[place.name][place.at] = value

    cuda = SimpleNamespace(gdc_wait=lambda: earlier() if late else None, gdc_launch_dependents=lambda: None)
    scope: dict[str, Any] = {
        "tl": SimpleNamespace(
            load=lambda place: memory[place.name][place.at], store=store, program_id=lambda _: 4,
            where=lambda condition, a, b: a if condition else b, extra=SimpleNamespace(cuda=cuda),
        )
    }  # fmt: skip
    exec(source, scope)
    if not late:
        earlier()
    scope["drawn"](*[Place(name=name, at=0) for name in ("x", "w", "out")], 6, 2)
    return memory["out"]


@settings(max_examples=300)
@given(statements())
@example("def drawn(x, w, out, n, p):\n    c = tl.load(x + n % 7) + n\n    n = tl.program_id(0)\n    tl.store(out, c + n)\n")
def test_a_kernel_that_begins_early_writes_the_same(source: str) -> None:
    signature = (("x", "*i32"), ("w", "*i32"), ("out", "*i32"), ("n", "i32"), ("p", "i32"))
    events = [Launch(variant=0, grid=(1, 1, 1), arguments=(at(a), at(W), at(b), 6, 2)) for a, b in ((OUT, X), (X, OUT))]
    pdl = begin_early(program(events, kernel(source, "drawn", signature), written=[X]))
    assert parts(pdl) == "bw"
    last = pdl.lowered.variants[pdl.lowered.events[1].variant]  # type: ignore[union-attr]
    assert ran(last.source, late=True) == ran(source, late=False)
