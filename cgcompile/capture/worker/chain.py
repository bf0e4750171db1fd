"""Inside a recorder process: a program of several regions, for one key.

Graph regions are captured one after the other into one private pool, so that torch's allocator plans their shared arena: a value
that a later region reads is held and keeps its memory, any other gives it back to the regions behind.  Between them host regions
run in eager PyTorch on the CPU; in the bundle they are compiled.  Before a region is lowered its inputs hold what eager PyTorch
computes, because kernels may use them as indices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from cgbundle.format.schema import IntKey

from ...partition import Partition, partition
from ...partition.regions import Link, links
from ...targets.cuda.lowering import lower, repair
from ...targets.cuda.memory_layout import Landing, dense_strides
from ...targets.cuda.tensors import Spot, place_inputs, place_weights, spot_of, tensor_at
from .session import Captured, Session, Tell, capture_call, run_warm

Values = dict[str, torch.Tensor]
OnGraph = Callable[[int, Link, list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """The regions of a key: on the GPU those of kind graph, on the CPU those of kind host; the call's static inputs, and where what
    the host makes is put."""

    parts: Partition
    regions: tuple[Link, ...]
    static: tuple[torch.Tensor, ...]
    landing: dict[str, torch.Tensor]


def open_chain(session: Session, key: IntKey) -> Chain:
    """The regions of a key, with weights and inputs in their places."""
    assert session.sides is not None
    program, moved = session.sides
    parts = partition(program, dict(session.request.placements))
    given = [leaf for leaf in tree_leaves(session.calls[key][0]) if isinstance(leaf, torch.Tensor)]
    static = tuple(place_inputs(given, session.inputs))
    on_cpu, on_gpu = links(program, parts, given), links(moved, parts, static)
    regions = tuple([cpu if cpu.part.kind == "host" else gpu for cpu, gpu in zip(on_cpu, on_gpu, strict=True)])
    for link in regions:
        if link.part.kind == "graph":
            place_weights(
                link.module, session.request.weights, session.originals, {"weights": session.weights, "state": session.state}
            )
            repair(link.module)
    return Chain(
        parts=parts, regions=regions, static=static, landing=dict(_place(session, row) for row in session.request.landing[key])
    )


def _place(session: Session, row: Landing) -> tuple[str, torch.Tensor]:
    name, offset, dtype, shape, strides = row
    return name, tensor_at(session.inputs, offset, dtype, shape, strides)


def warm_up_chain(session: Session, key: IntKey, tell: Tell) -> None:
    """Lower the graph regions of a key and run them, so that the compile cache holds what they need.  Raises lowering-failed."""
    chain = open_chain(session, key)

    def lowered(region: int, link: Link, given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        call = _lowered(session, key, link, given, tell)
        with torch.no_grad():
            return tuple(call())

    _through(chain, lowered)


def capture_chain(session: Session, key: IntKey, tell: Tell) -> tuple[Captured, ...]:
    """Capture the graph regions of a key, in order.  Raises lowering-failed, not-capturable."""
    chain = open_chain(session, key)
    last = {name: place for place, link in enumerate(chain.regions) for name in link.part.inputs}
    values: Values = {}
    captured: list[Captured] = []

    def on_graph(region: int, link: Link, given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        call = _lowered(session, key, link, given, tell)
        tell(f"capturing {key}, {link.part.name}")
        pool = captured[0].graph.pool() if captured else None
        graph, result = capture_call(call, f"int_key {key}, {link.part.name}", pool)
        made = list(result)
        with torch.no_grad():
            for target, value in zip(made, link.module(*given), strict=True):
                target.copy_(value)
        kept = tuple([t for name, t in zip(link.part.outputs, made, strict=True) if name in chain.parts.outputs])
        spots = tuple(map(spot_of, given)), tuple(map(spot_of, made))
        captured.append(Captured(key=key, region=len(captured), graph=graph, inputs=spots[0], outputs=spots[1], kept=kept))
        return made

    def forget(region: int) -> None:
        for name in [name for name, place in last.items() if place == region and name not in chain.parts.outputs]:
            values.pop(name, None)

    _through(chain, on_graph, values, forget)
    return tuple(captured)


def replay_chain(session: Session, chain: Chain, captured: Sequence[Captured]) -> tuple[torch.Tensor, ...]:
    """Replay the graphs of a key, instantiated before, with the host regions between them; returns the outputs of the call."""
    graphs = iter(captured)
    kept: Values = {}

    def on_graph(region: int, link: Link, given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        item = next(graphs)
        item.graph.replay()
        torch.cuda.synchronize()
        names = [name for name in link.part.outputs if name in chain.parts.outputs]
        kept.update(zip(names, item.kept, strict=True))
        return [kept[name] if name in kept else _here(spot) for name, spot in zip(link.part.outputs, item.outputs, strict=True)]

    values = _through(chain, on_graph)
    return tuple([values[name] for name in chain.parts.outputs])


def _here(spot: Spot) -> torch.Tensor:
    """A tensor between two regions: only the host reads it through this, and what the host reads is dense."""
    dense = spot.strides == dense_strides(spot.shape, spot.strides)
    return spot.tensor() if dense else torch.empty(0, device="cuda")


def _through(
    chain: Chain, on_graph: OnGraph, values: Values | None = None, forget: Callable[[int], None] = lambda region: None
) -> Values:
    """Run all regions in order; `on_graph` does the graphs'.  Returns the values that are left."""
    values = {} if values is None else values
    values.update(zip(chain.parts.inputs, chain.static, strict=True))
    for place, link in enumerate(chain.regions):
        given = [values[name] for name in link.part.inputs]
        if link.part.kind == "graph":
            values.update(zip(link.part.outputs, on_graph(place, link, given), strict=True))
        else:
            with torch.no_grad():
                made = link.module(*[tensor.cpu() for tensor in given])
            for name, tensor in zip(link.part.outputs, made, strict=True):
                if name in chain.landing:
                    chain.landing[name].copy_(tensor)
                values[name] = chain.landing.get(name, tensor)
        del given
        forget(place)
    return values


def _lowered(session: Session, key: IntKey, link: Link, given: Sequence[torch.Tensor], tell: Tell) -> Callable[[], Any]:
    tell(f"lowering {key}, {link.part.name}")
    lowered = lower(link.module, session.request.level, session.request.specialize)

    def call() -> Any:
        return lowered(*given)

    run_warm(call, f"int_key {key}, {link.part.name}, {session.request.level}")
    return call
