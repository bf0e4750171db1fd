"""Checks that a model's programs do not depend on the number of rows of state, by a second trace with more rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from ...errors import ModelError
from ...model.flat_module import FlatModule, held_weights
from ...model.side_effects import NOTHING, SideEffects
from ...model.source import StateRows, sample
from ...model.user_code import place
from ...util.progress import Tell
from ...util.scratch import scratch_folder
from ...util.workers import processors, run_forked
from ..export import export
from ..exported import Exported
from ..torch_export import export_dynamic, export_static

MORE = 3
"""Additional rows of state in the second trace."""


def same_with_more_rows(entries: Sequence[Exported], max_paths: int, tell: Tell) -> None:
    """Raises state-refused, with the line, if Python reads the number of rows, or a program depends on it.  Does not check what
    operations do with the state itself."""
    for entry, unchanged in zip(entries, _traced(entries, tell), strict=True):
        if unchanged:
            continue
        source, rows = entry.source, entry.source.rows
        tell(f"{source.entry}, exported with another number of rows of state")
        with with_more_rows(source.model, rows, MORE):
            other = export(source, entry.sizes, len(entries) == 1, max_paths, entry.written)
        pairs = list(zip(entry.programs.distinct, other.programs.distinct, strict=False))
        differing = next((difference for (_, one), (_, two) in pairs if (difference := _difference(one, two))), None)
        if differing is None and len(entry.programs.distinct) != len(other.programs.distinct):
            differing = None, "the number of exported programs differs"
        if differing is not None:
            node, change = differing
            counted = " and ".join([f"{row.number + MORE} {row.name}" for row in rows])
            where = place(node)[0] or source.label
            raise ModelError(
                "state-refused",
                f"{where}: {source.entry}() exports another program with {counted}: {change}",
                "do not read the number of rows in the model; index the rows",
            )


def _traced(entries: Sequence[Exported], tell: Tell) -> list[bool]:
    """Runs `_traced_alike` for every entry, in parallel in forked processes if possible."""
    works = {number: partial(_traced_alike, entry) for number, entry in enumerate(entries)}
    if len(entries) == 1 or processors() == 1 or torch.cuda.is_initialized():
        return [work(tell) for work in works.values()]
    with scratch_folder() as logs:
        unchanged = run_forked(works, dict.fromkeys(works, tell), logs, "worker-died")
    return [unchanged[number] for number in works]


def _traced_alike(entry: Exported, tell: Tell) -> bool:
    """Whether a trace without calls in eager PyTorch gives the same programs.  Returns False for a model that reads values of
    tensors or has other side effects: only a complete `export` can compare it."""
    source, first = entry.source, entry.flat
    if entry.obstacles or first.bounded or first.known or first.as_eager or first.asserted != NOTHING:
        return False
    tell(f"{source.entry}, with another number of rows of state")
    with with_more_rows(source.model, source.rows, MORE):
        flat = FlatModule(source.model, first.like, source.device, source.target_device, source.entry, source.capability)
        flat.weights = held_weights(source.model, entry.written)
        effects: list[SideEffects] = []
        flat.watch = effects.append
        for key, program in entry.programs.distinct:
            try:
                if entry.programs.dynamic:
                    other = export_dynamic(source, flat, entry.shapes, entry.sizes)
                else:
                    other = export_static(source, flat, sample(source, dict(zip(entry.sizes, key, strict=True))).tensors)
            except ModelError:
                return False
            side_effects = any(call.answers or call.reads or call.baked or call.obstacles for call in effects)
            if side_effects or _difference(program, other) is not None:
                return False
    return True


@contextmanager
def with_more_rows(model: torch.nn.Module, rows: Sequence[StateRows], more: int) -> Iterator[None]:
    """Replaces the buffers of `rows` by zeros with `more` rows while the context is active."""
    sizes = [(name, group.number + more) for group in rows for name in group.buffers]
    owners = [_owner(model, name) for name, _ in sizes]
    buffers = [owner._buffers[leaf] for owner, leaf in owners]
    try:
        for (owner, leaf), (_, number) in zip(owners, sizes, strict=True):
            value = owner._buffers[leaf]
            assert value is not None
            owner._buffers[leaf] = value.new_zeros((number, *value.shape[1:]))
        yield
    finally:
        for (owner, leaf), value in zip(owners, buffers, strict=True):
            owner._buffers[leaf] = value


def _owner(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _difference(one: ExportedProgram, two: ExportedProgram) -> tuple[Node | None, str] | None:
    difference = next(_graph_differences(one.graph_module, two.graph_module), None)
    if difference is not None:
        return difference
    for name, value in one.constants.items():
        other = two.constants.get(name)
        if isinstance(value, torch.Tensor) and not (isinstance(other, torch.Tensor) and _alike(value, other)):
            return None, f"the constant {name} differs"
    return None


def _alike(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two constants are equal.  Non-persistent buffers are constants, too.  If they are state, `other` has more rows, all
    zeros."""
    if value.dtype != other.dtype or value.shape[1:] != other.shape[1:]:
        return False
    return value is other or (torch.equal(value, other) if value.shape == other.shape else not other.any())


def _graph_differences(one: GraphModule, two: GraphModule) -> Iterator[tuple[Node | None, str]]:
    numbers = [{node: at for at, node in enumerate(module.graph.nodes)} for module in (one, two)]
    for mine, theirs in zip(one.graph.nodes, two.graph.nodes, strict=False):
        if mine.op != theirs.op or (mine.op == "call_function" and mine.target is not theirs.target):
            yield mine, f"{mine.target} becomes {theirs.target}"
            return
        texts = [_spelled(node.args, node.kwargs, numbering) for node, numbering in zip((mine, theirs), numbers, strict=True)]
        if texts[0] != texts[1]:
            changed = next((f"{a} becomes {b}" for a, b in zip(*texts, strict=False) if a != b), "other arguments")
            yield mine, f"in {mine.target}, {changed}"
        if mine.op == "get_attr":
            inner = [getattr(module, str(node.target), None) for module, node in ((one, mine), (two, theirs))]
            if isinstance(inner[0], GraphModule) and isinstance(inner[1], GraphModule):
                yield from _graph_differences(inner[0], inner[1])
    if len(one.graph.nodes) != len(two.graph.nodes):
        yield None, f"{len(one.graph.nodes)} operations become {len(two.graph.nodes)}"


def _spelled(args: Any, kwargs: Any, numbers: dict[Node, int]) -> list[str]:
    """Returns the arguments of a node as texts, with other nodes as numbers."""
    return [f"%{numbers[leaf]}" if isinstance(leaf, Node) else str(leaf) for leaf in tree_leaves((args, kwargs))]
