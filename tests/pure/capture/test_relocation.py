"""Two takes (a graph as two processes read it) become one recording: pairing, classification of words, placement, and every
refusal. Needs no GPU and no torch."""

from __future__ import annotations

from dataclasses import replace
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgbundle.validate.module_state import Address, Relocation
from cgcompile.bundle.recordings import KernelNode, MemcpyNode, MemsetNode
from cgcompile.capture.assemble import assemble
from cgcompile.capture.placement import SEGMENT_ALIGN
from cgcompile.capture.take import (
    Pointee,
    Range,
    RawGraph,
    RawKernel,
    RawMemcpy,
    RawMemset,
    RawModuleState,
    RawNode,
    RawSelfTest,
    RawValue,
    Take,
    Word,
)
from cgcompile.capture.worker.address_map import AddressMap
from cgcompile.targets.cuda.donations import DonatedOutput
from cgcompile.targets.memory_layout import PAD, Shape, dense_strides, lay_out
from tests.helpers.census import count
from tests.helpers.raising import raises

KEY, OTHER = (4,), (1,)
MEGA = 1 << 20
WEIGHTS, STATE, INPUTS, ARENA = 0, 1, 2, 3


class Process:
    """An imaginary process with its memory at `base` and its pool segments in `order`. `foreign` holds allocations that only the
    driver knows."""

    def __init__(self, base: int, order: tuple[int, ...] = (0, 1), foreign: dict[int, Pointee] | None = None) -> None:
        self.weights, self.inputs = base, base + 16 * MEGA
        spots = [base + 32 * MEGA, base + 64 * MEGA]
        self.segments = [spots[i] for i in order]
        self.other = base + 128 * MEGA
        self.table = base + 160 * MEGA
        self.freed = base + 164 * MEGA
        ranges = [
            Range(kind="weights", start=self.weights, size=MEGA),
            Range(kind="inputs", start=self.inputs, size=4096),
            *(Range(kind="pool", start=spot, size=2 * MEGA, key=KEY) for spot in sorted(self.segments)),
            Range(kind="pool", start=self.other, size=2 * MEGA, key=OTHER),
            Range(kind="torch", start=self.table, size=512),
        ]
        owned = [(piece.start, piece.size) for piece in ranges] + [(self.freed, 4096)]
        known = foreign or {}
        self.map = AddressMap(ranges, owned, lambda address: next((p for a, p in known.items() if a == address), None))

    def kernel(self, data: bytes, symbol: str = "add", grid: tuple[int, int, int] = (1, 1, 1)) -> RawKernel:
        params = tuple((at, 8) for at in range(0, len(data) - 7, 8))
        return RawKernel(
            image="ab" * 32,
            symbol=symbol,
            params=params,
            function_attributes=(),
            grid=grid,
            threads=(128, 1, 1),
            shared=0,
            attributes=(),
            block=self.map.block(data, KEY),
        )

    def word(self, address: int) -> Word:
        return Word(at=0, readings=self.map.readings(address, KEY))

    def value(self, address: int) -> RawValue:
        return RawValue(dtype="float32", shape=(4,), strides=(1,), place=self.word(address))

    def take(self, *nodes: RawNode, states: tuple[RawModuleState, ...] = (), contents: bytes = b"", edges: tuple = ()) -> Take:
        graph = RawGraph(key=KEY, nodes=nodes, edges=edges, inputs=(), outputs=())
        return Take(
            ranges=tuple(
                replace(r, contents=contents, words=self.map.known_words(contents)) if r.kind == "torch" else r
                for r in self.map.ranges
            ),
            graphs=(graph,),
            states=states,
            self_tests=(RawSelfTest(key=KEY, outputs=(), differences=()),),
            images={},
            mutated=(),
            arch="sm_90",
            driver=13000,
        )


A_BASE, B_BASE = 0x7F00_0000_0000, 0x7E55_4000_0000


def only(a: Take, b: Take) -> KernelNode:
    """Returns the only kernel node of the recording of two takes."""
    node = assemble(a, b, MEGA).graphs[KEY][0].recording.nodes[0]
    assert isinstance(node, KernelNode)
    return node


