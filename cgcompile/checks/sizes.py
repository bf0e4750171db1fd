"""Rules about inputs with a fixed value, and about the number of int_keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from torch.fx import Node

from cgbundle.format.schema import Finding

from ..model.source import Sample
from .context import NOTE, RuleContext, finding


def non_tensor_input(context: RuleContext) -> Iterable[Finding]:
    """An input that is a number or a string.

    What it looks for: arguments of `inputs()` that are not tensors.  Defaults of forward() that `inputs()` does not pass do not
    count.
    Why CUDA cares: a number is part of the launch parameters of the kernels; another number needs another recording.
    Effect: the bundle holds the program for this value.  A call with another value is an error, and so is a call without it if the
    default differs.
    Fix: none needed; for several values, pass a tensor of no dimensions.
    Source: the handling of non-tensor inputs in torch/_inductor/cudagraph_trees.py (int keys); guards in torch.export.
    """
    for name, value in _numbers_and_texts(context.exported.flat.like):
        yield finding(
            "non-tensor-input", NOTE, f"the input {name!r} is fixed to {value!r}", None, "calls with another value are refused",
            "pass a tensor of no dimensions if it should vary",
        )  # fmt: skip


def _numbers_and_texts(like: Sample) -> Iterator[tuple[str, Any]]:
    """Yields the name and value of each number and string that inputs() passes."""
    names = [name for name, _ in like.call["call"]]
    for name, value in [*zip(names, like.args, strict=False), *like.kwargs.items()]:
        if isinstance(value, bool | int | float | str):
            yield name, value


def too_many_keys(sizes: Mapping[str, tuple[int, ...]], limit: int) -> Iterable[Finding]:
    """More int_keys than the default limit.

    What it looks for: the product of the sizes of the declared dimensions.
    Why it matters: every int_key is a recording of every graph region, with tables, a self-test, and seconds of build time.
    Effect: `cgcompile build` refuses, unless --max-keys is larger.
    Fix: use fewer sizes: `cgcompile sizes` chooses those that need the least padding for a log of requests.
    Source: PyTorch warns in the same place: cudagraph_dynamic_shape_warn_limit in torch/_inductor/config.py.
    """
    keys = prod(len(values) for values in sizes.values())
    if keys > limit:
        yield finding(
            "too-many-keys", NOTE, f"the sizes make {keys} int_keys, more than {limit}", None,
            "every int_key is recorded, and build refuses so many", f"give fewer sizes, or build with --max-keys {keys}",
        )  # fmt: skip


def small_region(nodes: Sequence[Node]) -> Iterable[Finding]:
    """Operations that could be in a graph, but run in the host region around them.

    What it looks for: operations that the partitioner merged into a host region: a few kernels between two host regions.
    Why it matters: a graph costs a launch, copies and a wait for the GPU; a few small operations cost less on the host.
    Effect: none on results.
    Fix: none needed; to remove the host regions, fix the findings of severity host around these operations.
    Source: SMALL in cgcompile/partition/split.py; cudagraph_min_partition_size in torch/_inductor/config.py.
    """
    count = f"{len(nodes)} operation{'' if len(nodes) == 1 else 's'}"
    yield finding(
        "small-region", NOTE, f"{count} between host regions, too few for a graph", nodes[0],
        "they run in the host region around them", "remove the obstacles around them",
    )  # fmt: skip
