"""Handwritten cases: which memory ranges of two processes are paired, what two takes (graphs of a process) must have in common, and
which words are addresses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cgcompile.capture import pairing
from cgcompile.capture.pairing import PairedRanges, agree, alike, meaning, pair_ranges, pair_takes
from cgcompile.capture.relocation import _is_stale, address_at, classify, classify_graph, compare, node_name, place_of
from cgcompile.capture.take import (
    Block,
    Range,
    RawEmpty,
    RawGraph,
    RawKernel,
    RawMemcpy,
    RawMemset,
    RawModuleState,
    RawSelfTest,
    RawSetCondition,
    RawValue,
    Reading,
    Take,
    Word,
)
from tests.helpers.raising import raises

KEY = (4,)
RANGES = (
    Range(kind="weights", start=0, size=1000),
    Range(kind="inputs", start=2000, size=1000),
    Range(kind="state", start=4000, size=1000),
    Range(kind="pool", start=6000, size=512, key=KEY),
    Range(kind="pool", start=7000, size=512, key=KEY),
    Range(kind="pool", start=8000, size=256, key=KEY),
    Range(kind="torch", start=9000, size=512),
    Range(kind="torch", start=9600, size=512),
    Range(kind="host", start=9900, size=0),
)
TURNED = (*RANGES[:3], RANGES[4], RANGES[3], RANGES[5], RANGES[7], RANGES[6], RANGES[8])
"""The ranges of the other process: the two pools and the two tables are exchanged."""

SWAPPED = {3: 4, 4: 3, 6: 7, 7: 6}


Place = tuple[int, int]
"""A range and an offset in it."""


def word(*readings: Place, at: int = 0) -> Word:
    return Word(at=at, readings=tuple([Reading(range=place, offset=offset) for place, offset in readings]))


def kernel(*words: Word, data: bytes | None = None, **changes: Any) -> RawKernel:
    block = Block(data=bytes(8 * max(len(words), 1)) if data is None else data, words=words)
    node = RawKernel(
        image="ab" * 32, symbol="add", params=((0, 8),), function_attributes=(), grid=(1, 2, 3), threads=(32, 1, 1), shared=0,
        attributes=(), block=block,
    )  # fmt: skip
    return replace(node, **changes)


def value(place: Word) -> RawValue:
    return RawValue(dtype="float32", shape=(4,), strides=(1,), place=place)


def take(
    *nodes: Any, ranges: tuple[Range, ...] = RANGES, states: tuple[RawModuleState, ...] = (), edges: tuple = (), key: tuple = KEY,
    inputs: tuple[RawValue, ...] = (), outputs: tuple[RawValue, ...] = (), region: int = 0,
) -> Take:  # fmt: skip
    graph = RawGraph(key=key, nodes=nodes, edges=edges, inputs=inputs, outputs=outputs)
    return Take(
        ranges=ranges, graphs=(replace(graph, region=region),), states=states,
        self_tests=(RawSelfTest(key=key, outputs=(), differences=()),),
        images={}, mutated=(), arch="sm_90", driver=13000,
    )  # fmt: skip


def seen(place: int, offset: int) -> tuple[Word, Word]:
    """Returns a word that points into range `place` of the first process, and the other process's word at the same position."""
    return word((place, offset)), word((SWAPPED.get(place, place), offset))


def state(block: Block, symbol: str = "lut", image: str = "cd" * 32) -> RawModuleState:
    return RawModuleState(image=image, symbol=symbol, block=block)


# --- pairing ---------------------------------------------------------------------------------------------------------


def in_kernel(mine: Word, theirs: Word) -> tuple[Take, Take]:
    return take(kernel(mine)), take(kernel(theirs), ranges=TURNED)


def in_memset(mine: Word, theirs: Word) -> tuple[Take, Take]:
    shape = (0, 1, 1, 1, 0)
    return take(RawMemset(target=mine, shape=shape)), take(RawMemset(target=theirs, shape=shape), ranges=TURNED)


def in_source(mine: Word, theirs: Word) -> tuple[Take, Take]:
    takes = [RawMemcpy(source=pointer, target=word((0, 0)), shape=(1, 1, 1, 0, 0, 0, 0)) for pointer in (mine, theirs)]
    return take(takes[0]), take(takes[1], ranges=TURNED)


