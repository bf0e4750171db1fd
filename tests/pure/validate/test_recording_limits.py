"""Both sides of the limits of a recording: the largest allowed number passes, and the next one is refused, in any row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cgbundle.format.table import Table
from cgbundle.validate.module_state import Address, Relocation, check_module_states
from cgbundle.validate.recordings import check_recording
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import EmptyNode, Function, KernelNode, Recording
from tests.helpers.bundles.recordings import (
    ARENA,
    FUNCTION,
    IMAGE,
    IMAGES,
    INPUTS,
    KERNEL,
    MEMCPY,
    MEMORIES,
    MEMSET,
    RECORDING_8,
    STATE,
    STATE_ROW,
    WEIGHTS,
    edge,
    with_kernel,
    with_node,
)
from tests.helpers.raising import raises

SMALL = Function(image=IMAGE, symbol="fill", params=((0, 4),), attributes=((8, 1),))
FILL = KernelNode(
    function=1, grid=(1, 2, 3), threads=(2, 3, 4), shared=0, block=bytes(4), relocations=(), undefined=((0, 1), (3, 1)),
    attributes=((2, (1, 0, 0)),),
)  # fmt: skip
MANY = Recording(
    key=(8, 64),
    functions=(FUNCTION, SMALL, replace(SMALL, symbol="last", attributes=((8, 1), (9, 2), (15, 1)))),
    nodes=(
        MEMSET,
        KERNEL,
        MEMCPY,
        EmptyNode(),
        FILL,
        replace(MEMSET, target=Address(memory=WEIGHTS, offset=512), element=4, width=5, height=2, pitch=24),
        replace(KERNEL, attributes=((2, (0, 0, 0)), (14, (1, 0, 0))), relocations=KERNEL.relocations[1:]),
        replace(MEMCPY, source=Address(memory=WEIGHTS, offset=1024), width=7, height=2, depth=3, source_pitch=9, source_height=3),
        replace(MEMSET, target=Address(memory=INPUTS, offset=0), element=1, width=3, height=1, pitch=0),
        replace(MEMCPY, target=Address(memory=WEIGHTS, offset=2048), width=3, height=1, depth=1),
        replace(FILL, function=2, attributes=()),
    ),
    edges=(),
)
"""Several different rows of every kind."""

KERNELS, MEMSETS, MEMCPYS = (1, 4, 6, 10), (0, 5, 8), (2, 7, 9)
"""Positions of these kinds."""


def passes(recording: Recording) -> None:
    check_recording(Table(tables.encode(recording), "g.bin"), MEMORIES, IMAGES)


def fails(recording: Recording, message: str, code: str = "table-invalid") -> None:
    with raises(code, match=message):
        passes(recording)


def changed(position: int, **changes: object) -> Recording:
    nodes = list(MANY.nodes)
    nodes[position] = replace(nodes[position], **changes)  # type: ignore[arg-type]
    return replace(MANY, nodes=tuple(nodes))


def test_rows_of_every_kind_pass_together() -> None:
    passes(MANY)


# --- a defect is found in whichever row it stands, and named there ---------------------------------------------------


@pytest.mark.parametrize("at", KERNELS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": (1, 0, 1)}, "grid"),
        ({"threads": (1, 1, 65)}, "threads"),
        ({"threads": (128, 9, 1)}, "threads"),
        ({"block": b"", "relocations": (), "undefined": ()}, "block"),
        ({"attributes": ((17, (0, 0, 0)),)}, "attributes"),
        ({"undefined": ((0, 99),)}, "undefined"),
    ],
)
def test_kernels(at: int, changes: dict[str, object], message: str) -> None:
    fails(changed(at, **changes), rf"nodes\[{at}\]\.{message}: ")


@pytest.mark.parametrize("at", KERNELS)
def test_relocations_of_kernels(at: int) -> None:
    far = Relocation(at=0, target=Address(memory=WEIGHTS, offset=4096))
    block = bytes(28)
    fails(changed(at, relocations=(far,), block=block, undefined=()), rf"nodes\[{at}\]\.relocations: ", "relocation-invalid")
    near = replace(far, target=Address(memory=WEIGHTS, offset=4095))
    passes(changed(at, relocations=(near,), block=block, undefined=()))
    fails(changed(at, relocations=(near,), block=b"\0" * 7 + b"\1" * 21, undefined=()), rf"nodes\[{at}\]\.block: ")


@pytest.mark.parametrize("at", MEMSETS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [({"element": 8}, "element: "), ({"width": 0}, "nothing to write"), ({"target": Address(memory=STATE, offset=0)}, "ends at")],
)
def test_memsets(at: int, changes: dict[str, object], message: str) -> None:
    fails(changed(at, **changes), rf"nodes\[{at}\].*{message}")


@pytest.mark.parametrize("at", MEMCPYS)
@pytest.mark.parametrize("end", ["source", "target"])
@pytest.mark.parametrize("what", ["place", "pitch", "slices"])
def test_memcpys(at: int, end: str, what: str) -> None:
    changes: dict[str, object] = {
        "place": {end: Address(memory=STATE, offset=0)},
        "pitch": {"height": 2, f"{end}_pitch": 2},
        "slices": {"depth": 2, "height": 2, f"{end}_height": 1},
    }[what]
    fails(changed(at, **changes), rf"nodes\[{at}\]\.{end}: ")


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": "00" * 32}, "image"),
        ({"symbol": ""}, "symbol"),
        ({"params": ((0, 4), (3, 1))}, "params"),
        ({"attributes": ((8, 1), (10, 1))}, "attributes"),
        ({"attributes": ((9, 1), (9, 1))}, "attributes"),
    ],
)
def test_functions(at: int, changes: dict[str, object], message: str) -> None:
    functions = list(MANY.functions)
    functions[at] = replace(functions[at], **changes)  # type: ignore[arg-type]
    fails(replace(MANY, functions=tuple(functions)), rf"functions\[{at}\]\.{message}: ")


# --- launches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("axis", "limit"), list(enumerate((2**31 - 1, 65535, 65535))))
def test_a_grid_is_as_large_as_cuda_allows(axis: int, limit: int) -> None:
    def grid(size: int) -> Recording:
        sizes = [1, 1, 1]
        sizes[axis] = size
        return with_kernel(grid=tuple(sizes))

    passes(grid(limit))
    for size in (limit + 1, 0):
        fails(grid(size), "grid")


@pytest.mark.parametrize(("axis", "limit"), list(enumerate((1024, 1024, 64))))
def test_a_block_is_as_large_as_cuda_allows(axis: int, limit: int) -> None:
    def threads(size: int) -> Recording:
        sizes = [1, 1, 1]
        sizes[axis] = size
        return with_kernel(threads=tuple(sizes))

    passes(threads(limit))
    for size in (limit + 1, 0):
        fails(threads(size), "threads: .* is not within")


def test_a_block_has_1024_threads_in_all() -> None:
    for sizes in ((32, 32, 1), (8, 8, 16), (1, 16, 64), (1024, 1, 1)):
        passes(with_kernel(threads=sizes))
    for sizes in ((32, 33, 1), (25, 41, 1), (2, 16, 64), (32, 8, 5), (1, 17, 64), (1024, 2, 1), (513, 1, 2)):
        fails(with_kernel(threads=sizes), "are more than 1024 in all")


def test_launch_attributes_are_those_that_can_be_set() -> None:
    known = (2, 4, 5, 8, 9, 10, 11, 14, 16)
    for number in range(20):
        recording = with_kernel(attributes=((number, (0, 0, 0)),))
        if number in known:
            passes(recording)
        else:
            fails(recording, f"attributes: {number} is none of")
    passes(with_kernel(attributes=tuple((number, (0, 0, 0)) for number in known)))
    fails(with_kernel(attributes=((4, (0, 0, 0)), (4, (0, 0, 0)))), "4 after 4")


def test_function_attributes_are_those_that_can_be_set() -> None:
    for number in range(18):
        recording = replace(RECORDING_8, functions=(replace(FUNCTION, attributes=((number, 0),)),))
        if number in (8, 9, 11, 12, 13, 14, 15):
            passes(recording)
        else:
            fails(recording, f"attributes: {number} is none of")


def test_the_values_of_attributes_are_words_with_or_without_a_sign() -> None:
    for place in range(3):
        for value, fits in ((-(2**31), True), (2**32 - 1, True), (-(2**31) - 1, False), (2**32, False)):
            values = [0, 0, 0]
            values[place] = value
            recording = with_kernel(attributes=((8, tuple(values)), (14, (5, 0, 0))))
            passes(recording) if fits else fails(recording, "more than 32 bits")


def test_parameters_lie_behind_each_other_and_inside_of_the_block() -> None:
    def function(*params: tuple[int, int], block: int = 24) -> Recording:
        kernel = with_kernel(block=bytes(block), relocations=(), undefined=(), attributes=())
        nodes = tuple([kernel.nodes[1] if isinstance(node, KernelNode) else node for node in kernel.nodes])
        return replace(kernel, functions=(replace(FUNCTION, params=params),), nodes=nodes)

    for params in ((), ((0, 24),), ((0, 8), (8, 16)), ((4, 4), (9, 1), (23, 1))):
        passes(function(*params))
    fails(function((0, 8), (7, 8)), "8 bytes at 7, expected some from byte 8 on")
    fails(function((0, 8), (8, 0)), "0 bytes at 8")
    fails(function((0, 25)), "24 bytes, the function's parameters end at 25")
    fails(function((0, 8), (8, 17)), "24 bytes, the function's parameters end at 25")


# --- parameter blocks ------------------------------------------------------------------------------------------------


def block(data: bytes, relocations: tuple[int, ...] = (), undefined: tuple[tuple[int, int], ...] = ()) -> Recording:
    target = Address(memory=ARENA, offset=0)
    return with_kernel(block=data, relocations=tuple([Relocation(at=at, target=target) for at in relocations]), undefined=undefined)


def test_relocations_touch_each_other_and_the_end() -> None:
    for places in ((0, 8), (3, 11), (20,), (0, 12, 20), (4, 12, 20)):
        passes(block(bytes(28), places))
    for places in ((21,), (0, 7), (0, 8, 15), (8, 8), (12, 4)):
        fails(block(bytes(28), places), "bytes at", "relocation-invalid")


@pytest.mark.parametrize("at", range(28))
def test_a_relocated_word_is_zero_to_its_last_byte(at: int) -> None:
    data = bytes(at) + b"\1" + bytes(27 - at)
    if 8 <= at < 16:
        fails(block(data, (8,)), "the relocated word at 8 is not zero")
    else:
        passes(block(data, (8,)))


@pytest.mark.parametrize("at", range(28))
def test_undefined_bytes_are_zero_to_the_last(at: int) -> None:
    data = bytes(at) + b"\1" + bytes(27 - at)
    if at in range(5, 8) or at in range(8, 12) or at == 27:
        fails(block(data, (), ((5, 3), (8, 4), (27, 1))), "are not zero")
    else:
        passes(block(data, (), ((5, 3), (8, 4), (27, 1))))


@pytest.mark.parametrize("size", [1, 2, 8, 9])
@pytest.mark.parametrize("at", range(20))
def test_undefined_bytes_lie_beside_relocations(at: int, size: int) -> None:
    data, places = bytes(40), (8, 24)
    if any(at < place + 8 and place < at + size for place in places):
        fails(block(data, places, ((at, size),)), f"the bytes at {at} hold a relocation")
    else:
        passes(block(data, places, ((at, size),)))


def test_undefined_ranges_touch_each_other_and_the_end() -> None:
    passes(block(bytes(28), (), ((0, 20), (20, 8))))
    for ranges in (((0, 20), (19, 1)), ((20, 9),), ((28, 1),), ((0, 0),), ((4, 4), (0, 4))):
        fails(block(bytes(28), (), ranges), "undefined: ")


def test_an_empty_memory_has_a_beginning_only() -> None:
    for memory, size in ((STATE, 0), (INPUTS, 512), (WEIGHTS, 4096), (ARENA, 8192)):
        place = Relocation(at=0, target=Address(memory=memory, offset=max(size - 1, 0)))
        passes(with_kernel(relocations=(place,)))
        place = Relocation(at=0, target=Address(memory=memory, offset=max(size, 1)))
        fails(with_kernel(relocations=(place,)), "relocations: ", "relocation-invalid")


# --- memsets and memcpys ---------------------------------------------------------------------------------------------


def test_a_memset_writes_elements_of_1_2_or_4_bytes() -> None:
    for element in range(10):
        recording = with_node(0, element=element)
        passes(recording) if element in (1, 2, 4) else fails(recording, "expected 1, 2 or 4")


@pytest.mark.parametrize(
    ("element", "width", "height", "pitch", "size"),
    [(1, 5, 1, 0, 5), (2, 5, 1, 3, 10), (4, 5, 2, 20, 40), (2, 10, 3, 64, 148), (4, 1, 4, 8, 28)],
)
def test_a_memset_ends_where_its_memory_ends(element: int, width: int, height: int, pitch: int, size: int) -> None:
    def ending(at: int) -> Recording:
        target = Address(memory=ARENA, offset=at - size)
        return with_node(0, element=element, width=width, height=height, pitch=pitch, target=target)

    passes(ending(8192))
    fails(ending(8193), "ends at byte 8193 of memory arena, which has 8192")


def test_the_rows_of_a_memset_lie_apart_and_aligned() -> None:
    passes(with_node(0, element=4, width=5, height=2, pitch=20))
    for pitch in (16, 19, 21, 22):
        fails(with_node(0, element=4, width=5, height=2, pitch=pitch), "pitch|bytes apart")
    for pitch in (0, 3, 21):
        passes(with_node(0, element=4, width=5, height=1, pitch=pitch))


@pytest.mark.parametrize(
    ("width", "height", "depth", "pitch", "rows", "size"),
    [
        (6, 1, 1, 0, 0, 6), (6, 1, 1, 99, 99, 6), (6, 3, 1, 6, 0, 18), (6, 3, 1, 10, 0, 26), (6, 3, 2, 10, 3, 56),
        (6, 3, 2, 10, 5, 76), (6, 1, 3, 6, 1, 18), (6, 1, 3, 7, 4, 62),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["source", "target"])
def test_a_memcpy_ends_where_its_memory_ends(
    end: str, width: int, height: int, depth: int, pitch: int, rows: int, size: int
) -> None:
    other = "target" if end == "source" else "source"

    def ending(at: int) -> Recording:
        return with_node(
            2,
            **{
                "width": width, "height": height, "depth": depth, f"{end}_pitch": pitch, f"{end}_height": rows,
                f"{other}_pitch": 6, f"{other}_height": 3, other: Address(memory=WEIGHTS, offset=0),
                end: Address(memory=INPUTS, offset=at - size),
            },
        )  # fmt: skip

    passes(ending(512))
    fails(ending(513), rf"{end}: ends at byte 513 of memory inputs, which has 512")


def test_rows_and_slices_of_a_memcpy_lie_apart() -> None:
    small = {"width": 6, "source_pitch": 6, "target_pitch": 6, "source_height": 3, "target_height": 3}
    passes(with_node(2, height=3, depth=2, **small))
    for changes in ({"source_pitch": 5}, {"target_pitch": 5}):
        for height, depth in ((3, 1), (1, 2), (3, 2)):
            fails(with_node(2, height=height, depth=depth, **{**small, **changes}), "rows 5 bytes apart, each of 6")
        passes(with_node(2, height=1, depth=1, **{**small, **changes}))
    for changes in ({"source_height": 2}, {"target_height": 2}):
        fails(with_node(2, height=3, depth=2, **{**small, **changes}), "slices 2 rows apart, each of 3")
        passes(with_node(2, height=3, depth=1, **{**small, **changes}))
        passes(with_node(2, height=2, depth=2, **{**small, **changes}))


@pytest.mark.parametrize("field", ["width", "height", "depth"])
def test_a_memcpy_of_nothing_is_refused(field: str) -> None:
    fails(with_node(2, **{field: 0}), "nothing to write")


# --- edges and module states -----------------------------------------------------------------------------------------


def test_edges_that_are_known() -> None:
    for arc in (edge(1, 4, 1, 0, 1), edge(1, 4, 2, 0, 1), edge(1, 2, 1), edge(1, 3, 2), edge(0, 1), edge(2, 0), edge(3, 4)):
        passes(replace(RECORDING_8, edges=(arc,)))
    passes(replace(RECORDING_8, edges=(edge(1, 4, 1, 0, 1), edge(1, 4, 2, 0, 1), edge(1, 4))))


@pytest.mark.parametrize(
    ("arc", "message"),
    [
        (edge(0, 1, 0, 1, 0), "to port 1"),
        (edge(1, 4, 1, 1, 1), "to port 1"),
        (edge(0, 1, 1, 0, 0), "from_port: 1 of a node of kind"),
        (edge(2, 3, 2, 0, 0), "from_port: 2 of a node of kind"),
        (edge(1, 4, 3, 0, 1), "from_port: 3"),
        (edge(1, 0, 1, 0, 1), "type: programmatic"),
        (edge(1, 3, 2, 0, 1), "type: programmatic"),
        (edge(0, 1, 0, 0, 1), "type: programmatic"),
        (edge(1, 4, 0, 0, 3), "type 3"),
    ],
)
def test_edges_that_are_not(arc: object, message: str) -> None:
    fails(replace(RECORDING_8, edges=(arc,)), message)  # type: ignore[arg-type]
    fails(replace(RECORDING_8, edges=(edge(0, 3), arc)), r"edges\[1\].*" + message)  # type: ignore[arg-type]


def test_module_states_are_told_apart_by_image_and_symbol() -> None:
    other = "cd" * 32

    def check(*rows: object) -> None:
        check_module_states(rows, "m.bin", MEMORIES, {IMAGE, other})  # type: ignore[arg-type]

    check(STATE_ROW, replace(STATE_ROW, image=other), replace(STATE_ROW, symbol="other"))
    for symbol in ("", "a\nb"):
        with raises("table-invalid", match=r"states\[1\].symbol"):
            check(STATE_ROW, replace(STATE_ROW, symbol=symbol))
    with raises("table-invalid", match=r"states\[2\].symbol"):
        check(STATE_ROW, replace(STATE_ROW, image=other), replace(STATE_ROW, image=other))


@pytest.mark.parametrize(("memory", "size"), [(WEIGHTS, 4096), (STATE, 0), (INPUTS, 512), (ARENA, 8192)])
def test_module_states_point_inside_of_memories(memory: int, size: int) -> None:
    def pointing(offset: int) -> None:
        inside = Relocation(at=0, target=Address(memory=ARENA, offset=0))
        row = replace(STATE_ROW, relocations=(inside, Relocation(at=8, target=Address(memory=memory, offset=offset))))
        check_module_states([STATE_ROW, replace(row, symbol="second")], "m.bin", MEMORIES, IMAGES)

    pointing(max(size - 1, 0))
    with raises("table-invalid", match=r"states\[1\].relocations: the word at 8 points at byte"):
        pointing(max(size, 1))


def test_every_block_may_be_too_large() -> None:
    """Blocks that are all equally too large must be refused, too."""
    kernels = tuple([replace(node, threads=(1024, 2, 1)) for node in MANY.nodes if isinstance(node, KernelNode)])
    fails(replace(MANY, nodes=kernels), "are more than 1024")
