"""Branches and loops without a GPU: lowered as conditional nodes and interpreted on every path; results equal eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cgcompile.bundle.recordings import ConditionalNode, MemcpyNode, Recording
from cgcompile.export.higher_order.conditionals import obstacle
from cgcompile.offline.interpret.interpret import Stage, interpret
from cgcompile.offline.lower import inductor
from cgcompile.offline.lowered import Copy, Launch
from cgcompile.targets.architectures import arch
from tests.cpu.offline.test_interpret_lowered import task_of
from tests.cpu.offline.written_rows import tensor_of
from tests.helpers.models.conditional_models import MODELS, WIDTH, Layered


@pytest.mark.parametrize("name", ["nested", "carried", "read afterwards", "shifted", "overlapping", "chosen", "layered", "folded"])
def test_every_path_equals_eager_pytorch(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    make, inputs, kinds = MODELS[name]
    model, examples = make().eval(), inputs()
    with torch.no_grad():
        program = torch.export.export(model, (examples[0],), strict=False)
        expected = [model(x) for x in examples]
    assert len({tuple(map(float, [leaf.sum() for leaf in output])) for output in expected}) == len(examples)
    task = task_of(program, examples[0], examples, tmp_path)
    (recording,) = set(task.recordings)
    assert sorted(types(recording)) == list(kinds)
    (outcome,) = interpret([task], tmp_path, budget=1)
    read = iter(outcome.read)
    for stage, wanted in zip(task.stages, expected, strict=True):
        check(stage, wanted, [next(read) for _ in wanted])


def test_only_what_the_loop_alone_takes_is_not_copied(tmp_path: Path) -> None:
    make, inputs, _ = MODELS["read afterwards"]
    program = torch.export.export(make(), (inputs()[0],), strict=False)
    (recording,) = set(task_of(program, inputs()[0], inputs(), tmp_path).recordings)
    begin = next(node for node in recording.nodes if isinstance(node, ConditionalNode))
    before = recording.nodes[: recording.nodes.index(begin)]
    assert sum(isinstance(node, MemcpyNode) for node in before) == 3


def lowered_parts(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns the number of parts of a model that Inductor lowers."""
    program = torch.export.export(model.eval(), (torch.randn(4, WIDTH),), strict=False)
    parts: list[object] = []
    stock = inductor.lower_graph

    def counted(*arguments: Any) -> Any:
        parts.append(arguments)
        return stock(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(inductor, "lower_graph", counted)
        inductor.lower_key(program, (), (torch.randn(4, WIDTH),), arch("sm_90"))
    return len(parts)


def test_of_equal_layers_one_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    five, eight = [lowered_parts(Layered(count), monkeypatch) for count in (5, 8)]
    assert five == eight < 12
    assert lowered_parts(Layered(5, folded=True), monkeypatch) > five, "what is computed from weights is of these weights alone"


def test_a_program_of_equal_layers_has_the_launches_of_its_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, dropout=0.0) for _ in range(5)]).eval()
    x = torch.randn(2, 6, WIDTH)
    with torch.no_grad():
        program = torch.export.export(model, (x,), strict=False)
    apart = inductor.lower_key(program, (), (x,), arch("sm_90"))
    monkeypatch.setattr(inductor, "has_equal_layers", lambda module: False)
    whole = inductor.lower_key(program, (), (x,), arch("sm_90"))
    launches = [sum(isinstance(event, Launch) for event in lowered.events) for lowered in (apart, whole)]
    assert launches[0] <= launches[1] and not any(isinstance(event, Copy) for event in apart.events)


def types(recording: Recording) -> list[str]:
    return [node.type for node in recording.nodes if isinstance(node, ConditionalNode)]


def check(stage: Stage, wanted: Sequence[Tensor], contents: Sequence[bytes]) -> None:
    for value, want, content in zip(stage.read, wanted, contents, strict=True):
        got = tensor_of(content, value)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.allclose(got.double(), want.double(), rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "data": (lambda x: torch.cond(x.sum() > 0, lambda x: x[x > 0].sum(), lambda x: x.sum(), (x,)), "depends on data"),
    "scan": (
        lambda x: torch.cond(
            x.sum() > 0,
            lambda x: torch._higher_order_ops.scan(lambda c, r: (c + r, r * 1), x[0] * 1, x)[1],
            lambda x: x * 1,
            (x,),
        ),
        "control flow of another kind inside it",
    ),
    "fine": (lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)), ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_hold(name: str) -> None:
    function, reason = REFUSED[name]

    class Model(nn.Module):
        def forward(self, x: Tensor) -> object:
            return function(x)

    module = torch.export.export(Model(), (torch.randn(4, 6),), strict=False).graph_module
    (node,) = [node for node in module.graph.nodes if str(node.target) == "cond"]
    assert reason in obstacle(node, module) if reason else obstacle(node, module) == ""