def relocation(at: int, memory: int, offset: int) -> Relocation:
    """Returns a relocation to `offset` of `memory`."""
    return Relocation(at=at, target=Address(memory=memory, offset=offset))


def test_words_become_relocations_constants_and_undefined_bytes() -> None:
    takes = []
    for base, garbage in ((A_BASE, 0x1111), (B_BASE, 0x2222)):
        p = Process(base)
        data = pack("<QQQQII", p.weights + 256, p.inputs, p.segments[0] + 512, 1234, 7, garbage)
        takes.append(p.take(p.kernel(data)))
    node = only(*takes)
    assert node.relocations == (relocation(0, WEIGHTS, 256), relocation(8, INPUTS, 0), relocation(16, ARENA, 512))
    assert node.block == bytes(24) + pack("<QII", 1234, 7, 0)
    assert node.undefined == ((36, 2),)


def test_a_number_of_rows_among_the_parameters_is_refused() -> None:
    """The second process has more rows of state. If a number among a kernel's parameters differs too, the kernel computes with the
    number of rows."""

    def takes(first: int, second: int, offset: int) -> list[Take]:
        pair = []
        for base, number in ((A_BASE, first), (B_BASE, second)):
            p = Process(base)
            state = base + 200 * MEGA
            ranges = [*p.map.ranges[:2], Range(kind="state", start=state, size=4096), *p.map.ranges[2:]]
            p.map = AddressMap(ranges, [(piece.start, piece.size) for piece in ranges], lambda address: None)
            pair.append(p.take(p.kernel(pack("<QQII", p.weights, state + offset, number, 7))))
        return pair

    assert assemble(*takes(5, 5, 1024), MEGA, rows_begin=1024).graphs[KEY]
    assert assemble(*takes(5, 6, 512), MEGA, rows_begin=1024).graphs[KEY], "state of one size before it"
    with raises("state-refused", match=r"node 0 \(add\): parameter 2 may depend on the number of rows of state"):
        assemble(*takes(5, 6, 1024), MEGA, rows_begin=1024)


def test_the_census_counts_words() -> None:
    takes = []
    for base, garbage in ((A_BASE, 1), (B_BASE, 2)):
        p = Process(base)
        takes.append(p.take(p.kernel(pack("<QQQI", p.weights, 5, garbage, 9))))
    (census,) = count(*takes)
    assert (census.words, census.relocations, census.constants, census.undefined, census.shifted) == (4, 1, 2, 1, 1)


def test_a_four_byte_tail_is_classified() -> None:
    takes = []
    for base, tail in ((A_BASE, 0x0101), (B_BASE, 0x0202)):
        p = Process(base)
        takes.append(p.take(p.kernel(pack("<QI", p.weights, tail))))
    assert only(*takes).undefined == ((8, 2),)


def test_an_address_in_one_process_only_is_undefined() -> None:
    a, b = Process(A_BASE), Process(B_BASE)
    takes = a.take(a.kernel(pack("<QQ", a.weights, a.inputs + 64))), b.take(b.kernel(pack("<QQ", b.weights, 0x1234_5678)))
    node = only(*takes)
    assert [r.at for r in node.relocations] == [0]
    assert node.undefined and all(8 <= at < 16 for at, _ in node.undefined)


def test_segments_are_paired_by_what_points_at_them_not_by_address() -> None:
    a, b = Process(A_BASE, (0, 1)), Process(B_BASE, (1, 0))
    takes = [p.take(p.kernel(pack("<QQQ", p.segments[0] + 512, p.segments[1] + 1024, p.segments[1] + 2048))) for p in (a, b)]
    offsets = [r.target.offset for r in only(*takes).relocations]
    assert offsets == [512, 2 * MEGA + 1024, 2 * MEGA + 2048]


def test_only_segments_that_are_used_take_arena() -> None:
    takes = [p.take(p.kernel(pack("<Q", p.segments[1]))) for p in (Process(A_BASE), Process(B_BASE))]
    assert assemble(*takes, MEGA).graphs[KEY][0].arena == 2 * MEGA + PAD


def test_one_past_the_end_is_an_address() -> None:
    takes = [p.take(p.kernel(pack("<QQ", p.segments[0], p.segments[0] + 2 * MEGA))) for p in (Process(A_BASE), Process(B_BASE))]
    graph = assemble(*takes, MEGA).graphs[KEY][0]
    node = graph.recording.nodes[0]
    assert isinstance(node, KernelNode)
    assert node.relocations[1].target.offset == 2 * MEGA < graph.arena