def in_target(mine: Word, theirs: Word) -> tuple[Take, Take]:
    takes = [RawMemcpy(source=word((0, 0)), target=pointer, shape=(1, 1, 1, 0, 0, 0, 0)) for pointer in (mine, theirs)]
    return take(takes[0]), take(takes[1], ranges=TURNED)


def in_condition(mine: Word, theirs: Word) -> tuple[Take, Take]:
    takes = [RawSetCondition(conditional=0, byte=pointer) for pointer in (mine, theirs)]
    return take(takes[0]), take(takes[1], ranges=TURNED)


def in_input(mine: Word, theirs: Word) -> tuple[Take, Take]:
    return take(inputs=(value(mine),)), take(inputs=(value(theirs),), ranges=TURNED)


def in_output(mine: Word, theirs: Word) -> tuple[Take, Take]:
    return take(outputs=(value(mine),)), take(outputs=(value(theirs),), ranges=TURNED)


def in_state(mine: Word, theirs: Word) -> tuple[Take, Take]:
    takes = [(state(Block(data=bytes(8), words=(pointer,))),) for pointer in (mine, theirs)]
    return take(states=takes[0]), take(states=takes[1], ranges=TURNED)


@pytest.mark.parametrize("place", [3, 4, 6, 7])
@pytest.mark.parametrize("where", [in_kernel, in_memset, in_source, in_target, in_condition, in_input, in_output, in_state])
def test_a_pointer_anywhere_pairs_the_ranges_that_it_points_into(where: Any, place: int) -> None:
    mine, theirs = where(*seen(place, 64))
    assert pair_ranges(mine, theirs) == {0: 0, 1: 1, 2: 2, place: SWAPPED[place]}
    paired = pair_takes(mine, theirs)
    assert paired.ranges == (RANGES, TURNED) and paired.pairing == pair_ranges(mine, theirs)
    assert paired.hosts == (frozenset({8}), frozenset({8})) and paired.pools == (frozenset({3, 4, 5}), frozenset({3, 4, 5}))


def test_nodes_of_two_kinds_say_nothing() -> None:
    shape = (0, 1, 1, 1, 0)
    for one, other in (
        (kernel(word((3, 8))), RawMemset(target=word((4, 8)), shape=shape)),
        (RawMemset(target=word((3, 8)), shape=shape), kernel(word((4, 8)))),
        (RawMemset(target=word((3, 8)), shape=shape), RawMemcpy(source=word((4, 8)), target=word((4, 8)), shape=shape)),
        (RawMemcpy(source=word((3, 8)), target=word((3, 8)), shape=shape), RawMemset(target=word((4, 8)), shape=shape)),
        (RawSetCondition(conditional=0, byte=word((3, 8))), kernel(word((4, 8)))),
        (kernel(word((3, 8))), RawSetCondition(conditional=0, byte=word((4, 8)))),
        (RawEmpty(), kernel(word((4, 8)))),
        (RawEmpty(), RawEmpty()),
    ):
        assert pair_ranges(take(one), take(other)) == {0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [((3, 8), (4, 16)), ((3, 8), (5, 8)), ((3, 8), (6, 8)), ((6, 8), (3, 8))],
    ids=["offset", "size", "kind", "other-kind"],
)
def test_words_that_cannot_mean_the_same_do_not_vote(mine: tuple[int, int], theirs: tuple[int, int]) -> None:
    assert pair_ranges(take(kernel(word(mine))), take(kernel(word(theirs)))) == {0: 0, 1: 1, 2: 2}


def test_ranges_are_alike_in_kind_size_and_key() -> None:
    base = RANGES[3]
    assert alike(base, replace(base, start=1, contents=b"x"))
    for changes in ({"kind": "torch"}, {"size": 513}, {"key": (1,)}, {"key": None}):
        assert not alike(base, replace(base, **changes))  # type: ignore[arg-type]


