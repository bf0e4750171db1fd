"""Memsets and memcpys may write only to the arena, and to inputs and state that calls change. The test checks the last allowed
byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle.errors import BundleError
from cgbundle.format.schema import Manifest, Step
from cgbundle.format.shapes import Cover
from cgbundle.format.table import Table
from cgbundle.validate.contents import check_tables
from cgbundle.validate.module_state import Address
from cgbundle.validate.programs import check_steps, check_targets, writable
from cgcompile.bundle import recordings as codec
from cgcompile.bundle.recordings import MemcpyNode, MemsetNode, Node, Recording
from tests.helpers.bundles import conditional_rows, cuda_bundles, state_bundles
from tests.helpers.bundles.archives import ArchiveOf
from tests.helpers.bundles.edits import edited
from tests.helpers.raising import raises

WEIGHTS, STATE, INPUTS, ARENA, HOST, PEER = range(6)
INPUT = 4 * cuda_bundles.FLOATS * 4
"""Bytes of the only input at the first int_key. It begins at byte 0 of memory inputs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets") / "made.cgb"


@pytest.fixture(scope="module")
def base(folder: Path) -> Manifest:
    return state_bundles.write(folder)


def fill(memory: int, offset: int, width: int = 1, height: int = 1, pitch: int = 0, element: int = 1) -> MemsetNode:
    return MemsetNode(
        target=Address(memory=memory, offset=offset), value=0, element=element, width=width, height=height, pitch=pitch
    )


def copy(memory: int, offset: int, width: int = 1, height: int = 1, depth: int = 1, pitch: int = 0, rows: int = 0) -> MemcpyNode:
    return MemcpyNode(
        source=Address(memory=ARENA, offset=0), target=Address(memory=memory, offset=offset), width=width, height=height,
        depth=depth, source_pitch=width, source_height=height, target_pitch=pitch, target_height=rows,
    )  # fmt: skip


def table_of(nodes: Sequence[Node]) -> Table:
    return Table(codec.encode(Recording(key=(4,), functions=(), nodes=tuple(nodes), edges=())), "g.bin")


def refused(base: Manifest, node: Node) -> str:
    try:
        check_targets(
            table_of([fill(ARENA, 0), copy(ARENA, 0), node]), writable(base, base.entries[0], base.entries[0].programs[0])
        )
    except BundleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("node", [fill, copy])
@pytest.mark.parametrize(
    ("memory", "offset", "width", "fits"),
    [
        (WEIGHTS, 0, 1, False), (WEIGHTS, 256, 4, False), (ARENA, 0, 4096, True),
        (INPUTS, 0, INPUT, True), (INPUTS, INPUT - 1, 1, True), (INPUTS, INPUT, 1, False), (INPUTS, 0, INPUT + 1, False),
        (INPUTS, INPUT - 1, 2, False), (INPUTS, 1023, 1, False),
        (STATE, 0, 64, True), (STATE, 63, 1, True), (STATE, 64, 1, False), (STATE, 0, 65, False), (STATE, 63, 194, False),
        (STATE, 256, 8, True), (STATE, 255, 2, False), (STATE, 264, 1, False), (STATE, 512, 16, True), (STATE, 1023, 1, False),
    ],
)  # fmt: skip
def test_a_write_lies_in_what_calls_change(base: Manifest, node: type, memory: int, offset: int, width: int, fits: bool) -> None:
    changing = edited(
        base, mutated_inputs=(0,), mutated_buffers=tuple(i for i, row in enumerate(base.weights) if row.memory == "state")
    )
    assert (not refused(changing, node(memory, offset, width))) == fits


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (fill(INPUTS, 0), r"nodes\[2\]: writes bytes 0 to 1 of memory inputs, not .* in one input that `mutated_inputs` names"),
        (copy(STATE, 0), r"nodes\[2\]: writes bytes 0 to 1 of memory state, not .* in one buffer that `mutated_buffers` names"),
        (copy(WEIGHTS, 8, 8), r"nodes\[2\]: writes bytes 8 to 16 of memory weights, which no call changes"),
    ],
)  # fmt: skip
def test_what_no_call_changes_is_left_alone(base: Manifest, node: Node, words: str) -> None:
    with raises("table-invalid", match=words):
        check_targets(
            table_of([fill(ARENA, 0), copy(ARENA, 0), node]),
            writable(edited(base, mutated_buffers=()), edited(base, mutated_buffers=()).entries[0], base.entries[0].programs[0]),
        )


@pytest.mark.parametrize(
    ("node", "last"),
    [
        (fill(STATE, 0, width=4, height=3, pitch=28), 60), (fill(STATE, 0, width=4, height=3, pitch=30), 64),
        (fill(STATE, 0, width=4, height=3, pitch=31), 66), (fill(STATE, 0, width=2, height=2, pitch=60, element=4), 68),
        (copy(STATE, 0, width=4, height=2, depth=2, pitch=16, rows=2), 52),
        (copy(STATE, 0, width=4, height=2, depth=2, pitch=16, rows=3), 68),
        (copy(STATE, 0, width=4, height=1, depth=2, pitch=16, rows=4), 68),
    ],
)  # fmt: skip
def test_rows_and_slices_count_to_the_last_byte(base: Manifest, node: Node, last: int) -> None:
    assert (not refused(base, node)) == (last <= 64), "state `total` has 64 bytes"