def test_an_end_that_is_also_a_start_means_what_both_processes_can_mean() -> None:
    """The second segment follows the first directly in one process only."""
    readings = []
    for base, gap in ((A_BASE, 0), (B_BASE, 6 * MEGA)):
        ranges = [Range(kind="weights", start=base, size=256), Range(kind="inputs", start=base + 4096, size=256)]
        first = base + 32 * MEGA
        ranges.append(Range(kind="pool", start=first, size=2 * MEGA, key=KEY))
        ranges.append(Range(kind="pool", start=first + 2 * MEGA + gap, size=2 * MEGA, key=KEY))
        p = Process(base)
        p.map = AddressMap(ranges, [], lambda address: None)
        data = pack("<QQQ", first + 64, first + 2 * MEGA, first + 2 * MEGA + gap + 128)
        readings.append(p.take(p.kernel(data)))
    assert [r.target.offset for r in only(*readings).relocations] == [64, 2 * MEGA, 2 * MEGA + 128]


def test_an_address_of_two_places_is_refused_with_kernel_and_parameter() -> None:
    a, b = Process(A_BASE), Process(B_BASE)
    takes = a.take(a.kernel(pack("<Q", a.weights + 256))), b.take(b.kernel(pack("<Q", b.weights + 512)))
    with raises("address-disagrees", match=r"int_key \(4,\), node 0 \(add\), parameter 0, the word at 0"):
        only(*takes)


def test_where_two_processes_chose_other_blocks_of_the_pool_the_first_one_counts() -> None:
    """Of free blocks of one size, torch takes the one with the lowest address, and addresses differ between processes."""
    a, b = Process(A_BASE), Process(B_BASE)
    same = (64, 128, 192)
    takes = []
    for p, chosen in ((a, a.segments[0] + 4096), (b, b.segments[1] + 512)):
        words = [p.segments[i] + offset for i in (0, 1) for offset in same]
        takes.append(p.take(p.kernel(pack("<7Q", *words, chosen))))
    pointers = only(*takes).relocations
    assert pointers[6].target.offset == pointers[0].target.offset - 64 + 4096


@pytest.mark.parametrize("inside", [0, 1 << 20], ids=["other-beginning", "inside"])
def test_a_beginning_that_is_also_an_end_is_the_beginning_where_two_processes_chose_other_places(inside: int) -> None:
    """Three segments of one size are adjacent: every start except the first one is also the end of a segment."""
    takes = []
    for base, chosen, offset in ((A_BASE, 1, 0), (B_BASE, 2, inside)):
        ranges = [Range(kind="weights", start=base, size=256), Range(kind="inputs", start=base + 4096, size=256)]
        starts = [base + (32 + 2 * i) * MEGA for i in range(3)]
        ranges += [Range(kind="pool", start=start, size=2 * MEGA, key=KEY) for start in starts]
        p = Process(base)
        p.map = AddressMap(ranges, [], lambda address: None)
        words = [start + within for start in starts for within in (64, 128)]
        takes.append(p.take(p.kernel(pack("<7Q", *words, starts[chosen] + offset))))
    assert only(*takes).relocations[6].target.offset == 2 * MEGA


def test_an_address_of_the_pool_in_one_process_and_of_weights_in_the_other_is_none() -> None:
    a, b = Process(A_BASE), Process(B_BASE)
    node = only(a.take(a.kernel(pack("<Q", a.segments[0]))), b.take(b.kernel(pack("<Q", b.weights))))
    assert node.relocations == () and node.undefined


def test_pools_of_other_keys_and_freed_memory_are_no_addresses() -> None:
    takes = [p.take(p.kernel(pack("<QQ", p.other + 64, p.freed + 8))) for p in (Process(A_BASE), Process(B_BASE))]
    node = only(*takes)
    assert node.relocations == () and node.undefined