def test_most_votes_win_and_a_pair_is_final_for_both() -> None:
    def words(*places: tuple[int, int]) -> tuple[Word, ...]:
        return tuple([word((place, 8 * index), at=8 * index) for index, place in enumerate(places)])  # type: ignore[misc]

    # 3 -> 4 has three votes, 3 -> 3 two, 4 -> 4 and 4 -> 3 one each. 3 -> 4 wins, so only 4 -> 3 remains
    pairs = [(3, 4), (3, 4), (3, 4), (3, 3), (3, 3), (4, 4), (4, 3)]
    mine = tuple([word((one, index), at=8 * index) for index, (one, _) in enumerate(pairs)])
    theirs = tuple([word((other, index), at=8 * index) for index, (_, other) in enumerate(pairs)])
    assert pair_ranges(take(kernel(*mine)), take(kernel(*theirs))) == {0: 0, 1: 1, 2: 2, 3: 4, 4: 3}


def test_equal_votes_go_by_position() -> None:
    pairs = [(4, 4), (3, 4), (4, 3), (3, 3)]
    mine = tuple([word((one, index), at=8 * index) for index, (one, _) in enumerate(pairs)])
    theirs = tuple([word((other, index), at=8 * index) for index, (_, other) in enumerate(pairs)])
    assert pair_ranges(take(kernel(*mine)), take(kernel(*theirs))) == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}


def test_words_are_compared_where_they_stand() -> None:
    mine = kernel(word((3, 8), at=0), word((4, 8), at=8))
    theirs = kernel(word((3, 8), at=8), data=bytes(16))
    assert pair_ranges(take(mine), take(theirs, ranges=TURNED)) == {0: 0, 1: 1, 2: 2, 4: 3}


def test_state_is_paired_only_with_state() -> None:
    other = (*RANGES[:2], replace(RANGES[2], kind="pool"), *RANGES[3:])
    assert pair_ranges(take(), take(ranges=other)) == {0: 0, 1: 1}
    assert pair_ranges(take(ranges=other), take()) == {0: 0, 1: 1}
    assert pair_ranges(take(ranges=RANGES[:3]), take()) == {0: 0, 1: 1, 2: 2}


# --- what a word means -----------------------------------------------------------------------------------------------

PAIRED = PairedRanges(
    pairing={0: 0, 1: 1, 3: 4}, ranges=(RANGES, TURNED), hosts=(frozenset({8}), frozenset({8})),
    pools=(frozenset({3, 4, 5}), frozenset({3, 4, 5})),
)  # fmt: skip


def test_the_first_common_reading_is_chosen() -> None:
    assert agree(word((0, 8)), word((0, 8)), PAIRED.pairing) == Reading(range=0, offset=8)
    assert agree(word((3, 8)), word((4, 8)), PAIRED.pairing) == Reading(range=3, offset=8)
    assert agree(word((5, 0), (1, 7), (0, 8)), word((0, 8), (1, 7)), PAIRED.pairing) == Reading(range=1, offset=7)
    for mine, theirs in (((0, 8), (0, 9)), ((0, 8), (1, 8)), ((3, 8), (3, 8)), ((4, 8), (4, 8))):
        assert agree(word(mine), word(theirs), PAIRED.pairing) is None


