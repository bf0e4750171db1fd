"""Groups operations that must stay in one region into components.  Pure Python."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


def components(count: int, edges: Iterable[tuple[int, int]], together: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Groups operations 0 to `count` - 1 into components.  Their order respects every edge (earlier, later).

    The members of each entry of `together` are in one component.  So are the operations on a path of edges between two of them,
    because a region cannot be left and entered again.  With each entry as a cycle, these are the strongly connected components
    (Tarjan 1972).
    """
    after: list[set[int]] = [set() for _ in range(count)]
    for earlier, later in edges:
        after[earlier].add(later)
    for members in together:
        for left, right in zip(members, [*members[1:], *members[:1]], strict=True):
            after[left].add(right)
    unordered = [tuple(sorted(component)) for component in _strongly_connected([sorted(readers) for readers in after])]
    return _ordered(unordered, after)


def _strongly_connected(after: Sequence[Sequence[int]]) -> list[list[int]]:
    """Tarjan's algorithm, without recursion because programs have chains of thousands of operations."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    waiting: set[int] = set()
    strong_components: list[list[int]] = []
    for root in range(len(after)):
        if root in index:
            continue
        work = [(root, iter(after[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        waiting.add(root)
        while work:
            node, readers = work[-1]
            for reader in readers:
                if reader not in index:
                    index[reader] = low[reader] = len(index)
                    stack.append(reader)
                    waiting.add(reader)
                    work.append((reader, iter(after[reader])))
                    break
                if reader in waiting:
                    low[node] = min(low[node], index[reader])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component: list[int] = []
                    while not component or component[-1] != node:
                        component.append(stack.pop())
                        waiting.discard(component[-1])
                    strong_components.append(component)
    return strong_components


def _ordered(components: Sequence[tuple[int, ...]], after: Sequence[set[int]]) -> tuple[tuple[int, ...], ...]:
    """Sorts components topologically.  If several can be next, takes the component whose first operation comes first."""
    component_of = {member: number for number, component in enumerate(components) for member in component}
    readers = [
        {component_of[reader] for member in component for reader in after[member]} - {number}
        for number, component in enumerate(components)
    ]
    pending = [0] * len(components)
    for component_readers in readers:
        for reader in component_readers:
            pending[reader] += 1
    ready = [(component[0], number) for number, component in enumerate(components) if not pending[number]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, number = heapq.heappop(ready)
        ordered.append(components[number])
        for reader in readers[number]:
            pending[reader] -= 1
            if not pending[reader]:
                heapq.heappush(ready, (components[reader][0], reader))
    return tuple(ordered)