def test_memory_of_a_library_may_begin_where_the_pool_of_another_key_ends() -> None:
    """In one process cuFFT's table began at the end of another key's pool. Before the fix, its pointer was treated as data, and the
    build was refused."""
    process = Process(A_BASE)
    end = process.other + 2 * MEGA
    process = Process(A_BASE, foreign={end: Pointee(kind="device", start=end, size=MEGA)})
    for key in (KEY, None):
        (reading,) = process.map.readings(end, key)
        assert (process.map.ranges[reading.range].kind, reading.offset) == ("device", 0)
    assert Process(A_BASE).map.readings(end, KEY) == ()


def test_pinned_host_memory_is_refused() -> None:
    takes = []
    for base in (A_BASE, B_BASE):
        host = base + 512 * MEGA
        p = Process(base, foreign={host: Pointee(kind="host", start=0, size=0)})
        takes.append(p.take(p.kernel(pack("<Q", host))))
    with raises("memory-refused", match="pinned host memory"):
        only(*takes)


def test_a_constant_table_is_kept_behind_the_weights() -> None:
    takes = [p.take(p.kernel(pack("<Q", p.table + 8)), contents=bytes(range(256)) * 2) for p in (Process(A_BASE), Process(B_BASE))]
    done = assemble(*takes, MEGA)
    assert done.tables[0].offset == MEGA and done.tables[0].contents == bytes(range(256)) * 2
    assert done.weights_end == MEGA + 512
    node = done.graphs[KEY][0].recording.nodes[0]
    assert isinstance(node, KernelNode) and node.relocations == (relocation(0, WEIGHTS, MEGA + 8),)


@pytest.mark.parametrize("copied", [False, True])
def test_an_allocation_that_the_graph_fills_is_scratch(copied: bool) -> None:
    """A library clears its workspace in every replay. It holds zeros in both processes, but it is not a constant table."""
    takes = []
    for p in (Process(A_BASE), Process(B_BASE)):
        target, source = p.word(p.table), p.word(p.segments[0])
        row = (
            RawMemcpy(source=source, target=target, shape=(512, 1, 1, 512, 1, 512, 1))
            if copied
            else RawMemset(target=target, shape=(0, 1, 512, 1, 0))
        )
        takes.append(p.take(row, p.kernel(pack("<Q", p.table)), contents=bytes(512)))
    done = assemble(*takes, MEGA)
    node = done.graphs[KEY][0].recording.nodes[0]
    assert done.tables == () and isinstance(node, MemcpyNode if copied else MemsetNode)
    assert isinstance(node, (MemcpyNode, MemsetNode)) and node.target.memory == ARENA


def test_an_allocation_with_other_contents_in_each_process_is_scratch() -> None:
    takes = [
        p.take(p.kernel(pack("<Q", p.table)), contents=bytes([fill]) * 512)
        for fill, p in enumerate((Process(A_BASE), Process(B_BASE)))
    ]
    done = assemble(*takes, MEGA)
    assert done.tables == () and done.graphs[KEY][0].arena == 512 + PAD


def test_a_table_that_holds_addresses_is_refused() -> None:
    takes = [
        p.take(p.kernel(pack("<Q", p.table)), contents=pack("<Q", p.weights) + bytes(504))
        for p in (Process(A_BASE), Process(B_BASE))
    ]
    with raises("pointer-in-table"):
        assemble(*takes, MEGA)


def test_a_table_too_large_to_read_is_refused() -> None:
    takes = [p.take(p.kernel(pack("<Q", p.table))) for p in (Process(A_BASE), Process(B_BASE))]
    with raises("memory-refused", match="512 bytes"):
        assemble(*takes, MEGA)


def test_a_module_variable_that_points_at_a_table_is_relocated() -> None:
    takes = []
    for base in (A_BASE, B_BASE):
        p = Process(base)
        state = RawModuleState(image="cd" * 32, symbol="lut_sp", block=p.map.block(pack("<Q", p.table), None))
        takes.append(p.take(states=(state,), contents=bytes(512)))
    done = assemble(*takes, MEGA)
    assert done.states[0].relocations == (relocation(0, WEIGHTS, MEGA),) and done.states[0].contents == bytes(8)