@pytest.mark.parametrize(
    ("mine", "theirs", "meant"),
    [
        ([(3, 8)], [(3, 16)], (3, 8)),  # different places in the pool: the first process decides
        ([(0, 8), (3, 8)], [(3, 16)], (3, 8)),
        ([(0, 8)], [(3, 16)], None),
        ([(3, 8)], [(0, 16)], None),
        ([(3, 8)], [(6, 16)], None),
        ([(3, 512), (4, 0)], [(3, 0)], (4, 0)),  # in the other process the word is a start, so it is the start here
        ([(3, 512), (4, 0)], [(3, 511)], (4, 0)),
        ([(3, 512), (4, 0)], [(3, 512)], (3, 512)),  # in the other process the word is an end, so it is the end here
        ([(3, 512), (4, 0)], [(3, 512), (5, 0)], (4, 0)),  # in the other process it may be either: the start is chosen
        ([(3, 512), (4, 0)], [(3, 512), (0, 0)], (3, 512)),
        ([(3, 8), (4, 8)], [(5, 0)], None),  # two possible meanings
        ([(3, 512)], [(5, 0)], None),
        ([(3, 8)], [(5, 256)], None),
    ],
)
def test_other_places_of_the_pool(
    mine: list[tuple[int, int]], theirs: list[tuple[int, int]], meant: tuple[int, int] | None
) -> None:
    paired = replace(PAIRED, pairing={0: 0, 1: 1})
    reading = meaning(word(*mine), word(*theirs), paired)
    assert reading == (None if meant is None else Reading(range=meant[0], offset=meant[1]))
    if meant is not None:
        assert place_of(word(*mine), word(*theirs), paired, "here") == reading
        return
    with raises("address-disagrees", match="^here is an address in both recordings, but not of the same place: ") as caught:
        place_of(word(*mine), word(*theirs), paired, "here")
    said, other = str(caught.value).partition("same place: ")[2].split("; in the other process ")
    for text, places, ranges in ((said, mine, RANGES), (other, theirs, TURNED)):
        wanted = [f"{ranges[at].kind} of {ranges[at].size:,} bytes, {offset:,} into it" for at, offset in places]
        assert text == " or ".join(wanted)


def test_each_process_has_a_pool_of_its_own() -> None:
    paired = replace(PAIRED, pairing={}, pools=(frozenset({3}), frozenset({5})))
    assert meaning(word((3, 8)), word((5, 16)), paired) == Reading(range=3, offset=8)
    for mine, theirs in (((5, 8), (5, 16)), ((3, 8), (3, 16)), ((5, 8), (3, 16))):
        assert meaning(word(mine), word(theirs), paired) is None


# --- blocks ----------------------------------------------------------------------------------------------------------


def spot(at: int) -> str:
    return f"word {at}"


def test_every_byte_of_a_block_is_classified() -> None:
    mine = Block(data=bytes(range(1, 33)), words=(word((0, 8), at=0), word((3, 8), at=16)))
    theirs = Block(data=bytes([9] * 8 + [9, *range(10, 17)] + [7] * 8 + [25, 26, 0, 28, 0, 0, 31, 32]), words=mine.words)
    theirs = replace(theirs, words=(word((0, 8), at=0), word((4, 8), at=16)))
    classified = classify(mine, theirs, PAIRED, spot)
    assert classified.relocations == ((0, Reading(range=0, offset=8)), (16, Reading(range=3, offset=8)))
    assert classified.undefined == ((26, 1), (28, 2))
    assert classified.data == bytes(8) + bytes(range(9, 17)) + bytes(8) + bytes([25, 26, 0, 28, 0, 0, 31, 32])


def test_a_word_that_is_an_address_in_one_process_is_none() -> None:
    plain = Block(data=bytes(8), words=())
    address = Block(data=b"\1" * 8, words=(word((0, 8), at=0),))
    for mine, theirs in ((address, plain), (plain, address)):
        classified = classify(mine, theirs, PAIRED, spot)
        assert classified.relocations == () and classified.undefined == ((0, 8),) and classified.data == bytes(8)


def test_words_behind_one_that_is_no_address_are_classified() -> None:
    last = word((0, 8), at=8)
    mine = Block(data=b"\1" * 16, words=(word((0, 8)), last))
    for words in ((last,), (word((6, 8)), last)):  # the first word is a stale address in one process only
        classified = classify(mine, Block(data=b"\2" * 16, words=words), PAIRED, spot)
        assert classified.relocations == ((8, Reading(range=0, offset=8)),) and classified.undefined == ((0, 8),)


def test_weights_at_different_places_are_no_address() -> None:
    """A word that is an address of different weights in the two processes is a number by chance. In an 8B decoder, the word at 160
    was read as an address."""
    mine = Block(data=(0x7F12_0000_0001).to_bytes(8, "little"), words=(word((0, 8)),))
    theirs = Block(data=(0x7F0E_0000_0001).to_bytes(8, "little"), words=(word((0, 16)),))
    classified = classify(mine, theirs, PAIRED, spot)
    assert classified.relocations == () and classified.undefined == ((4, 1),)
    assert classified.data == bytes([1, 0, 0, 0, 0, 0x7F, 0, 0])
    elsewhere = replace(theirs, words=(word((7, 16)),))  # a range that is no weight
    assert classify(mine, elsewhere, PAIRED, spot) == classified
    with raises("address-disagrees", match="^word 0 is an address in both recordings, but not of the same place"):
        classify(mine, replace(theirs, data=bytes(8)), PAIRED, spot)


