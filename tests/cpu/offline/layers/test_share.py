"""A program split over several devices gives the results of the complete program, for any assignment of operations to devices."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from cgcompile.export.functionalization import functional_form
from cgcompile.export.weights import weight_tensors
from cgcompile.offline.collectives import COLLECTIVE
from cgcompile.offline.layers.assign import Assignment, assign_devices
from cgcompile.offline.layers.share import share_of
from tests.cpu.pipeline.layers_model import Layers
from tests.cpu.pipeline.layers_model import called as inputs
from tests.helpers.raising import raises


class Odd(torch.nn.Module):
    """A model with sizes that depend on other sizes, operations with several results, a transposed view, and a buffer that is
    written twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.arange(6.0))
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 36).reshape(6, 6))

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = torch.cat([ids[:, None] * self.held, places[:, None] - self.held]) @ self.weight  # (2 * batch, 6)
        self.held += x.sum(0)
        first, second = x.split(3, 1)
        best, where = second.topk(2, 1)
        turned = first.t() * 2
        self.held *= 0.5
        return x.reshape(-1, 12) * x.shape[0], best + self.held[0], where, turned, ids + 1


class Device(torch.fx.Interpreter):
    """Runs a device's share in a thread, which waits for the others at each exchange."""

    def __init__(self, program: ExportedProgram, rank: int, met: threading.Barrier, sent: list[Any]) -> None:
        super().__init__(program.graph_module)
        self.program, self.rank, self.met, self.sent = program, rank, met, sent

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not COLLECTIVE:
            output = super().call_function(target, args, kwargs)
            return output.fill_(77).clone() if target is torch.ops.aten.empty.memory_format else output
        tensor, kind, world, sender, _ = args
        assert kind == "broadcast" and tensor.is_contiguous()
        self.sent[self.rank] = tensor, sender
        self.met.wait(60)
        assert len({(other.shape, other.dtype, by) for other, by in self.sent}) == 1 and len(self.sent) == world
        came = self.sent[sender][0].clone()
        self.met.wait(60)
        return came

    def outcome(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Returns the outputs of a call, and the new contents of this device's buffers."""
        named, user_inputs = weight_tensors(self.program), iter(tensors)
        specs = self.program.graph_signature.input_specs
        arguments = [next(user_inputs) if spec.kind == InputKind.USER_INPUT else named[str(spec.target)].clone() for spec in specs]
        with torch.no_grad():
            values = self.run(*arguments)
        rows = list(zip(values, self.program.graph_signature.output_specs, strict=True))
        outputs = [value for value, spec in rows if spec.kind == OutputKind.USER_OUTPUT]
        return outputs, {str(spec.target): value for value, spec in rows if spec.kind == OutputKind.BUFFER_MUTATION}


def run(shares: Sequence[ExportedProgram], tensors: Sequence[torch.Tensor]) -> list[Any]:
    met, sent = threading.Barrier(len(shares)), [None] * len(shares)
    devices = [Device(program, rank, met, sent) for rank, program in enumerate(shares)]
    outcomes: list[Any] = [None] * len(shares)

    def work(rank: int) -> None:
        try:
            outcomes[rank] = devices[rank].outcome(tensors)
        except BaseException:
            met.abort()
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in outcomes
    return outcomes


def exported(model: torch.nn.Module) -> ExportedProgram:
    batch = Dim("batch", min=2, max=8)
    program = torch.export.export(model.eval().double(), inputs(4), dynamic_shapes=({0: batch}, {0: batch}))
    return functional_form(program)


def drawn(program: ExportedProgram, world: int, seed: int) -> Assignment:
    """Returns a random assignment to devices."""
    random, ranks = Random(seed), dict[str, int]()
    mutated = set(program.graph_signature.buffers_to_mutate.values())
    for name, target in program.graph_signature.inputs_to_buffers.items():
        if target in mutated:
            ranks[name] = random.randrange(world)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or isinstance(value, torch.SymInt):
            continue
        operands = node.all_input_nodes
        if node.target is operator.getitem:
            if operands[0].name in ranks:
                ranks[node.name] = ranks[operands[0].name]
        elif any(operand.name in ranks for operand in operands) or random.random() < 0.7:
            ranks[node.name] = random.randrange(world)
    return Assignment(ranks=ranks)


def check(program: ExportedProgram, assignment: Assignment, world: int) -> list[ExportedProgram]:
    shares = [share_of(program, assignment, rank, world) for rank in range(world)]
    for batch in (2, 5):
        tensors = inputs(batch)
        ((wanted, buffers),) = run([program], tensors)
        outcomes = run(shares, tensors)
        for outputs, _ in outcomes:
            torch.testing.assert_close(outputs, wanted)  # rounding of products depends on the layout of their operands
        owned = [name for _, contents in outcomes for name in contents]
        assert sorted(owned) == sorted(buffers), "a buffer belongs to one device"
        torch.testing.assert_close({name: value for _, contents in outcomes for name, value in contents.items()}, buffers)
    return shares


@pytest.mark.parametrize("model", [Layers, Odd])
def test_any_assignment_is_right(model: type[torch.nn.Module]) -> None:
    program = exported(model())
    for seed in range(12):
        world = 2 + seed % 2
        check(program, drawn(program, world, seed), world)


def test_layers_are_cut_where_the_bytes_are_equal() -> None:
    program = exported(Layers())
    state = sorted(set(program.graph_signature.buffers_to_mutate.values()))
    for world, wanted in ((2, [0, 0, 1, 1, 1]), (3, [0, 1, 1, 2, 2]), (5, [0, 1, 2, 3, 4])):
        owners, (assignment,) = assign_devices([program], state, world)
        assert [owners[f"layers.{number}.calls"] for number in range(5)] == wanted
        shares = check(program, assignment, world)
        for rank, share in enumerate(shares):
            weights = set(weight_tensors(share))
            assert {f"layers.{number}.up" in weights for number in range(5) if wanted[number] != rank} == {False}
            sent = [node for node in share.graph.nodes if node.target is COLLECTIVE]
            assert len(sent) == world - 1 + 3, "one value to the next device, and the outputs that a layer makes"


def test_an_entry_that_comes_first_and_resets_state_does_not_draw_it() -> None:
    class Reset(Layers):
        def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.reset(places)

    programs = [exported(Reset()), exported(Layers())]
    state = sorted(set(programs[1].graph_signature.buffers_to_mutate.values()))
    owners, (reset, _) = assign_devices(programs, state, 2)
    assert [owners[f"layers.{number}.calls"] for number in range(5)] == [0, 0, 1, 1, 1]
    for share in check(programs[0], reset, 2):
        assert not [node for node in share.graph.nodes if node.target is COLLECTIVE]


def test_what_is_small_is_read_on_every_device() -> None:
    program = exported(Layers())
    state = sorted(set(program.graph_signature.buffers_to_mutate.values()))
    _, (assignment,) = assign_devices([program], state, 2)
    shares = [share_of(program, assignment, rank, 2) for rank in range(2)]
    assert all("turns" in weight_tensors(share) for share in shares)


def test_what_cannot_be_split() -> None:
    class NoLayers(torch.nn.Module):
        def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return ids + places

    with raises("split-refused", match="no list of layers"):
        assign_devices([exported(NoLayers())], [], 2)
    program = exported(Layers())
    with raises("split-refused", match="with 6 elements or more"):
        assign_devices([program], [], 6)


def test_memory_that_is_read_as_it_lies() -> None:
    class Strided(torch.nn.Module):
        def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return (ids + places).as_strided((2,), (2,)) + 1

    program = exported(Strided())
    ranks = {node.name: 1 for node in program.graph.nodes if node.op == "call_function"}
    with raises("split-refused", match="as_strided depends on a value's memory layout"):
        share_of(program, Assignment(ranks=ranks), 1, 2)


def test_a_size_that_follows_from_data_goes_to_no_other_device() -> None:
    class Chosen(torch.nn.Module):
        def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return (ids[ids > 3] + 1).sum() + places

    program = exported(Chosen())
    chosen = next(node for node in program.graph.nodes if node.target is torch.ops.aten.index.Tensor)
    ranks = {node.name: 1 for node in program.graph.nodes if node.op == "call_function" and node.name != chosen.name}
    with raises("split-refused", match="which another device needs, cannot be computed"):
        share_of(program, Assignment(ranks={**ranks, chosen.name: 0}), 1, 2)
