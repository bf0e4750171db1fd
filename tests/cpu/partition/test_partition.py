"""Regions that run one after the other give exactly the program's results, for every kind of obstacle and at several keys."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import cgcompile.model.devices.markers  # noqa: F401  defines the marker operators
from cgcompile.partition.crossing import crossings, effect_of
from cgcompile.partition.node_kinds import writes_to
from cgcompile.partition.region_modules import region_modules
from cgcompile.partition.split import Partition, partition
from cgcompile.transforms.prepared import without_markers
from tests.helpers.places import ROOT
from tests.helpers.raising import raises

to_host: Callable[[Tensor], Tensor] = torch.ops.cgcompile.to_host
to_device: Callable[[Tensor], Tensor] = torch.ops.cgcompile.to_device


class Model(nn.Module):
    """A function of a (batch, seq, 8) tensor, with four layers (`d` has the weight of `a`), a table and a buffer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.d.weight = self.a.weight
        self.table = nn.Embedding(10, 8)
        self.register_buffer("shift", torch.randn(8))
        self.register_buffer("scratch", torch.randn(8), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def nothing(m: Model, x: Tensor) -> Any:
    return m.b(m.a(x).relu())


def number(m: Model, x: Tensor) -> Any:
    h = m.a(x).relu()
    return m.b(h * h.sum().item())


def number_twice(m: Model, x: Tensor) -> Any:
    """The host needs a number before and after a graph, and reads it from its tensor both times."""
    h = m.a(x).relu()
    scale = h.sum().item()
    return m.c(m.b(h * scale).relu() + scale)


def number_of_ints(m: Model, x: Tensor) -> Any:
    """Arithmetic with a number and the batch."""
    count = (x > 0).sum().item()
    return m.a(x) * (count + x.shape[0] * 2) + m.b(x) * (count > 3)


def number_as_index(m: Model, x: Tensor) -> Any:
    row = (x.sum() > 0).sum().item()
    torch._check(row >= 0)
    torch._check(row < 8)
    return m.a(x) + x[:, :, row].unsqueeze(-1)


def number_checked(m: Model, x: Tensor) -> Any:
    """Only an assertion reads the number."""
    torch._check((x > 0).sum().item() <= 512)
    return m.a(x)


def number_asserted(m: Model, x: Tensor) -> Any:
    """An assertion determines the number, which torch then treats as known."""
    count = (x == x).sum().item()
    torch._check(2 * count == 1024)
    return m.a(x) * (count + 1)


def boolean(m: Model, x: Tensor) -> Any:
    return m.b(m.a(x) + x[x > 0].sum())


def boolean_twice(m: Model, x: Tensor) -> Any:
    """A tensor of data-dependent size is used before and after a graph: the host computes it twice instead of keeping it."""
    kept = x[x > 0]
    h = m.a(x) * kept.sum()
    return m.b(m.c(h).relu()) + kept.numel() + (kept * m.c(h).sum()).sum()


def nonzero_and_unique(m: Model, x: Tensor) -> Any:
    values, inverse = torch.unique((x * 3).long(), return_inverse=True)
    return m.a(inverse.float()), values.sum() + torch.nonzero(x > 0).sum()


def boolean_changed(m: Model, x: Tensor) -> Any:
    """The tensor of unknown size is mutated between two sums."""
    kept = x[x > 0]
    first = kept.sum()
    kept.mul_(2)
    return m.a(x) * first + kept.sum()


def copy(m: Model, x: Tensor) -> Any:
    return to_device(to_host(m.a(x).relu().sum(1))).softmax(-1)


def copy_and_work(m: Model, x: Tensor) -> Any:
    on_host = to_host(m.a(x)).cumsum(1)
    return m.b(to_device(on_host)), to_device(on_host)


def copy_without_return(m: Model, x: Tensor) -> Any:
    return to_host(m.a(x)), to_host(x)


def lookup(m: Model, x: Tensor) -> Any:
    return m.b(m.table((x > 0).long()).sum(2) + m.shift)


def branch(m: Model, x: Tensor) -> Any:
    h = m.a(x)
    return m.c(torch.cond(h.sum() > 0, lambda h: m.b(h), lambda h: h * 2, (h,))).flatten(0, 1)


def turns_with_sizes(m: Model, x: Tensor) -> Any:
    """A loop, and a branch inside it, that use the batch size."""
    h = m.b(x)
    rows = h.shape[0]

    def turn(i: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.cond(v.sum() > rows, lambda v: v * 0.5 + rows, lambda v: v + 1, (v,))

    zero = torch.zeros((), dtype=torch.int64)
    return m.c(torch.while_loop(lambda i, v: (i < rows) & (v.sum() < 100), turn, (zero, h))[1])


def branch_with_sizes(m: Model, x: Tensor) -> Any:
    """The branches use the batch size; one of them mutates a copy."""
    h = m.a(x)
    rows = x.shape[0]
    return m.c(torch.cond(h.sum() > 0, lambda h: h.clone().mul_(rows), lambda h: h + h.shape[1], (h,)))


def sizes(m: Model, x: Tensor) -> Any:
    """Numbers made of the batch and the sequence, on both sides of an obstacle."""
    batch, seq, _ = x.shape
    h = m.a(x).reshape(batch * seq, 8) / (seq**0.5)
    h = h * h.max().item() + torch.arange(batch * seq).unsqueeze(1)
    return h.reshape(batch, seq * 8)[:, : 4 * seq], torch.full((batch + 1,), seq)


def an_input(m: Model, x: Tensor) -> Any:
    return x, m.a(x) * x.sum().item(), x


def a_weight(m: Model, x: Tensor) -> Any:
    return m.shift, m.a(x) * x.sum().item(), m.a.weight


def only_an_input(m: Model, x: Tensor) -> Any:
    return x


def a_constant(m: Model, x: Tensor) -> Any:
    return torch.tensor([1.0, 2.0]), x[:, :, :2] * torch.tensor([3.0, 4.0]) * x.sum().item()


def weights_on_both_sides(m: Model, x: Tensor) -> Any:
    """`a` and `d` share a weight, which the host reads too; two graphs read the non-persistent buffer."""
    h = m.a(x) + m.scratch
    h = m.d(h) * h.mean().item() + m.a.weight.sum() * h.sum().item()
    return m.a(h) + m.scratch


def several(m: Model, x: Tensor) -> Any:
    h = m.a(x)
    left, right = h.split(4, dim=-1)
    scaled = left * right.sum().item()
    return {"first": m.b(torch.cat([scaled, right], -1)), "rest": (left, h)}


def writes(m: Model, x: Tensor) -> Any:
    """A tensor is filled through views, and results are mutated on both sides of an obstacle."""
    filled = torch.zeros(x.shape[0], x.shape[1], 8)
    filled[:, :, 1] = m.a(x)[:, :, 2]
    filled[:, :, 2] = x.sum().item()
    h = m.b(filled)
    h.add_(1.0)
    return h.relu_() * h.sum().item(), filled


def write_of_unknown_length(m: Model, x: Tensor) -> Any:
    count = (x.sum() > 0).sum().item()
    torch._check(count >= 0)
    torch._check(count <= 1)
    filled = torch.zeros(2, 8)
    filled[:count] = 1.0
    return m.a(x) + m.b(filled).sum()


def write_to_what_crossed(m: Model, x: Tensor) -> Any:
    """A graph mutates a result of the host, and the host mutates a result of a graph."""
    h = m.a(x) * x.sum().item()
    h.relu_()
    h = m.b(h)
    return h.mul_(h.max().item()) + 1


def view_of_what_is_written(m: Model, x: Tensor) -> Any:
    """The view is made before a host read, and is used after its tensor was mutated."""
    h = m.a(x)
    view = h.flatten(1)
    total = h.sum().item()
    h.add_(1.0)
    return m.b(h) * total, view.exp() * total, view


def write_after_a_read(m: Model, x: Tensor) -> Any:
    """The host reads a tensor that a graph mutates later."""
    h = m.a(x)
    scaled = h * h.sum().item()
    return m.b(h.mul_(2.0)) + scaled


def write_in_a_block(m: Model, x: Tensor) -> Any:
    """The block, one higher-order operator on the host, writes to a graph's tensor, of which a graph reads a view."""
    h = m.a(x).sum((0, 1))
    view = h.view(1, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h.mul_(h.sum().item())
    return m.b(view)


def alias_outside_training(m: Model, x: Tensor) -> Any:
    """In eval mode dropout returns its input, which the host then mutates and a graph reads."""
    h = m.a(x)
    same = nn.functional.dropout(h, 0.5, training=False)
    same.mul_(h.sum().item())
    return m.b(h)


def alias_without_schema(m: Model, x: Tensor) -> Any:
    """meshgrid returns views, which its schema does not declare."""
    h = m.a(x).sum((0, 1))
    column, _ = torch.meshgrid(h, h[:1], indexing="ij")
    column.mul_(h.sum().item())
    return m.b(h)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A function of a model, the kinds of its regions, and parts of the names of operators that the checks put on the host."""

    function: Callable[..., Any]
    kinds: str
    place: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        return self.function.__name__


CASES = (
    Case(function=nothing, kinds="g"),
    Case(function=number, kinds="ghg"),
    Case(function=number_twice, kinds="ghghg"),
    Case(function=number_of_ints, kinds="ghg"),
    Case(function=number_as_index, kinds="ghg"),
    Case(function=number_checked, kinds="gh"),
    Case(function=boolean, kinds="ghg"),
    Case(function=boolean_twice, kinds="ghghg"),
    Case(function=nonzero_and_unique, kinds="ghg"),
    Case(function=boolean_changed, kinds="ghg"),
    Case(function=copy, kinds="ghg"),
    Case(function=copy_and_work, kinds="ghg", place=("cumsum",)),
    Case(function=copy_without_return, kinds="gh"),
    Case(function=lookup, kinds="ghg", place=("embedding",)),
    Case(function=branch, kinds="ghg", place=("cond",)),
    Case(function=branch_with_sizes, kinds="g"),
    Case(function=turns_with_sizes, kinds="ghg", place=("while_loop",)),
    Case(function=sizes, kinds="ghg"),
    Case(function=an_input, kinds="gh"),
    Case(function=a_weight, kinds="gh"),
    Case(function=only_an_input, kinds="g"),
    Case(function=a_constant, kinds="gh"),
    Case(function=weights_on_both_sides, kinds="ghg"),
    Case(function=several, kinds="ghg"),
    Case(function=writes, kinds="ghgh"),
    Case(function=write_of_unknown_length, kinds="ghg"),
    Case(function=write_to_what_crossed, kinds="ghghg"),
    Case(function=view_of_what_is_written, kinds="gh"),
    Case(function=write_after_a_read, kinds="ghg"),
    Case(function=write_in_a_block, kinds="ghg"),
    Case(function=alias_outside_training, kinds="hg"),
    Case(function=alias_without_schema, kinds="ghg"),
)

KEYS = ((1, 1), (2, 5), (3, 2))
"""Batch and seq."""


def inputs(batch: int, seq: int) -> tuple[Tensor]:
    torch.manual_seed(batch * 10 + seq)
    return (torch.randn(batch, seq, 8),)


def exported(function: Callable[..., Any]) -> ExportedProgram:
    dynamic = {0: Dim("batch", min=1, max=64), 1: Dim("seq", min=1, max=64)}
    with torch.no_grad():
        return torch.export.export(Model(function).eval(), inputs(3, 4), dynamic_shapes=({**dynamic},), strict=False)


def placements(program: ExportedProgram, case: Case) -> dict[str, str]:
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    return {node.name: f"because of {part}" for node in nodes for part in case.place if part in str(node.target)}


@pytest.fixture(scope="module", params=CASES, ids=[case.name for case in CASES])
def cut(request: pytest.FixtureRequest) -> tuple[Case, ExportedProgram, Partition]:
    """Returns a case, its program and its regions, without merging small ones."""
    program = exported(request.param.function)
    return request.param, program, partition(program, placements(program, request.param), small=0)


Cut = tuple[Case, ExportedProgram, Partition]


def run(parts: Partition, modules: Sequence[GraphModule], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Runs the regions one after the other; values between them are copied, as between host and device."""
    values = dict(zip(parts.inputs, [tensor.clone() for tensor in tensors], strict=True))
    for part, module in zip(parts.regions, modules, strict=True):
        region_outputs = module(*[values[name].clone() for name in part.inputs])
        assert isinstance(region_outputs, tuple)
        assert not set(part.outputs) & values.keys()
        values.update(zip(part.outputs, [tensor.clone() for tensor in region_outputs], strict=True))
    return tuple([values[name] for name in parts.outputs])


def flat(result: Any) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(result)


def test_the_regions_have_the_kinds_that_the_obstacles_leave(cut: Cut) -> None:
    case, _, parts = cut
    assert "".join(part.kind[0] for part in parts.regions) == case.kinds
    counts = {"graph": 0, "host": 0}
    for part in parts.regions:
        counts[part.kind] += 1
        assert part.name == f"{part.kind}-{counts[part.kind]}"
        assert bool(part.reason) == (part.kind == "host")


def test_the_regions_one_after_the_other_give_what_the_program_gives(cut: Cut) -> None:
    _, program, parts = cut
    whole = program.module(check_guards=False)
    for key in KEYS:
        tensors = inputs(*key)
        with torch.no_grad():
            actual = run(parts, region_modules(program, parts, tensors), tensors)
            expected = flat(whole(*tensors))
        assert len(actual) == len(expected)
        for got, want in zip(actual, expected, strict=True):
            assert got.dtype == want.dtype and torch.equal(got, want), key


def test_what_a_region_reads_was_made_before(cut: Cut) -> None:
    _, program, parts = cut
    known = set(parts.inputs)
    names = {node.name: node for node in program.graph.nodes}
    for part in parts.regions:
        assert set(part.inputs) <= known
        assert set(part.operations) <= set(part.nodes)
        known |= set(part.outputs)
        for name in (*part.inputs, *part.outputs):
            assert isinstance(names[name].meta["val"], Tensor)
            assert all(isinstance(size, int) or "u" not in str(size) for size in names[name].meta["val"].shape)
    assert set(parts.outputs) <= known


def test_modules_hold_no_symbols_and_know_where_their_nodes_come_from(cut: Cut) -> None:
    _, program, parts = cut
    state = {**program.state_dict, **program.constants}
    traces = {node.name: node.meta.get("stack_trace") for node in program.graph.nodes}
    for part, module in zip(parts.regions, region_modules(program, parts, inputs(2, 5)), strict=True):
        assert [node.name for node in module.graph.nodes if node.op == "placeholder"] == list(part.inputs)
        for inner in [submodule for submodule in module.modules() if isinstance(submodule, GraphModule)]:
            for node in inner.graph.nodes:
                assert not isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
                assert not str(node.target).startswith("cgcompile.")
                assert node.target is not torch.ops.aten._assert_tensor_metadata.default
                if node.name in part.nodes and inner is module:
                    assert node.meta.get("stack_trace") == traces[node.name]
                    assert isinstance(node.target, HigherOrderOperator) or "test_partition.py" in traces[node.name]
        for name, weight in module.state_dict(keep_vars=True).items():
            assert weight is state[name]


def test_modules_can_be_exported_and_traced_again(cut: Cut) -> None:
    _, program, parts = cut
    values = dict(zip(parts.inputs, inputs(2, 5), strict=True))
    with torch.no_grad():
        for part, module in zip(parts.regions, region_modules(program, parts, inputs(2, 5)), strict=True):
            arguments = tuple([values[name].clone() for name in part.inputs])
            placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
            for node, tensor in zip(placeholders, arguments, strict=True):
                seen = node.meta["val"]
                assert (seen.shape, seen.dtype) == (tensor.shape, tensor.dtype)
            expected = module(*[tensor.clone() for tensor in arguments])
            again = torch.export.export(module, tuple([tensor.clone() for tensor in arguments]), strict=False)
            assert set(again.state_dict) | set(again.constants) >= set(module.state_dict())
            for got, want in zip(again.module()(*arguments), expected, strict=True):
                assert torch.equal(got, want)
            if part.kind == "graph":
                mode = FakeTensorMode(allow_non_fake_inputs=True)
                fakes = [mode.from_tensor(tensor) for tensor in arguments]
                with mode:
                    traced = make_fx(module)(*fakes)
                shapes = [tuple(node.meta["val"].shape) for node in traced.graph.find_nodes(op="output")[0].args[0]]
                assert shapes == [tuple(tensor.shape) for tensor in expected]
            values.update(zip(part.outputs, expected, strict=True))


def test_every_node_of_the_program_has_an_effect(cut: Cut) -> None:
    _, program, parts = cut
    for node in program.graph.nodes:
        if node.op == "call_function":
            effect = effect_of(parts, node.name)
            assert effect and not effect.endswith(".")
            assert ("host" in effect) == any(node.name in part.nodes for part in parts.regions if part.kind == "host")


# --- single facts ---------------------------------------------------------------------------------------------


def cut_of(function: Callable[..., Any], small: int = 0, **place: str) -> tuple[ExportedProgram, Partition]:
    program = exported(function)
    return program, partition(program, place, small=small)


def test_a_number_is_taken_again_from_its_tensor_and_does_not_cross() -> None:
    _, parts = cut_of(number_twice)
    assert [("item" in part.nodes) for part in parts.regions] == [False, True, False, True, False]
    assert "sum_1" in parts.regions[1].inputs and "sum_1" in parts.regions[3].inputs


def test_a_copy_alone_is_a_region_without_operations() -> None:
    program, parts = cut_of(copy)
    _, host, last = parts.regions
    assert (host.nodes, host.operations, host.inputs, host.outputs) == (("to_host",), (), ("sum_1",), ("to_host",))
    assert "softmax" in last.operations and last.inputs == ("to_host",)
    module = region_modules(program, parts, inputs(2, 5))[1]
    (same,) = module(tensor := torch.randn(2, 8))
    assert same is tensor


def test_reasons_are_those_of_the_placements() -> None:
    program = exported(number)
    parts = partition(program, {"item": "host-scalar", "mul": "data-dependent-follower"}, small=0)
    assert parts.regions[1].reason == "host-scalar, data-dependent-follower"
    assert partition(program, {}, small=0).regions[1].reason == "needs a value that depends on data"


def test_an_operation_that_is_placed_is_on_the_host() -> None:
    _, parts = cut_of(nothing, relu="incompatible-operator")
    assert [part.operations for part in parts.regions] == [("linear",), ("relu",), ("linear_1",)]
    assert parts.regions[1].reason == "incompatible-operator"


def test_a_small_graph_between_two_host_regions_is_merged_unless_it_is_heavy() -> None:
    def light(m: Model, x: Tensor) -> Any:
        row = m.a(x).sum((0, 1))
        return m.b((row * row.sum().item()).exp().relu() * row.max().item())

    def heavy(m: Model, x: Tensor) -> Any:
        row = m.a(x).sum((0, 1))
        return m.b(m.c(row * row.sum().item()).relu() * (row.max().item()))

    def large(m: Model, x: Tensor) -> Any:
        h = m.a(x)
        return m.b((h * h.sum().item()).exp().relu() * h.max().item())

    program = exported(light)
    parts = partition(program, {})
    assert [part.kind for part in parts.regions] == ["graph", "host", "graph"]
    assert [(merged.region, merged.nodes) for merged in parts.merged] == [("host-1", ("exp", "relu"))]
    with torch.no_grad():
        actual = run(parts, region_modules(program, parts, inputs(2, 5)), inputs(2, 5))
        assert torch.equal(actual[0], program.module(check_guards=False)(*inputs(2, 5)))
    for function in (heavy, large):
        kept = partition(exported(function), {})
        assert len(kept.regions) == 5 and not kept.merged, function


def test_views_of_a_part_cross_instead_of_the_whole() -> None:
    def part_of(m: Model, x: Tensor) -> Any:
        h = m.a(x)
        return m.b(h) * h[:, 0, 0].sum().item() + h[:, :1].nonzero().sum()

    _, parts = cut_of(part_of)
    assert not {"linear", "h"} & set(parts.regions[1].inputs)


def test_a_part_of_a_host_regions_result_crosses_instead_of_the_whole() -> None:
    program, parts = cut_of(lambda m, x: m.b(m.table((x > 0).long())[:, 0]), embedding="fallback-op")
    assert parts.regions[1].outputs == ("select",)
    assert region_modules(program, parts, inputs(2, 5))[1].graph.find_nodes(op="output")[0].args[0][0].meta["val"].shape == (
        2,
        8,
        8,
    )


def test_an_assertion_that_gives_a_number_its_value_stays() -> None:
    """When the assertion was missing, a bundle returned a result although the model raises an error."""
    _, parts = cut_of(number_asserted)
    kinds = {part.kind: sum("_assert_scalar" in name for name in part.nodes) for part in parts.regions}
    assert kinds["host"] >= 1 and kinds["graph"] == 0
    assert any("mul" in name for part in parts.regions if part.kind == "graph" for name in part.nodes)


def test_assertions_are_in_every_region_that_reads_their_values() -> None:
    _, parts = cut_of(boolean_twice)
    asserting = [sum("_assert_scalar" in name for name in part.nodes) for part in parts.regions]
    assert asserting == [0, 2, 0, 2, 0]
    assert not any("_assert" in name for part in parts.regions for name in part.operations)


def test_an_assertion_that_no_longer_holds_fails_as_in_the_program() -> None:
    program, parts = cut_of(number_checked)
    tensors = (torch.ones(20, 20, 8),)
    with torch.no_grad():
        for call in (
            lambda: program.module(check_guards=False)(*tensors),
            lambda: run(parts, region_modules(program, parts, tensors), tensors),
        ):
            with pytest.raises(RuntimeError, match="assertion failed"):
                call()


def test_what_only_the_host_reads_and_nothing_computes_does_not_cross() -> None:
    def arranged(m: Model, x: Tensor) -> Any:
        return m.b(m.a(x) * x.sum().item() + torch.arange(8))

    _, parts = cut_of(arranged, add="fallback-op")
    assert [name for part in parts.regions for name in part.nodes if "arange" in name] == ["arange"]
    assert "arange" in parts.regions[1].nodes and "arange" not in parts.regions[1].inputs


def test_crossings_count_every_copy_once() -> None:
    program, parts = cut_of(number_twice)
    modules = region_modules(program, parts, inputs(2, 5))
    transfers = {
        (crossing.value, crossing.source, crossing.target): (crossing.nbytes, crossing.copied)
        for crossing in crossings(parts, modules)
    }
    assert transfers["x", "call", "graph-1"] == (2 * 5 * 8 * 4, False)
    assert transfers["sum_1", "graph-1", "host-1"] == (4, True)
    assert transfers["sum_1", "graph-1", "host-2"] == (4, False)
    assert transfers["mul", "host-1", "graph-2"] == (2 * 5 * 8 * 4, True)
    assert transfers[parts.outputs[0], "graph-3", "call"] == (2 * 5 * 8 * 4, False)


def test_an_input_that_is_returned_crosses_nothing() -> None:
    program, parts = cut_of(only_an_input)
    assert crossings(parts, region_modules(program, parts, inputs(2, 5))) == ()


def test_effects_say_what_else_is_on_the_host_and_where() -> None:
    _, parts = cut_of(number)
    assert effect_of(parts, "item") == "this operation and the 1 after it run on the host between two graphs"
    assert effect_of(parts, "mul") == "this operation and the 1 before it run on the host between two graphs"
    assert effect_of(parts, "linear") == "it is part of graph-1"
    assert effect_of(parts, "elsewhere") == "nothing is computed for it when the program is replayed"
    _, parts = cut_of(copy)
    assert effect_of(parts, "to_host") == "a value is copied to the host between two graphs; nothing is computed there"
    _, parts = cut_of(nothing, linear="x", relu="x", linear_1="x")
    assert effect_of(parts, "relu") == (
        "this operation, the 1 before it and the 1 after it run on the host and nothing is left for a graph"
    )
    _, parts = cut_of(nothing, linear="x")
    assert effect_of(parts, "linear") == "this operation runs on the host before the first graph"
    _, parts = cut_of(nothing, linear_1="x")
    assert effect_of(parts, "linear_1") == "this operation runs on the host after the last graph"


def test_a_region_does_not_write_to_what_it_is_given() -> None:
    program, parts = cut_of(write_to_what_crossed)
    modules = region_modules(program, parts, inputs(2, 5))
    cloned = [module for module in modules if any(n.target is torch.ops.aten.clone.default for n in module.graph.nodes)]
    assert len(cloned) == 2
    for module in cloned:
        arguments = [torch.randn(node.meta["val"].shape) for node in module.graph.nodes if node.op == "placeholder"]
        before = [tensor.clone() for tensor in arguments]
        with torch.no_grad():
            module(*arguments)
        assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))


def test_a_block_with_an_obstacle_inside_is_on_the_host_as_a_whole() -> None:
    def block(m: Model, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = to_host(m.a(x)).exp()
        return m.b(h.float())

    program, parts = cut_of(block)
    assert [part.kind for part in parts.regions] == ["host", "graph"]
    with torch.no_grad():
        actual = run(parts, region_modules(program, parts, inputs(2, 5)), inputs(2, 5))
        assert torch.equal(actual[0], program.module(check_guards=False)(*inputs(2, 5)))


# --- refusals -------------------------------------------------------------------------------------------------


def test_an_output_of_unknown_size_is_refused_with_its_line() -> None:
    with raises("data-dependent-output", match=r"test_partition\.py:\d+: the output 'index' .* depends on data"):
        partition(exported(lambda m, x: x[x > 0]), {})


def test_a_placement_of_an_unknown_node_is_refused() -> None:
    program = exported(nothing)
    with raises("node-unknown", match="no node 'gone'"):
        partition(program, {"gone": "x"})
    with raises("node-unknown", match="'x' is not an operation"):
        partition(program, {"x": "x"})


def test_a_history_that_is_cut_off_is_no_write() -> None:
    """`torch.tensor()` ends with `detach_`; its numbers are constants, which no call changes."""

    class Made(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            wide = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
            return (x * wide.to(x.dtype)).sum()

    program = torch.export.export(Made(), (torch.randn(2, 4),))
    detach = next(node for node in program.graph.nodes if node.target is torch.ops.aten.detach_.default)
    assert detach.target._schema.is_mutable and writes_to(detach) == ()
    assert partition(program, {}, small=0).state == ()


def test_a_program_that_hands_back_state_is_refused() -> None:
    def counting(m: Model, x: Tensor) -> Any:
        m.shift.add_(1)
        return m.a(x)

    with raises("program-unsupported", match="BUFFER_MUTATION"):
        partition(exported(counting).run_decompositions({}), {})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((), "takes 1 tensors, the call has 0"),
        ((torch.randn(2, 5, 8, dtype=torch.float64),), "expected torch.float32 with 3"),
        ((torch.randn(2, 8),), "expected torch.float32 with 3"),
        ((torch.randn(2, 5, 7),), "axis 2: 7, expected 8"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors: tuple[Tensor, ...], message: str) -> None:
    program, parts = cut_of(nothing)
    with raises("inputs-unlike", match=message):
        region_modules(program, parts, tensors)


def test_every_refusal_is_one_of_the_packages() -> None:
    sources = [path.read_text() for path in sorted((ROOT / "cgcompile" / "partition").glob("*.py"))]
    raised = {code for source in sources for code in re.findall(r'(?:Build|Model)Error\(\s*"([a-z-]+)"', source)}
    assert raised == {"data-dependent-output", "inputs-unlike", "node-unknown", "program-unsupported"}


# --- markers --------------------------------------------------------------------------------------------------

LOADS = """
import sys, torch
program = torch.export.load(sys.argv[1])
assert not any("cgcompile" in name for name in sys.modules)
(x,), expected = torch.load(sys.argv[2])
made = program.module()(x)
print(all(torch.equal(a, b) for a, b in zip(made, expected, strict=True)))
"""


def test_a_program_without_markers_is_the_same_program(tmp_path: Path) -> None:
    program = exported(copy_and_work)
    bare = without_markers(program)
    old = [node for node in program.graph.nodes if "cgcompile" not in str(node.target)]
    assert [node.name for node in bare.graph.nodes] == [node.name for node in old]
    assert len(old) < len(program.graph.nodes)
    for mine, theirs in zip(bare.graph.nodes, old, strict=True):
        assert mine.meta.get("stack_trace") == theirs.meta.get("stack_trace")
    assert bare.graph_signature.input_specs == program.graph_signature.input_specs
    assert all(bare.state_dict[name] is weight for name, weight in program.state_dict.items())
    for key in KEYS:
        with torch.no_grad():
            pairs = zip(bare.module()(*inputs(*key)), program.module()(*inputs(*key)), strict=True)
        assert all(torch.equal(got, want) for got, want in pairs)
    torch.export.save(bare, tmp_path / "bare.pt2")
    with torch.no_grad():
        expected = bare.module()(*inputs(2, 5))
    torch.save((inputs(2, 5), tuple(expected)), tmp_path / "seen.pt")
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(tmp_path / "bare.pt2"), str(tmp_path / "seen.pt")],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.strip() == "True", done.stderr


def test_markers_of_inputs_of_outputs_and_in_blocks_are_taken_out() -> None:
    def everywhere(m: Model, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = to_host(m.a(x))
        return to_device(to_host(x)), to_device(h.float())

    program = exported(everywhere)
    bare = without_markers(program)
    modules = [module for module in bare.graph_module.modules() if isinstance(module, GraphModule)]
    assert len(modules) == 2
    assert not any("cgcompile" in str(node.target) for module in modules for node in module.graph.nodes)
    with torch.no_grad():
        pairs = zip(bare.module()(*inputs(2, 5)), program.module()(*inputs(2, 5)), strict=True)
    assert all(torch.equal(got, want) for got, want in pairs)


def test_a_program_that_has_no_markers_stays_itself() -> None:
    program = exported(number)
    assert without_markers(program) is program