@pytest.mark.parametrize("kept", [0, 1, 2], ids=["weights", "inputs", "state"])
@pytest.mark.parametrize("elsewhere", [3, 6], ids=["pool", "torch"])
def test_a_place_of_weights_in_one_process_alone_is_no_address(kept: int, elsewhere: int) -> None:
    """`topk` for 32 rows had such words: unused strides looked like an address of weights in one process, and of the pool in the
    other one."""
    mine = Block(data=b"\1" * 8, words=(word((kept, 8)),))
    theirs = Block(data=b"\2" * 8, words=(word((elsewhere, 8)),))
    for first, second in ((mine, theirs), (theirs, mine)):
        classified = classify(first, second, PAIRED, spot)
        assert classified.relocations == () and classified.undefined == ((0, 8),) and classified.data == bytes(8)
    with raises("address-disagrees"):
        place_of(mine.words[0], theirs.words[0], PAIRED, "a memset")


def test_a_word_is_read_by_the_ranges_of_its_own_process() -> None:
    """One process has an additional range, so the same range has another number in each process."""
    ranges = (*RANGES[:6], Range(kind="torch", start=8500, size=64), *RANGES[6:])
    paired = replace(PAIRED, ranges=(RANGES, ranges), hosts=(frozenset({8}), frozenset({9})))
    mine = Block(data=b"\1" * 8, words=(word((0, 8)),))
    theirs = Block(data=b"\2" * 8, words=(word((9, 0)),))
    assert classify(mine, theirs, paired, spot).undefined == ((0, 8),)
    said = "torch of 512 bytes, 8 into it; in the other process torch of 64 bytes, 8 into it$"
    with raises("address-disagrees", match=said):
        place_of(word((6, 8)), word((6, 8)), paired, "a memset")


def test_pinned_memory_in_both_processes_is_refused() -> None:
    paired = replace(PAIRED, hosts=(frozenset({8}), frozenset({7})))

    def read(mine: int, theirs: int) -> Any:
        blocks = [Block(data=(4096 + 15).to_bytes(8, "little"), words=(word((number, 0)),)) for number in (mine, theirs)]
        return classify(blocks[0], blocks[1], paired, spot)

    with raises("memory-refused", match=r"^word 0 is an address of pinned host memory \(0x100f\)$"):
        read(8, 7)
    both = [Block(data=bytes(8), words=(word((first, 8), (last, 8)),)) for first, last in ((8, 0), (0, 7), (7, 0), (0, 8))]
    with raises("memory-refused"):
        classify(both[0], both[2], paired, spot)
    for mine, theirs in ((both[1], both[2]), (both[0], both[1]), (both[3], both[1])):
        assert classify(mine, theirs, paired, spot).relocations == ((0, Reading(range=0, offset=8)),)
    assert read(8, 0).relocations == read(0, 7).relocations == (), "a number, and stale bytes above it"
    for mine, theirs in ((8, 8), (7, 7), (7, 8)):
        with raises("address-disagrees", match="^word 0 is an address in both recordings, but not of the same place"):
            read(mine, theirs)


def test_a_disagreement_names_the_node_and_the_parameter() -> None:
    params = ((0, 8), (8, 4), (12, 12))
    for at, said in ((0, "parameter 0, the word at 0 of 8 bytes"), (16, "parameter 2, the word at 4 of 12 bytes"),
                     (8, "parameter 1, the word at 0 of 4 bytes"), (24, "the word at 24 of the parameters")):  # fmt: skip
        takes = [take(RawEmpty(), kernel(word(place, at=at), data=bytes(32), params=params)) for place in ((6, 8), (7, 8))]
        with raises("address-disagrees") as caught:
            classify_graph(takes[0].graphs[0], takes[1].graphs[0], PAIRED)
        assert str(caught.value).startswith(f"int_key (4,), node 1 (add), {said} is an address")