def test_a_module_variable_that_differs_is_refused() -> None:
    takes = []
    for base, value in ((A_BASE, 1), (B_BASE, 2)):
        p = Process(base)
        takes.append(
            p.take(states=(RawModuleState(image="cd" * 32, symbol="counter", block=p.map.block(pack("<I", value), None)),))
        )
    with raises("module-state-differs", match="counter"):
        assemble(*takes, MEGA)


def test_memsets_and_copies_are_placed() -> None:
    takes = []
    for base in (A_BASE, B_BASE):
        p = Process(base)
        fill = RawMemset(target=p.word(p.segments[0] + 512), shape=(0, 4, 16, 1, 0))
        copy = RawMemcpy(source=p.word(p.inputs), target=p.word(p.segments[0]), shape=(64, 1, 1, 0, 0, 0, 0))
        takes.append(p.take(fill, copy, edges=((0, 1, 1, 0, 1),)))
    recording = assemble(*takes, MEGA).graphs[KEY][0].recording
    fill_row, copy_row = recording.nodes
    assert isinstance(fill_row, MemsetNode) and (fill_row.target.memory, fill_row.target.offset, fill_row.width) == (ARENA, 512, 16)
    assert isinstance(copy_row, MemcpyNode) and (copy_row.source.memory, copy_row.target.memory, copy_row.width) == (
        INPUTS,
        ARENA,
        64,
    )
    assert (recording.edges[0].from_port, recording.edges[0].type) == (1, 1)


@pytest.mark.parametrize("change", [{"symbol": "mul"}, {"grid": (2, 1, 1)}])
def test_other_kernels_or_grids_are_refused_by_name(change: dict) -> None:
    a, b = Process(A_BASE), Process(B_BASE)
    takes = a.take(a.kernel(pack("<Q", a.weights))), b.take(b.kernel(pack("<Q", b.weights), **change))
    with raises("recordings-differ", match=rf"node 0 \(add\): (the )?{next(iter(change))} is"):
        only(*takes)


def test_another_number_of_nodes_is_refused() -> None:
    a, b = Process(A_BASE), Process(B_BASE)
    with raises("recordings-differ", match="1 nodes in one recording, 0 in the other"):
        assemble(a.take(a.kernel(pack("<Q", a.weights))), b.take(), MEGA)


def test_the_call_s_tensors_are_placed_with_the_nodes() -> None:
    takes = []
    for base in (A_BASE, B_BASE):
        p = Process(base)
        take = p.take(p.kernel(pack("<Q", p.segments[1])))
        graph = replace(
            take.graphs[0], inputs=(p.value(p.inputs + 256),), outputs=(p.value(p.segments[1] + 64), p.value(p.weights))
        )
        takes.append(replace(take, graphs=(graph,)))
    graph = assemble(*takes, MEGA).graphs[KEY][0]
    assert [(v.memory, v.offset) for v in (*graph.inputs, *graph.outputs)] == [("inputs", 256), ("arena", 64), ("weights", 0)]


