"""Layers (the parts between cuts) are valid, contain each operation once, and are as few as a search over all orders finds."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgcompile.partition.components import components
from cgcompile.partition.cuts import Kind, Layer, cut

Edges = list[tuple[int, int]]

KINDS: tuple[Kind, ...] = ("graph", "host", "either")


@st.composite
def graphs(draw: st.DrawFn, largest: int) -> tuple[list[Kind], Edges]:
    """Draws kinds and edges of up to `largest` operations."""
    count = draw(st.integers(0, largest))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=count, max_size=count))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return kinds, edges


def fewest(kinds: Sequence[Kind], edges: Edges) -> int:
    """Returns the fewest layers, by breadth-first search over every set of operations that a layer could hold."""
    before = [{a for a, b in edges if b == position} for position in range(len(kinds))]
    states = {(frozenset(), side) for side in ("graph", "host")}
    everything = frozenset(range(len(kinds)))
    for count in range(len(kinds) + 1):
        if any(done == everything for done, _ in states):
            return count
        states = {
            (done | layer, "host" if side == "graph" else "graph")
            for done, side in states
            for layer in closed_sets(everything - done, before, done, {side, "either"}, kinds)
        }
    raise AssertionError("no order found")


def closed_sets(
    rest: frozenset[int], before: list[set[int]], done: frozenset[int], allowed: set[str], kinds: Sequence[Kind]
) -> list[frozenset[int]]:
    """Returns every non-empty set of operations of the allowed kinds whose dependencies are in `done` or in the set."""
    usable = sorted(position for position in rest if kinds[position] in allowed)
    sets = [frozenset(usable[bit] for bit in range(len(usable)) if mask >> bit & 1) for mask in range(1, 1 << len(usable))]
    return [candidate for candidate in sets if all(before[position] <= done | candidate for position in candidate)]


def by_filling(kinds: Sequence[Kind], edges: Edges) -> int:
    """Returns the fewest layers if every layer takes all operations that it can. Tries both kinds for the first layer."""
    counts = []
    for first in (0, 1):
        left, count = set(range(len(kinds))), 0
        while left:
            side = ("graph", "host")[(first + count) % 2]
            ready = True
            took = 0
            while ready:
                waiting = {b for a, b in edges if a in left}
                ready = {position for position in left - waiting if kinds[position] in (side, "either")}
                left -= ready
                took += len(ready)
            count += 1
            if not took and count == 1:
                count = len(kinds) + 2  # excludes this kind as the first layer
        counts.append(count)
    return min(counts)


def check(layers: Sequence[Layer], kinds: Sequence[Kind], edges: Edges) -> None:
    """Checks that each operation occurs once where its kind may be, that layers alternate, and that dependencies hold."""
    order = [position for layer in layers for position in layer.operations]
    assert sorted(order) == list(range(len(kinds)))
    for layer in layers:
        assert layer.operations
        assert all(kinds[position] in (layer.kind, "either") for position in layer.operations)
        assert list(layer.operations) == sorted(layer.operations)
    assert all(left.kind != right.kind for left, right in pairwise(layers))
    place = {position: index for index, position in enumerate(order)}
    assert all(place[a] < place[b] for a, b in edges)


@given(graphs(largest=6))
def test_the_cuts_are_the_fewest_that_any_order_allows(graph: tuple[list[Kind], Edges]) -> None:
    kinds, edges = graph
    layers = cut(kinds, edges)
    check(layers, kinds, edges)
    assert len(layers) == fewest(kinds, edges)


def test_five_hundred_programs() -> None:
    """Random programs of up to 80 operations are chains with skip connections, like models. Many need several layers."""
    rng = random.Random(0)
    counts = []
    for _ in range(500):
        size = rng.randint(1, 80)
        kinds: list[Kind] = rng.choices(KINDS, weights=(8, rng.choice((1, 3)), 3), k=size)
        edges = sorted({(rng.randint(max(0, b - rng.choice((1, 3, 40))), b - 1), b) for b in range(1, size) for _ in range(2)})
        layers = cut(kinds, edges)
        check(layers, kinds, edges)
        assert len(layers) == by_filling(kinds, edges)
        counts.append(len(layers))
    assert max(counts) > 10


@given(graphs(largest=12))
def test_a_free_operation_is_on_the_host_only_where_no_graph_could_take_it(graph: tuple[list[Kind], Edges]) -> None:
    kinds, edges = graph
    layers = cut(kinds, edges)
    home = {position: number for number, layer in enumerate(layers) for position in layer.operations}
    for position, number in home.items():
        if kinds[position] == "either" and layers[number].kind == "host":
            low = max([home[a] for a, b in edges if b == position], default=0)
            high = min([home[b] for a, b in edges if a == position], default=len(layers) - 1)
            assert all(layers[index].kind == "host" for index in range(low, high + 1))


def chain(*kinds: Kind) -> tuple[list[Kind], Edges]:
    return list(kinds), [(position, position + 1) for position in range(len(kinds) - 1)]


def shape(layers: Sequence[Layer]) -> list[tuple[str, tuple[int, ...]]]:
    return [(layer.kind, layer.operations) for layer in layers]


def test_operations_move_only_if_that_saves_a_cut() -> None:
    """The last operation depends on nothing and could come first, but this would save no cut."""
    assert shape(cut(["graph", "host", "graph", "graph"], [(0, 1), (1, 2)])) == [("graph", (0,)), ("host", (1,)), ("graph", (2, 3))]


def test_operations_move_where_that_saves_a_cut() -> None:
    """There are two operations of the host, one of them between operations of a graph. If no operation moved, five layers would be
    necessary."""
    assert shape(cut(["graph", "host", "graph", "host", "graph"], [(0, 1), (0, 3), (1, 4), (2, 4)])) == [
        ("graph", (0, 2)),
        ("host", (1, 3)),
        ("graph", (4,)),
    ]


def test_no_operations_no_layers() -> None:
    assert cut([], []) == ()


def test_free_operations_alone_are_one_graph() -> None:
    assert shape(cut(["either", "either"], [(0, 1)])) == [("graph", (0, 1))]


@pytest.mark.parametrize("edge", [(1, 0), (1, 1), (-1, 0), (0, 2)])
def test_an_edge_must_point_forward(edge: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="does not point forward among 2 operations"):
        cut(["graph", "host"], [edge])


# --- small graphs ---------------------------------------------------------------------------------------------


def test_a_small_graph_between_two_host_layers_is_given_up() -> None:
    kinds, edges = chain("graph", "host", "graph", "graph", "host", "graph")
    assert shape(cut(kinds, edges, small=3)) == [("graph", (0,)), ("host", (1, 2, 3, 4)), ("graph", (5,))]
    assert len(cut(kinds, edges, small=2)) == 5


def test_an_operation_that_weighs_much_keeps_its_graph() -> None:
    kinds, edges = chain("graph", "host", "graph", "host", "graph")
    assert len(cut(kinds, edges, 5, [1, 1, 1, 1, 1])) == 3
    assert len(cut(kinds, edges, 5, [1, 1, 5, 1, 1])) == 5


def test_the_first_and_the_last_graph_stay_however_small() -> None:
    kinds, edges = chain("graph", "host", "graph")
    assert len(cut(kinds, edges, small=100)) == 3


def test_the_only_graph_stays_and_of_several_the_largest() -> None:
    assert len(cut(*chain("host", "graph", "host"), small=100)) == 3
    layers = cut(*chain("host", "graph", "host", "graph", "graph", "host", "graph", "host"), small=100)
    assert shape(layers) == [("host", (0, 1, 2)), ("graph", (3, 4)), ("host", (5, 6, 7))]


def test_what_another_graph_can_take_does_not_go_to_the_host() -> None:
    """Operation 3 of the small graph depends only on the first graph, and moves there."""
    kinds: list[Kind] = ["graph", "host", "graph", "graph", "host", "graph"]
    layers = cut(kinds, [(0, 1), (1, 2), (2, 4), (4, 5), (0, 3)], small=2)
    assert [layer.kind for layer in layers] == ["graph", "host", "graph"]
    assert set(layers[1].operations) == {1, 2, 4}


@given(graphs(largest=14), st.integers(0, 4))
def test_no_small_graph_is_left_between_host_layers(graph: tuple[list[Kind], Edges], small: int) -> None:
    kinds, edges = graph
    layers = cut(kinds, edges, small)
    taken = {position for layer in layers if layer.kind == "host" for position in layer.operations}
    check(layers, ["host" if k == "graph" and p in taken else k for p, k in enumerate(kinds)], edges)
    assert len(layers) <= len(cut(kinds, edges))
    if sum(layer.kind == "graph" for layer in layers) > 1:
        for layer in layers[1:-1]:
            assert layer.kind == "host" or sum(kinds[position] == "graph" for position in layer.operations) >= small
    assert any(layer.kind == "graph" for layer in layers) or "graph" not in kinds


# --- components ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.data())
def test_units_are_what_reaches_each_other_once_the_members_are_tied(count: int, data: st.DataObject) -> None:
    numbers = st.integers(0, count - 1)
    edges = sorted({(min(pair), max(pair)) for pair in data.draw(st.lists(st.tuples(numbers, numbers))) if pair[0] != pair[1]})
    together = data.draw(st.lists(st.lists(numbers, min_size=1, max_size=3, unique=True), max_size=3))
    units = components(count, edges, together)
    assert sorted(member for unit in units for member in unit) == list(range(count))
    reach = [{position} for position in range(count)]
    steps = edges + [(a, b) for members in together for a in members for b in members]
    for _ in range(count):
        for a, b in steps:
            for reached in reach:
                if a in reached:
                    reached.add(b)
    home = {member: number for number, unit in enumerate(units) for member in unit}
    for a in range(count):
        for b in range(count):
            assert (home[a] == home[b]) == (a in reach[b] and b in reach[a])
    assert all(home[a] <= home[b] for a, b in edges)


def test_what_is_between_two_members_comes_along() -> None:
    assert components(5, [(0, 1), (1, 2), (2, 3), (0, 4)], [(0, 2)]) == ((0, 1, 2), (3,), (4,))


def test_a_long_chain_needs_no_deep_stack() -> None:
    assert len(components(20_000, [(position, position + 1) for position in range(19_999)], [])) == 20_000


def test_the_cuts_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from cgcompile.partition import cuts, components; print(cuts.cut(['host'], []))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "host" in done.stdout, done.stderr