def test_the_kernels_of_a_graph_are_classified_by_position() -> None:
    nodes = (RawEmpty(), kernel(word((0, 8))), RawMemset(target=word((0, 0)), shape=(0,)), kernel(word((0, 16))))
    graph = take(*nodes).graphs[0]
    blocks = classify_graph(graph, graph, PAIRED)
    assert {at: [reading.offset for _, reading in block.relocations] for at, block in blocks.items()} == {1: [8], 3: [16]}


def test_nodes_have_names() -> None:
    sample = take(kernel(), RawMemset(target=word((0, 0)), shape=()), RawMemcpy(source=word((0, 0)), target=word((0, 0)), shape=()),
                RawEmpty())  # fmt: skip
    names = [node_name(sample.graphs[0], index) for index in range(4)]
    assert names == [f"int_key (4,), node {index} ({name})" for index, name in enumerate(("add", "memset", "memcpy", "empty"))]
    assert node_name(replace(sample.graphs[0], region=2), 1) == "int_key (4,), graph 3, node 1 (memset)"


# --- what two takes have in common -----------------------------------------------------------------------------------


def differ(a: Take, b: Take, message: str) -> None:
    with raises("recordings-differ") as caught:
        compare(a, b)
    assert str(caught.value) == message


def test_equal_takes_compare() -> None:
    block = Block(data=bytes(8), words=())
    for sample in (
        take(),
        take(kernel(), RawEmpty(), inputs=(value(word((0, 0))),), states=(state(block),), edges=((0, 1, 0, 0, 0),)),
    ):
        compare(sample, sample)
    compare(take(kernel(word((0, 0)))), take(kernel(word((1, 8)), data=b"\1" * 8)))  # addresses and bytes may differ


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"symbol": "mul"}, "symbol is add in one recording and mul in the other"),
        ({"image": "ef" * 32}, f"image is {'ab' * 32} in one recording and {'ef' * 32} in the other"),
        ({"grid": (1, 2, 4)}, "grid is (1, 2, 3) in one recording and (1, 2, 4) in the other"),
        ({"threads": (64, 1, 1)}, "threads is (32, 1, 1) in one recording and (64, 1, 1) in the other"),
        ({"shared": 1}, "shared is 0 in one recording and 1 in the other"),
        ({"params": ()}, "params is ((0, 8),) in one recording and () in the other"),
        ({"function_attributes": ((8, 1),)}, "function_attributes is () in one recording and ((8, 1),) in the other"),
        ({"attributes": ((8, (1, 0, 0)),)}, "attributes is () in one recording and ((8, (1, 0, 0)),) in the other"),
        ({"block": Block(data=bytes(9), words=())}, "the parameters' size is 8 in one recording and 9 in the other"),
    ],
)
def test_kernels_differ(changes: dict[str, Any], what: str) -> None:
    differ(take(RawEmpty(), kernel()), take(RawEmpty(), kernel(**changes)), f"int_key (4,), node 1 (add): {what}")


def test_nodes_differ() -> None:
    fill, copy = RawMemset(target=word((0, 0)), shape=(1, 2)), RawMemcpy(source=word((0, 0)), target=word((0, 0)), shape=(1, 2))
    for node, name in ((fill, "memset"), (copy, "memcpy")):
        other = replace(node, shape=(1, 3))
        said = f"int_key (4,), node 0 ({name}): the shape is (1, 2) in one recording and (1, 3) in the other"
        differ(take(node), take(other), said)
        compare(take(node), take(node))
    differ(
        take(fill), take(copy), "int_key (4,), node 0 (memset): the kind is RawMemset in one recording and RawMemcpy in the other"
    )
    differ(take(kernel(), kernel()), take(kernel()), "int_key (4,): 2 nodes in one recording, 1 in the other")
    first, second = [RawSetCondition(conditional=number, byte=word((0, 0))) for number in (0, 1)]
    compare(take(first), take(replace(first, byte=word((0, 8)))))
    differ(
        take(first), take(second), "int_key (4,), node 0 (condition): the branch or loop is 0 in one recording and 1 in the other"
    )