def test_inputs_beside_each_other_and_not_declared(base: Manifest) -> None:
    """The program has three adjacent inputs, and calls change the second one."""
    program = base.entries[0].programs[0]
    more = [replace(program.values[0], offset=INPUT * place) for place in (1, 2)]
    count = len(program.values)
    several = replace(program, values=(*program.values, *more), inputs=(0, count, count + 1))
    changing = edited(base, mutated_inputs=(1,), programs=(several,))
    assert not refused(changing, fill(INPUTS, INPUT, INPUT))
    for offset, size in ((INPUT - 1, 1), (INPUT - 1, 2), (2 * INPUT - 1, 2), (2 * INPUT, 1), (0, 3 * INPUT)):
        assert "`mutated_inputs` names" in refused(changing, fill(INPUTS, offset, size))
        assert "`mutated_inputs` names" in refused(changing, copy(INPUTS, offset, size))
    assert not refused(edited(changing, mutated_inputs=(1, 2)), fill(INPUTS, INPUT, 2 * INPUT)), "both are written, without a gap"


def test_what_a_copy_step_puts_among_the_inputs_is_the_programs_own(base: Manifest) -> None:
    program = base.entries[0].programs[0]
    upload = replace(program.values[0], offset=512)
    copied = Step(kind="copy", region=0, file="", inputs=(1,), outputs=(len(program.values),))
    grown = replace(program, values=(*program.values, upload), steps=(copied, *program.steps))
    assert refused(base, fill(INPUTS, 512)) and not refused(edited(base, programs=(grown,)), fill(INPUTS, 512, INPUT))
    viewed = replace(grown, steps=(replace(copied, kind="graph"), *program.steps))
    assert refused(edited(base, programs=(viewed,)), fill(INPUTS, 512)), "what a graph gives may be a view of an input"


def test_every_body_of_a_conditional_node_is_looked_into(base: Manifest) -> None:
    recording = conditional_rows.recording("ab" * 32)
    begins = [*recording.bodies, len(recording.nodes)]
    targets = [i for i, node in enumerate(recording.nodes) if isinstance(node, (MemsetNode, MemcpyNode))]
    assert {sum(begin <= i for begin in begins) for i in targets} == {0, 1, 2, 3, 4, 5}, "one in every body"
    for i in targets:
        node = recording.nodes[i]
        assert isinstance(node, (MemsetNode, MemcpyNode))
        nodes = list(recording.nodes)
        nodes[i] = replace(node, target=Address(memory=WEIGHTS, offset=0))
        with raises("table-invalid", match=rf"nodes\[{i}\]: writes bytes"):
            check_targets(Table(codec.encode(replace(recording, nodes=tuple(nodes))), "g.bin"), Cover([]))


@pytest.mark.parametrize("memory", [WEIGHTS, STATE, INPUTS, HOST, PEER])
@pytest.mark.parametrize("node", [fill, copy])
def test_a_bundle_whose_table_was_appended_to_is_refused(tmp_path: Path, node: type, memory: int) -> None:
    manifest = edited(cuda_bundles.write(tmp_path, b"an image"), mutated_buffers=())
    manifest = replace(manifest, memories=tuple([(name, size or 256) for name, size in manifest.memories]))
    check_tables(ArchiveOf(tmp_path, manifest))
    file = tmp_path / "graphs" / "g0-4.bin"
    recording = codec.decode(file.read_bytes())
    file.write_bytes(codec.encode(replace(recording, nodes=(*recording.nodes, node(memory, 0)))))
    with raises("table-invalid", match=r"^graphs/g0-4\.bin: (nodes\[5\]|memory)"):
        check_tables(ArchiveOf(tmp_path, manifest))


@pytest.mark.parametrize(("names", "holds"), [((), False), ((3,), True), ((4,), False)])
def test_a_copy_step_writes_to_state_that_calls_change(base: Manifest, names: tuple[int, ...], holds: bool) -> None:
    """Weight 3 is `total`. The host returns what it changes."""
    program = base.entries[0].programs[0]
    total = replace(program.values[0], shape=(16,), strides=(1,), memory="state", offset=0)
    source = replace(total, memory="arena", offset=0)
    at = len(program.values)
    back = Step(kind="copy", region=0, file="", inputs=(at,), outputs=(at + 1,))
    steps = (replace(program.steps[0], outputs=(1, at)), *program.steps[1:], back)
    grown = replace(program, values=(*program.values, source, total), steps=steps)
    changing = edited(base, mutated_buffers=names)
    if holds:
        check_steps(changing, changing.entries[0], grown, "p")
        return
    with raises(
        "manifest-invalid", match=r"p\.steps\[\d\]: copies into memory state, outside of the buffers that `mutated_buffers` names"
    ):
        check_steps(changing, changing.entries[0], grown, "p")


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 12), st.integers(0, 5)), max_size=6),
    st.tuples(st.sampled_from("ab"), st.integers(0, 14), st.integers(1, 6)),
)
def test_a_piece_lies_in_others(rows: list[tuple[str, int, int]], asked: tuple[str, int, int]) -> None:
    cover = Cover([(memory, begin, begin + size) for memory, begin, size in rows])
    held = {(memory, byte) for memory, begin, size in rows for byte in range(begin, begin + size)}
    memory, begin, size = asked
    assert cover.holds(memory, begin, begin + size) == all((memory, byte) in held for byte in range(begin, begin + size))