@given(st.lists(st.tuples(st.sampled_from("wisgcd"), st.integers(0, 255)), min_size=1, max_size=40))
def test_every_byte_is_relocation_constant_or_undefined(words: list[tuple[str, int]]) -> None:
    """With its relocations filled in, the recording equals each process's block except for the undefined bytes."""
    blocks, takes = [], []
    for base in (A_BASE, B_BASE):
        p = Process(base)
        places = {"w": p.weights, "i": p.inputs, "s": p.segments[0], "g": p.segments[1], "c": 0, "d": base >> 20}
        data = b"".join(pack("<Q", places[kind] + 8 * n) for kind, n in words)
        blocks.append((p, data))
        takes.append(p.take(p.kernel(data)))
    graph = assemble(*takes, MEGA).graphs[KEY][0]
    node = graph.recording.nodes[0]
    assert isinstance(node, KernelNode)
    for r in node.relocations:
        assert r.target.memory != ARENA or r.target.offset < graph.arena
    covered = {r.at + i for r in node.relocations for i in range(8)} | {at + i for at, n in node.undefined for i in range(n)}
    assert sorted(r.at // 8 for r in node.relocations) == [i for i, (kind, _) in enumerate(words) if kind in "wisg"]
    for _p, data in blocks:
        assert all(node.block[i] == data[i] for i in range(len(data)) if i not in covered)


def test_weights_are_aligned_and_tied_ones_lie_once() -> None:
    one = Shape(dtype="float32", shape=(3, 5), strides=(5, 1), same_as="")
    layout = lay_out({"a": one, "b": replace(one, same_as="a"), "c": one})
    assert [(r.tensor, r.offset) for r in layout.rows] == [("a", 0), ("a", 0), ("c", 256)] and (
        layout.weights_end,
        layout.state_end,
    ) == (512, 0)


def test_what_calls_change_lies_in_a_memory_of_its_own() -> None:
    one = Shape(dtype="float32", shape=(3, 5), strides=(5, 1), same_as="")
    layout = lay_out({"a": one, "cache": one, "b": one, "count": one}, state=("count", "cache"))
    assert [(r.name, r.memory, r.offset) for r in layout.rows] == [
        ("a", "weights", 0), ("cache", "state", 0), ("b", "weights", 256), ("count", "state", 256)
    ]  # fmt: skip
    assert (layout.weights_end, layout.state_end) == (512, 512)


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((2, 3), (3, 1), (3, 1)),
        ((2, 3), (1, 2), (1, 2)),
        ((2, 3, 4, 4), (48, 1, 12, 3), (48, 1, 12, 3)),
        ((2, 3), (0, 1), (3, 1)),
        ((2, 3), (6, 2), (3, 1)),
        ((1, 3), (77, 1), (77, 1)),
        ((), (), ()),
    ],
)
def test_strides_are_kept_where_they_are_dense(shape: tuple, strides: tuple, dense: tuple) -> None:
    assert dense_strides(shape, strides) == dense


def test_segments_keep_the_alignment_that_kernels_were_chosen_for() -> None:
    takes = [
        p.take(p.kernel(pack("<QQ", p.table, p.segments[0])), contents=bytes([p.table >> 40 & 255]) * 512)
        for p in (Process(A_BASE), Process(B_BASE))
    ]
    node = only(*takes)
    assert [r.target.offset % SEGMENT_ALIGN for r in node.relocations] == [0, 0]


# --- donations ----------------------------------------------------------------------------------------------------------


def donated_takes(output: int) -> tuple[Take, Take]:
    """Returns takes of a kernel that reads an input and a first segment, and writes to a second one. `output` says where the
    graph's output lies: 0 the first segment, 1 the second one, 2 the input."""
    takes = []
    for base, order in ((A_BASE, (0, 1)), (B_BASE, (1, 0))):
        process = Process(base, order)
        places = [process.segments[0], process.segments[1] + 512, process.inputs]
        raw_take = process.take(process.kernel(pack("<QQQ", *places)))
        graph = replace(raw_take.graphs[0], outputs=(process.value(places[output]),))
        takes.append(replace(raw_take, graphs=(graph,)))
    return takes[0], takes[1]


@pytest.mark.parametrize("output", [0, 1])
def test_the_segment_of_a_donated_output_lies_below_what_all_share(output: int) -> None:
    donated = {KEY: (DonatedOutput(entry="make", number=0, region=0, output=0),)}
    assembled = assemble(*donated_takes(output), MEGA, donated)
    (row,) = assembled.reserved
    assert (row.entry, row.offset, row.bytes) == ("make", 0, 2 * MEGA + PAD)
    (graph,) = assembled.graphs[KEY]
    (node,) = graph.recording.nodes
    assert isinstance(node, KernelNode)
    shared = 2 * SEGMENT_ALIGN  # after PAD unused bytes, at a multiple of a segment's alignment
    places = [0, shared] if output == 0 else [shared, 0]
    assert [relocation.target.offset for relocation in node.relocations[:2]] == [places[0], places[1] + 512]
    assert graph.outputs[0].offset == [places[0], places[1] + 512][output]
    assert graph.arena == shared + 2 * MEGA + PAD
    plain = assemble(*donated_takes(output), MEGA)
    assert plain.reserved == () and plain.graphs[KEY][0].arena == 4 * MEGA + PAD


def test_a_donated_output_that_lies_in_no_segment() -> None:
    donated = {KEY: (DonatedOutput(entry="make", number=3, region=0, output=0),)}
    with raises("donation-refused", match=r"output 3 of make\(\) lies in memory of inputs"):
        assemble(*donated_takes(2), MEGA, donated)