def test_graphs_differ() -> None:
    differ(take(), take(key=(5,)), "the recordings hold the keys [(4,)] and [(5,)]")
    differ(take(), take(region=1), "the recordings hold the keys [(4,)] and [(4,)]")
    edges = ((0, 1, 0, 0, 0), (1, 2, 0, 0, 0))
    said = "int_key (4,): the edges differ, first (1, 2, 0, 0, 0) and (1, 3, 0, 0, 0)"
    differ(take(edges=edges), take(edges=(edges[0], (1, 3, 0, 0, 0))), said)
    differ(take(edges=edges), take(edges=edges[:1]), "int_key (4,): the edges differ, first 2 and 1 of them")


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_the_calls_tensors_differ(side: str) -> None:
    one = value(word((0, 0)))
    for changes in ({"dtype": "int32"}, {"shape": (2, 2), "strides": (2, 1)}, {"strides": (2,)}):
        other = replace(one, **changes)  # type: ignore[arg-type]
        said = f"{(one.dtype, one.shape, one.strides)} and {(other.dtype, other.shape, other.strides)}"
        differ(take(**{side: (one, one)}), take(**{side: (one, other)}), f"int_key (4,): the {side} differ, first {said}")
    compare(take(**{side: (one,)}), take(**{side: (replace(one, place=word((1, 8))),)}))


def test_module_variables_differ() -> None:
    block = Block(data=bytes(8), words=())
    one = (state(block), state(block, "second"))
    for other, second in (
        (state(block, "third"), "third"), (state(Block(data=bytes(9), words=()), "second"), "second"),
        (state(block, "second", "cd" * 5 + "00" * 27), "second"),
    ):  # fmt: skip
        said = f"{('cd' * 6, 'second', 8)} and {(other.image[:12], second, len(other.block.data))}"
        differ(take(states=one), take(states=(one[0], other)), f"other module variables had changed, first {said}")
    differ(take(states=one), take(states=one[:1]), "other module variables had changed, first 2 and 1 of them")
    differ(take(), take(states=one[:1]), "other module variables had changed, first 0 and 1 of them")


def test_the_number_below_stale_bytes_has_four_bytes() -> None:
    """Both words look like addresses of different weights. Their low four bytes are equal and are a number; their high bytes are
    left from before."""
    nothing = (frozenset[int](), frozenset[int]())
    paired = PairedRanges(ranges=(RANGES, RANGES), pairing={}, hosts=nothing, pools=nothing)
    word = Word(at=8, readings=(Reading(range=0, offset=5),))
    other = Word(at=8, readings=(Reading(range=0, offset=6),))
    base = bytes(range(24))

    def stale(*changed: int) -> bool:
        data = bytearray(base)
        for at in changed:
            data[at] ^= 0xFF
        return _is_stale(Block(data=base, words=(word,)), Block(data=bytes(data), words=(other,)), word, other, paired)

    assert stale() and stale(12) and stale(15) and stale(7) and stale(4, 5, 6, 7, 12, 13)
    assert not any(stale(at) for at in range(8, 12))


def test_the_most_votes_pair_two_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pair of words range 3 of one process occurs with range 4 of the other one, in two pairs with range 3."""
    one, two = [Take.__new__(Take) for _ in range(2)]
    for take in (one, two):
        object.__setattr__(take, "ranges", RANGES)

    def word(range: int, offset: int) -> Word:
        return Word(at=0, readings=(Reading(range=range, offset=offset),))

    words = [(word(3, 8), word(4, 8)), (word(3, 16), word(3, 16)), (word(3, 24), word(3, 24)), (word(4, 8), word(4, 9))]
    monkeypatch.setattr(pairing, "_words", lambda a, b: words)
    assert pair_ranges(one, two)[3] == 3
    monkeypatch.setattr(pairing, "_words", lambda a, b: [(word(3, 16), word(4, 16)), *words, (word(3, 0), word(4, 0))])
    assert pair_ranges(one, two)[3] == 4


def test_an_address_in_a_block_has_eight_bytes() -> None:
    block = Block(data=bytes(range(1, 25)), words=())
    assert address_at(block, 8) == 0x100F0E0D0C0B0A09 and address_at(block, 0) == 0x0807060504030201
