"""Two graphs of the same operators run side by side, at a short size and padded at a long one, each operator tried by itself."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..model.user_code import place
from .padded_values import PaddedValue, Spot, Variation, alike, front, padded_part, placed, same, spots
from .row_axes import kept_rows, moves

SHAPE_ONLY = frozenset(
    {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "sym_size", "sym_numel", "sym_stride"}
)
"""Operators that take a tensor for its shape, dtype and device alone."""

UNWRITTEN = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted"})
"""Operators whose result holds anything, and is written to before it is read: zeros here."""

INDEXING = ("index", "gather", "embedding", "scatter", "take", "select", "put", "one_hot")
"""What the names of operators contain that take integers as positions."""

ORDERING = frozenset({"topk", "sort", "argsort", "argmax", "argmin", "max", "min", "median", "nanmedian", "kthvalue", "mode"})
"""Operators that may choose any of several equal entries: not tried with zeros alone."""

BLOCKS = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast"})
"""Higher-order operators that run a graph once."""

WHOLE = frozenset({"flex_attention"})
"""Higher-order operators that are tried as one: their graphs compute single entries."""

LARGE = 2**20
"""Entries from which an operator that surely keeps rows apart is believed to, and one that only moves entries is tried with other
values once: trying others takes longer than all else."""

FAILURES = (RuntimeError, IndexError, ValueError, AssertionError, ZeroDivisionError)


class ChangedByPadding(Exception):
    """A sentence about an operator."""


@dataclass(frozen=True, slots=True)
class _Body:
    """The graph of a higher-order operator, at both sizes."""

    short: GraphModule
    long: GraphModule


@dataclass(frozen=True, slots=True)
class _Call:
    """A node with its arguments at both sizes; the values in both are the same objects.  `values` are those."""

    node: Node
    short: tuple[Any, Any]
    long: tuple[Any, Any]
    values: Sequence[PaddedValue]

    @property
    def name(self) -> str:
        return str(getattr(self.node.target, "__name__", self.node.target)).partition(".")[0]

    @property
    def depends(self) -> bool:
        return any(value.depends for value in self.values) and self.name not in (SHAPE_ONLY | UNWRITTEN)

    @property
    def grows(self) -> bool:
        """Whether anything differs between the two sizes."""
        constants = [
            [leaf for leaf in tree_leaves(each) if not isinstance(leaf, PaddedValue | _Body)] for each in (self.short, self.long)
        ]
        return constants[0] != constants[1] or any(
            value.short is not value.long and (isinstance(value.short, torch.Tensor) or value.short != value.long)
            for value in self.values
        )

    def at_short(self, chosen: Mapping[int, tuple[Any, Any]]) -> Any:
        return self._run(self.short, lambda each: chosen[id(each)][0], lambda body: body.short)

    def at_long(self, chosen: Mapping[int, tuple[Any, Any]]) -> Any:
        return self._run(self.long, lambda each: chosen[id(each)][1], lambda body: body.long)

    def _run(self, given: Any, value: Callable[[PaddedValue], Any], body: Callable[[_Body], GraphModule]) -> Any:
        def concrete(leaf: Any) -> Any:
            if isinstance(leaf, PaddedValue):
                return value(leaf)
            return body(leaf) if isinstance(leaf, _Body) else leaf

        args, kwargs = tree_map(concrete, given)
        made = self.node.target(*args, **kwargs)
        if (
            getattr(self.node.target, "namespace", "") == "_c10d_functional"
        ):  # what a collective gives is there when it was waited for
            made = tree_map(torch.ops._c10d_functional.wait_tensor, made)
        return tree_map(lambda leaf: torch.zeros_like(leaf), made) if self.name in UNWRITTEN else made


@dataclass(frozen=True, slots=True)
class PaddedRun:
    """A run of two graphs for the dimension `name` at `sizes`, the short and the long one.

    `last`: the call is the end of a frame, not its beginning.  `generator`: of the values that operators are tried with.
    """

    name: str
    sizes: tuple[int, int]
    last: bool
    generator: torch.Generator

    def framed(self, short: torch.Tensor, frame: torch.Tensor, fixed: bool) -> PaddedValue:
        """An input of the call in a frame, which is the same for every call where `fixed`."""
        if short.shape == frame.shape:
            return PaddedValue(short, short, depends=True)
        start = (
            frame.dim() * [0] if not self.last else [large - small for small, large in zip(short.shape, frame.shape, strict=True)]
        )
        spot = tuple(
            [
                slice(None) if small == large else slice(at, at + small)
                for at, small, large in zip(start, short.shape, frame.shape, strict=True)
            ]
        )
        mask = torch.ones_like(frame[padded_part(spot, frame.shape)], dtype=torch.bool) if fixed else None
        return PaddedValue(short, placed(frame, spot, short), spot, mask, depends=True)

    def graphs(self, short: GraphModule, long: GraphModule, inputs: Sequence[PaddedValue]) -> list[PaddedValue]:
        """What both graphs give.  Raises ChangedByPadding."""
        if operators(short) != operators(long):  # also of a branch's or a loop's body
            raise ChangedByPadding(f"the model has other operators at another size of {self.name}")
        values: dict[Node, Any] = {}
        given = iter(inputs)
        pairs = list(zip(short.graph.nodes, long.graph.nodes, strict=True))
        last = {source: node for node, _ in pairs for source in node.all_input_nodes}
        for node, twin in pairs:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = self._attribute(_attribute(short, node.target), _attribute(long, twin.target))
            elif node.op == "output":
                made = tree_leaves(map_arg(node.args[0], values.__getitem__))
                return [each if isinstance(each, PaddedValue) else PaddedValue(each, each) for each in made]
            elif node.users:
                values[node] = self._called(node, twin, values)
            for source in node.all_input_nodes:
                if last[source] is node:
                    values.pop(source, None)
        raise AssertionError("a graph ends with its output")

    def _attribute(self, short: Any, long: Any) -> Any:
        if isinstance(short, GraphModule):
            return _Body(short, long)
        same_tensor = isinstance(short, torch.Tensor) and short.shape == long.shape and alike(short, long)
        if short is long or same_tensor:
            return PaddedValue(short, short)
        return PaddedValue(short, long, why=f"a constant of the model differs between the sizes of {self.name}")

    def _called(self, node: Node, twin: Node, values: Mapping[Node, Any]) -> Any:
        own = dict(zip(twin.all_input_nodes, node.all_input_nodes, strict=True))
        short = map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        long = map_arg((twin.args, dict(twin.kwargs)), lambda each: values[own[each]])
        if node.target is operator.getitem and not isinstance(short[0][0], PaddedValue):
            return short[0][0][node.args[1]]
        call = _Call(node, short, long, [leaf for leaf in tree_leaves(short) if isinstance(leaf, PaddedValue)])
        if call.name not in SHAPE_ONLY and (why := next((value.why for value in call.values if value.why), "")):
            raise ChangedByPadding(why)
        if not call.grows:
            base = {id(value): (value.short, value.short) for value in call.values}
            return tree_map(lambda leaf: PaddedValue(leaf, leaf, depends=call.depends), self._base(call, call.at_short, base))
        if not isinstance(node.target, torch._ops.HigherOrderOperator) or call.name in WHOLE:
            try:
                return self._operator(call)
            except FAILURES as failure:  # of comparing: PyTorch has no minimum of some dtypes, or no equality
                raise ChangedByPadding(f"{call.name} cannot be compared at two sizes{_at(call.node)}") from failure
        return self._higher_order(call)

    # --- one operator -------------------------------------------------------------------------------------------------------

    def _base(self, call: _Call, run: Callable[[Any], Any], given: Mapping[int, tuple[Any, Any]]) -> Any:
        try:
            return run(given)
        except FAILURES as failure:
            raise ChangedByPadding(f"{call.name} fails ({type(failure).__name__}){_at(call.node)}") from failure

    def _operator(self, call: _Call) -> Any:
        base = {id(value): (value.short, value.long) for value in call.values}
        short, spec = tree_flatten(self._base(call, call.at_short, base))
        long, other = tree_flatten(self._base(call, call.at_long, base))
        why = f"{call.name} joins what lies along {self.name}{_at(call.node)}"
        if spec != other:
            raise ChangedByPadding(why)
        tried = [(short, long)]
        whole = not any(value.depends and not isinstance(value.short, torch.Tensor) for value in call.values)
        kept = _kept_spot(call)
        moved = _moved(call)
        for found in self._variations(call, spec, moved) if call.depends and not kept else ():
            if isinstance(found, str):
                raise ChangedByPadding(why)
            if found is None:
                whole = False
            else:
                tried.append(found)
        made = [
            self._found([(one[place], two[place]) for one, two in tried], call, whole and not (kept or moved), why, kept)
            for place in range(len(short))
        ]
        return tree_unflatten(made, spec)

    def _variations(self, call: _Call, spec: TreeSpec, moved: bool) -> Iterator[tuple[list[Any], list[Any]] | str | None]:
        """What other values give: at both sizes, "fails" where only the long size fails, None where both do."""
        entrywise = _pointwise(call.node)
        ways = partial(
            Variation, indices=any(word in call.name for word in INDEXING), entrywise=entrywise, literal=_literal(call.node)
        )
        for variation in [ways(0, mixed=True)] if moved else [ways(-1), ways(1), ways(0, mixed=call.name in ORDERING)]:
            given = {id(value): value.varied(variation, self.generator) for value in call.values}
            try:
                short, structure = tree_flatten(call.at_short(given))
            except FAILURES:
                yield None
                continue
            try:
                long, other = tree_flatten(call.at_long(given))
            except FAILURES:
                yield None if entrywise else "fails"
                continue
            yield (short, long) if structure == other == spec else "fails"

    def _found(self, tried: Sequence[tuple[Any, Any]], call: _Call, whole: bool, why: str, kept: Spot) -> PaddedValue:
        """One value that an operator gives, found in what it gives at the long size; `tried` begins with the values of the run.

        `whole`: all variations were tried, so that what is the same in all is fixed.  `kept`: see `_kept_spot`.
        """
        short, long = tried[0]
        if not isinstance(short, torch.Tensor):
            equal = not call.depends or all(one == two or (one != one and two != two) for one, two in tried)
            return PaddedValue(short, long, depends=call.depends, why="" if equal else why)
        if short.shape == long.shape:
            if all(alike(one, two) for one, two in tried):
                return PaddedValue(short, short, depends=call.depends)
            return PaddedValue(short, long, depends=call.depends, why=why)
        if short.dim() == long.dim():
            for spot in [kept] if kept else spots(short, long, self.sizes, self.last):
                if all(two.shape == long.shape and alike(one, front(two, spot)) for one, two in tried):
                    fixed = _fixed([two[padded_part(spot, long.shape)] for _, two in tried], call.depends, whole)
                    joined = long if torch.equal(short, front(long, spot)) else placed(long, spot, short)
                    return PaddedValue(short, joined, spot, fixed, depends=call.depends)
        return PaddedValue(short, long, depends=call.depends, why=why)

    # --- higher-order operators ---------------------------------------------------------------------------------------------

    def _higher_order(self, call: _Call) -> Any:
        args = call.short[0]
        if call.name in BLOCKS:
            at = next(at for at, each in enumerate(args) if isinstance(each, _Body))
            return tuple(self.graphs(args[at].short, args[at].long, tree_leaves(args[at + 1 :])))
        if call.name == "cond":
            return self._cond(call, *args)
        if call.name == "while_loop":
            return self._while_loop(call, *args)
        raise ChangedByPadding(f"what {call.name} makes of padded entries along {self.name} is not known{_at(call.node)}")

    def _cond(self, call: _Call, chooses: Any, first: _Body, second: _Body, operands: Sequence[PaddedValue]) -> Any:
        branches = [self.graphs(each.short, each.long, operands) for each in (first, second)]
        chosen = branches[not bool(chooses.short if isinstance(chooses, PaddedValue) else chooses)]
        return tuple([self._either(call, own, pair) for own, pair in zip(chosen, zip(*branches, strict=True), strict=True)])

    def _either(self, call: _Call, own: PaddedValue, pair: Sequence[PaddedValue]) -> PaddedValue:
        """What a branch gave; the other may give it, too."""
        why = next((each.why for each in pair if each.why), "")
        if not why and not _same_spot(*[each.spot for each in pair]):
            why = f"the branches of {call.name} have what lies along {self.name} in different places{_at(call.node)}"
        return replace(_unknown(own), why=why)

    def _while_loop(
        self, call: _Call, condition: _Body, body: _Body, carried: Sequence[PaddedValue], others: Sequence[PaddedValue]
    ) -> Any:
        """By induction: one round keeps every carried value the same at both sizes, whatever the padded entries are."""
        before = [_unknown(each) for each in carried]
        (goes_on,) = self.graphs(condition.short, condition.long, [*before, *others])
        after = self.graphs(body.short, body.long, [*before, *others])
        if why := next((each.why for each in (goes_on, *after) if each.why), ""):
            raise ChangedByPadding(why)
        if not all(_same_spot(one.spot, two.spot) for one, two in zip(before, after, strict=True)):
            raise ChangedByPadding(f"{call.name} moves what lies along {self.name}{_at(call.node)}")
        given = {id(value): (value.short, value.long) for value in call.values}
        ended = [tree_leaves(self._base(call, run, given)) for run in (call.at_short, call.at_long)]
        return tuple(
            [
                replace(each, short=short, long=placed(long, each.spot, short) if each.spot else short)
                for each, short, long in zip(before, *ended, strict=True)
            ]
        )


def _unknown(value: PaddedValue) -> PaddedValue:
    """The value with padded entries that may be anything."""
    return replace(value, fixed=None, depends=True)


def _fixed(padded: Sequence[torch.Tensor], depends: bool, whole: bool) -> torch.Tensor | None:
    """Which of the padded entries are the same in all that was tried, None for none."""
    if depends and not whole:
        return None
    fixed = torch.ones_like(padded[0], dtype=torch.bool)
    for other in padded[1:]:
        fixed &= same(padded[0], other)
        if not bool(fixed.any()):
            return None
    return fixed


def _kept_spot(call: _Call) -> Spot:
    """Where the call lies in what a large operator gives that keeps its rows apart, () where that has to be tried.

    No padded entry of its inputs may be fixed: none of the result is called fixed, which is more than they have to be.
    """
    values, joined = kept_rows(call.node, call.short)
    if _pointwise(call.node):
        values = [value for value in call.values if value.spot]
    numbers = [[leaf for leaf in tree_leaves(each) if not isinstance(leaf, PaddedValue)] for each in (call.short, call.long)]
    if not _large_and_free(values) or numbers[0] != numbers[1]:
        return ()
    spot = values[0].spot
    others = [value for value in call.values if not any(value is each for each in values)]
    apart = any(value.spot or value.long is not value.short for value in others)
    wider = any(isinstance(value.short, torch.Tensor) and value.short.dim() > len(spot) for value in others)
    if apart or wider or not all(_same_spot(value.spot, spot) for value in values):
        return ()
    whole = all(isinstance(spot[axis], slice) and spot[axis] == slice(None) for axis in joined)
    return spot if whole else ()


def _moved(call: _Call) -> bool:
    """Whether a large operator does no more than move floating-point numbers, which are all different where they are drawn."""
    values = [value for value in call.values if value.spot]
    return moves(call.node) and _large_and_free(values) and all(value.long.is_floating_point() for value in values)


def _large_and_free(values: Sequence[PaddedValue]) -> bool:
    """Whether there are padded values, large ones, none of whose padded entries is fixed."""
    free = all(value.spot and value.depends and value.fixed is None for value in values)
    return bool(values) and free and values[0].long.numel() >= LARGE


def _same_spot(one: Sequence[Any], other: Sequence[Any]) -> bool:
    if len(one) != len(other):
        return False
    rows = zip(one, other, strict=True)
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b or a == b for a, b in rows
    )


def operators(module: GraphModule) -> list[str]:
    """The operators of a graph in order, by which two sizes of a program are alike."""
    return [f"{node.op} {node.target}" if node.op == "call_function" else node.op for node in module.graph.nodes]


def _attribute(module: Any, path: Any) -> Any:
    for name in str(path).split("."):
        module = getattr(module, name)
    return module


def _pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _literal(node: Node) -> float:
    """The first number among a node's arguments that an integer holds, 0 without."""
    found = [each for each in (*node.args, *node.kwargs.values()) if isinstance(each, int | float) and abs(each) < 2**31]
    return found[0] if found else 0


def _at(node: Node) -> str:
    where, line = place(node)
    return f" ({where}: {line})" if where else ""
