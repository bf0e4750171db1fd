"""One test for each defect of a recording or a module state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cgbundle.format.table import Table
from cgbundle.validate.module_state import Address, ModuleState, Relocation, check_module_states, decode_states
from cgbundle.validate.recordings import check_recording
from cgcompile.bundle import recordings as tables
from cgcompile.bundle.recordings import Edge, Recording, encode_states
from tests.helpers.bundles.recordings import (
    ARENA,
    FUNCTION,
    HOST,
    IMAGES,
    INPUTS,
    MEMORIES,
    RECORDING_8,
    STATE,
    STATE_ROW,
    WHERE,
    edge,
    with_kernel,
    with_node,
)
from tests.helpers.raising import raises


def check(recording: Recording) -> None:
    check_recording(Table(tables.encode(recording), WHERE), MEMORIES, IMAGES)


def reject(recording: Recording, message: str, code: str = "table-invalid") -> None:
    with raises(code, match=message) as caught:
        check(recording)
    assert str(caught.value).startswith(f"{WHERE}: ") and "\n" not in str(caught.value)


def test_a_sound_recording_passes() -> None:
    check(RECORDING_8)
    check(Recording(key=(), functions=(), nodes=(), edges=()))


def test_a_relocation_into_an_empty_memory_is_its_start() -> None:
    def pointing(offset: int) -> Recording:
        return with_kernel(relocations=(Relocation(at=0, target=Address(memory=STATE, offset=offset)),))

    check(pointing(0))
    reject(
        pointing(1), r"nodes\[1\].relocations: the word at 0 points at byte 1 of memory state, which has 0", "relocation-invalid"
    )


@pytest.mark.parametrize(
    ("recording", "message"),
    [
        (with_kernel(grid=(0, 1, 1)), r"nodes\[1\].grid: \(0, 1, 1\)"),
        (with_kernel(grid=(1, 65536, 1)), r"nodes\[1\].grid"),
        (with_kernel(threads=(1025, 1, 1)), r"nodes\[1\].threads"),
        (with_kernel(threads=(32, 32, 2)), r"nodes\[1\].threads: .* are more than 1024 in all"),
        (with_kernel(block=bytes(19), undefined=()), r"nodes\[1\].block: 19 bytes, the function's parameters end at 20"),
        (with_kernel(function=1), r"nodes.function: 1 is not below 1"),
        (with_kernel(attributes=((1, (0, 0, 0)),)), r"nodes\[1\].attributes: 1 is none of"),
        (with_kernel(attributes=((14, (2**32, 0, 0)),)), "nodes.attributes: .* more than 32 bits"),
        (with_kernel(attributes=((8, (0, 0, 0)), (4, (1, 1, 1)))), r"nodes\[1\].attributes: 4 after 8"),
    ],
    ids=[
        "grid-zero",
        "grid-large",
        "threads-x",
        "threads-product",
        "block-short",
        "function",
        "attribute",
        "attribute-value",
        "attribute-order",
    ],
)
def test_launches(recording: Recording, message: str) -> None:
    reject(recording, message)


def relocated(*places: tuple[int, int, int]) -> Recording:
    return with_kernel(relocations=tuple(Relocation(at=at, target=Address(memory=m, offset=o)) for at, m, o in places))


@pytest.mark.parametrize(
    ("recording", "message"),
    [
        (relocated((24, ARENA, 0)), r"nodes\[1\].relocations: 8 bytes at 24"),
        (relocated((0, ARENA, 0), (4, ARENA, 0)), r"8 bytes at 4, expected between 8 and 28"),
        (relocated((8, ARENA, 0), (0, ARENA, 0)), r"8 bytes at 0, expected between 16"),
        (relocated((0, ARENA, 8192)), "points at byte 8192 of memory arena, which has 8192"),
        (relocated((0, HOST, 0)), "points at memory host, which the bundle does not have"),
    ],
    ids=["outside", "overlap", "order", "target", "host"],
)
def test_relocations(recording: Recording, message: str) -> None:
    reject(recording, message, "relocation-invalid")


def test_a_relocated_word_is_zero() -> None:
    reject(relocated((12, ARENA, 0)), "the relocated word at 12 is not zero")


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (((24, 5),), r"nodes\[1\].undefined: 5 bytes at 24"),
        (((20, 0),), "0 bytes at 20"),
        (((24, 4), (20, 4)), "4 bytes at 20, expected between 28"),
        (((16, 4),), "the undefined bytes at 16 are not zero"),
        (((4, 8),), "the bytes at 4 hold a relocation"),
    ],
    ids=["outside", "empty", "order", "not-zero", "relocation"],
)
def test_undefined_ranges(ranges: tuple[tuple[int, int], ...], message: str) -> None:
    reject(with_kernel(undefined=ranges), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": "cd" * 32}, r"functions\[0\].image: cdcd"),
        ({"symbol": ""}, r"functions\[0\].symbol"),
        ({"symbol": "a\x1b[2J"}, r"functions\[0\].symbol"),
        ({"params": ((8, 8), (0, 8))}, r"functions\[0\].params: 8 bytes at 0"),
        ({"params": ((0, 0),)}, r"functions\[0\].params: 0 bytes"),
        ({"attributes": ((3, 1),)}, r"functions\[0\].attributes: 3 is none of"),
    ],
    ids=["image", "no-symbol", "control", "overlap", "empty", "attribute"],
)
def test_functions(changes: dict[str, object], message: str) -> None:
    reject(replace(RECORDING_8, functions=(replace(FUNCTION, **changes),)), message)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"element": 3}, r"nodes\[0\].element: 3 bytes, expected 1, 2 or 4"),
        ({"width": 0}, "nothing to write"),
        ({"height": 0}, "nothing to write"),
        ({"pitch": 18}, "rows 18 bytes apart, each of 20"),
        ({"pitch": 65}, "65 is no multiple of 2"),
        ({"pitch": 65, "height": 2}, "65 is no multiple of 2"),
        ({"pitch": 19, "height": 2}, "rows 19 bytes apart, each of 20"),
        ({"target": Address(memory=ARENA, offset=8192 - 147)}, "ends at byte 8193 of memory arena"),
        ({"height": 2**64 - 1, "pitch": 2**64 - 2}, "ends at byte"),
        ({"target": Address(memory=HOST, offset=0)}, "memory host, which the bundle does not have"),
    ],
    ids=["element", "width", "height", "pitch", "odd-pitch", "odd-pitch-2", "pitch-2", "outside", "huge", "host"],
)
def test_memsets(changes: dict[str, object], message: str) -> None:
    reject(with_node(0, **changes), message)


def test_a_single_row_needs_no_pitch() -> None:
    check(with_node(0, height=1, pitch=1))
    check(with_node(0, height=2, pitch=20))


def test_places_beyond_4_gib_are_told_apart() -> None:
    """Memories may be larger than 32-bit offsets can count."""
    memories = {**MEMORIES, "arena": (1 << 40) + 1, "weights": 1 << 36}
    for offset in ((1 << 32) + 8, 1 << 40):
        recording = relocated((0, ARENA, offset))
        check_recording(Table(tables.encode(recording), WHERE), memories, IMAGES)
        assert tables.decode(tables.encode(recording)) == recording
    for memory, offset in ((ARENA, (1 << 40) + 1), (ARENA, 1 << 41), (INPUTS, (1 << 32) + 8), (INPUTS, 1 << 63)):
        with raises("relocation-invalid", match=f"points at byte {offset} of memory"):
            check_recording(Table(tables.encode(relocated((0, memory, offset))), WHERE), memories, IMAGES)
        state = replace(STATE_ROW, relocations=(Relocation(at=0, target=Address(memory=memory, offset=offset)),))
        with raises("table-invalid", match=f"points at byte {offset} of memory"):
            check_module_states(decode_states(encode_states((state,))), "modules", memories, IMAGES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, r"nodes\[2\].source: 0 x 4 x 2"),
        ({"source_pitch": 15}, r"nodes\[2\].source: rows 15 bytes apart"),
        ({"target_height": 3}, r"nodes\[2\].target: slices 3 rows apart"),
        ({"source": Address(memory=INPUTS, offset=385)}, r"nodes\[2\].source: ends at byte 513 of memory inputs"),
        ({"target": Address(memory=ARENA, offset=2**63)}, r"nodes\[2\].target: ends at byte"),
    ],
    ids=["width", "pitch", "slices", "source", "target"],
)
def test_memcpys(changes: dict[str, object], message: str) -> None:
    reject(with_node(2, **changes), message)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ((edge(0, 5),), "edges.target: 5 is not below 5"),
        ((edge(9, 0),), "edges.source: 9 is not below 5"),
        ((edge(0, 1), edge(0, 1)), "one occurs twice"),
        ((edge(0, 1), edge(1, 2), edge(2, 1)), "4 nodes lie on or behind a cycle|nodes lie on or behind a cycle"),
        ((edge(1, 1),), "1 nodes lie on or behind a cycle"),
        ((edge(1, 4, 0, 0, 2),), r"edges\[0\]: type 2"),
        ((edge(1, 4, 3, 0, 0),), r"edges\[0\].from_port: 3"),
        ((edge(0, 1, 1, 0, 1),), r"edges\[0\].from_port: 1 of a node of kind 2"),
        ((edge(1, 2, 1, 0, 1),), r"edges\[0\].type: programmatic"),
        ((edge(1, 4, 0, 0, 1),), r"edges\[0\].type: programmatic"),
    ],
    ids=["target", "source", "twice", "cycle", "self", "type", "port", "not-a-kernel", "to-a-copy", "no-port"],
)
def test_edges(edges: tuple[Edge, ...], message: str) -> None:
    reject(replace(RECORDING_8, edges=edges), message)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([replace(STATE_ROW, image="cd" * 32)], r"states\[0\].image"),
        ([STATE_ROW, STATE_ROW], r"states\[1\].symbol"),
        (
            [replace(STATE_ROW, relocations=(Relocation(at=0, target=Address(memory=HOST, offset=0)),))],
            "memory host, which the bundle does",
        ),
        (
            [replace(STATE_ROW, relocations=(Relocation(at=0, target=Address(memory=ARENA, offset=8192)),))],
            "byte 8192 of memory arena",
        ),
    ],
    ids=["image", "twice", "host", "outside"],
)
def test_module_states_are_checked(rows: list[ModuleState], message: str) -> None:
    with raises("table-invalid", match=message):
        check_module_states(rows, "graphs/modules.bin", MEMORIES, IMAGES)


@pytest.mark.parametrize("position", [0, 2])
def test_kernels_alone_write_to_what_ranks_share(position: int) -> None:
    recording = with_node(position, target=Address(memory=5, offset=0))
    with raises("table-invalid", match="a memset or memcpy in memory peer"):
        check_recording(Table(tables.encode(recording), WHERE), {**MEMORIES, "peer": 1 << 21}, IMAGES)
