"""Rules about what the call's inputs fix, and about numbers of keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from torch.fx import Node

from cgbundle.format.schema import Finding

from ..model.source import Sample
from .context import NOTE, RuleContext, finding


def non_tensor_input(context: RuleContext) -> Iterable[Finding]:
    """An input that is a number or a text.

    What it looks for: what `inputs()` passes that is no tensor.  Defaults of forward() that it does not pass are none.
    Why CUDA cares: a number is baked into the launch parameters of the kernels; another number needs another recording.
    Effect: the bundle holds the program for this value, and refuses calls with another, or without it where the default differs.
    Fix: pass a tensor of no dimensions, or leave it so.
    Source: the handling of non-tensor inputs in torch/_inductor/cudagraph_trees.py (int keys); guards in torch.export.
    """
    for name, value in _numbers_and_texts(context.exported.flat.like):
        yield finding(
            "non-tensor-input", NOTE, f"the input {name!r} is fixed to {value!r}", None, "calls with another value are refused",
            "pass a tensor of no dimensions if it should vary",
        )  # fmt: skip


def _numbers_and_texts(like: Sample) -> Iterator[tuple[str, Any]]:
    """Those among the arguments that inputs() passes."""
    names = [name for name, _ in like.call["call"]]
    for name, value in [*zip(names, like.args, strict=False), *like.kwargs.items()]:
        if isinstance(value, bool | int | float | str):
            yield name, value


def too_many_keys(sizes: Mapping[str, tuple[int, ...]], limit: int) -> Iterable[Finding]:
    """More int_keys than are built without being asked.

    What it looks for: the product of the sizes of the declared dimensions.
    Why it matters: every int_key is a recording of every graph region: tables, a self-test, seconds of build time.
    Effect: `cgcompile build` refuses until it is told with --max-keys.
    Fix: fewer sizes: `cgcompile sizes` chooses those that waste the least padding on a trace of requests.
    Source: PyTorch warns in the same place: cudagraph_dynamic_shape_warn_limit in torch/_inductor/config.py.
    """
    keys = prod(len(values) for values in sizes.values())
    if keys > limit:
        yield finding(
            "too-many-keys", NOTE, f"the sizes make {keys} int_keys, more than {limit}", None,
            "every int_key is recorded, and build refuses so many", f"give fewer sizes, or build with --max-keys {keys}",
        )  # fmt: skip


def small_region(nodes: Sequence[Node]) -> Iterable[Finding]:
    """Operations that could be in a graph, and run in the host region around them.

    What it looks for: what the partitioner merged into a host region: a graph of a few kernels between two host regions.
    Why it matters: a graph costs a launch, copies and a wait for the GPU; a few small operations cost less where the tensors are.
    Effect: none on results.
    Fix: none needed; removing the obstacles around it removes the host regions.
    Source: SMALL in cgcompile/partition/split.py; cudagraph_min_partition_size in torch/_inductor/config.py.
    """
    count = f"{len(nodes)} operation{'' if len(nodes) == 1 else 's'}"
    yield finding(
        "small-region", NOTE, f"{count} between host regions, too few for a graph", nodes[0],
        "they run on the host, with what is around them", "remove the obstacles around them",
    )  # fmt: skip
