"""Every rule reports a finding for one model, at the user's line, and none for a similar one. Placements include operations after
an obstacle."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cgcompile
from cgbundle.format.schema import Finding
from cgcompile.checks import check, refuse
from cgcompile.checks.findings import Checked
from cgcompile.checks.operators import DETERMINISTIC_SCATTER, INCOMPATIBLE
from cgcompile.checks.rules import RULES, name
from cgcompile.checks.sizes import too_many_keys
from cgcompile.errors import ModelError
from cgcompile.export.export import export
from cgcompile.export.exported import Exported
from cgcompile.export.paths.explore import PathsRefused
from cgcompile.model.load import load_source
from cgcompile.model.tracing.way import TooManyTurns
from cgcompile.util.explanations import explanations
from tests.cpu.models import rows
from tests.helpers.raising import raises

aten = torch.ops.aten

attention = nn.functional.scaled_dot_product_attention


@torch.library.custom_op("cgchecks::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def unsafe(x: torch.Tensor) -> torch.Tensor:
    """Doubles its input."""
    return x * 2


@torch.library.custom_op("cgchecks::plain", mutates_args=())
def plain(x: torch.Tensor) -> torch.Tensor:
    """Doubles its input."""
    return x * 2


@torch.library.custom_op("cgchecks::faceless", mutates_args=())
def faceless(x: torch.Tensor) -> torch.Tensor:
    """Doubles its input; has no fake implementation."""
    return x * 2


unsafe.register_fake(lambda x: torch.empty_like(x))
plain.register_fake(lambda x: torch.empty_like(x))


class Model(nn.Module):
    """Calls a function with this module, which has a weight and a buffer, and the input tensors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(10, 4))
        self.function = function

    def forward(self, *values: Any) -> Any:
        return self.function(self, *values)


def exported(function: Callable[..., Any] | nn.Module, inputs: Callable[..., Any] = rows) -> Exported:
    model = function if isinstance(function, nn.Module) else Model(function).eval()
    return export(load_source(model, inputs), {"batch": (1, 8)})


def labels(findings: tuple[Finding, ...]) -> list[str]:
    return [f"{finding.severity} {finding.rule}" for finding in findings]


def placed(checked: Checked) -> Mapping[str, str]:
    """Returns the placements of a dynamic program, which are the same for every int_key."""
    return next(iter(checked.placements.values()))


def source_line(number: int) -> str:
    return Path(__file__).read_text().splitlines()[number - 1].strip()


# --- models for the rules -----------------------------------------------------------------------------------------


def fill(m: Model, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[x > 0.5] = 0.0
    return y


def assign(m: Model, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[x[:, 0] > 0.5] = torch.arange(4.0)
    return y


def write_buffer(m: Model, x: torch.Tensor) -> torch.Tensor:
    m.table.add_(1)
    return x + m.table[0]


class Averages(nn.Module):
    """One line writes to six buffers, another line to one buffer."""

    def __init__(self) -> None:
        super().__init__()
        for place in range(6):
            self.register_buffer(f"mean{place}", torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place in range(6):
            getattr(self, f"mean{place}").add_(x.mean())
        self.calls.add_(1)
        return x * 2


class Tied(nn.Module):
    """A mutated buffer with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("again", self.table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table.add_(1)
        return x + self.table + self.again[0]


def count(m: Model, x: torch.Tensor) -> torch.Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return x + 1


def on_the_cpu(m: Model, x: torch.Tensor) -> torch.Tensor:
    host = x.cpu()
    return host * 2


def loop(m: Model, x: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros((), dtype=torch.long)
    return torch._higher_order_ops.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (zero, x))[1]


def observe(m: Model, x: torch.Tensor) -> torch.Tensor:
    switch, scale, zero = torch.ones(1, dtype=torch.long), torch.ones(1), torch.zeros(1, dtype=torch.int)
    low, high = torch.zeros(1), torch.ones(1)
    outputs = aten._fused_moving_avg_obs_fq_helper_functional.default(x, switch, switch, low, high, scale, zero, 0.01, 0, 255, -1)
    return outputs[0]


def checkpointed(m: Model, x: torch.Tensor) -> torch.Tensor:
    from torch._prims.rng_prims import run_and_save_rng_state

    return x + run_and_save_rng_state(aten.relu.default, x)[1]


def refuse_negative(m: Model, x: torch.Tensor) -> torch.Tensor:
    if (x < 0).all():
        raise ValueError("all are negative")
    return x + 1


def halved(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A loop without a bound."""
    while x.sum() > 1:
        x = x / 2
    return x


CALLS: list[int] = []
TABLES: dict[int, torch.Tensor] = {}


def printing(m: Any, x: torch.Tensor) -> torch.Tensor:
    print(x.shape)
    return x + 1


def listing(m: Any, x: torch.Tensor) -> torch.Tensor:
    CALLS.append(x.shape[0])
    return x + 1


def cached(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Adds to a global variable in the first call with a size only."""
    if x.shape[1] not in TABLES:
        print("a new table")
        TABLES[x.shape[1]] = torch.arange(x.shape[1])
    return x + TABLES[x.shape[1]]


class Clamped(nn.Module):
    """Writes to a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.clamp_(-1, 1)
        return x * self.scale


class Numbered(nn.Module):
    number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).number += 1
        return x + 1


CASES: list[tuple[str, str, Callable[..., Any] | nn.Module]] = [
    ("note mutated-buffer", "add_", write_buffer),
    ("refuse mutated-attribute", "", count),
    ("note mutated-input", "add_", lambda m, x: x.add_(1) * 2),
    ("note random-operation", "rand_like", lambda m, x: x + torch.rand_like(x)),
    ("note random-operation", "dropout", nn.Dropout()),
    ("note random-operation", "rrelu", nn.RReLU()),
    ("note random-operation", "scaled_dot_product_attention", lambda m, x: attention(x[None], x[None], x[None], dropout_p=0.1)),
    ("note random-operation", "multinomial", lambda m, x: torch.multinomial(x, 1)),
    ("refuse random-operation", "poisson", lambda m, x: torch.poisson(x)),
    ("refuse python-random", "", lambda m, x: x + random.random()),
    ("refuse clock-read", "", lambda m, x: x + time.time()),
    ("refuse unrepeatable-result", "", lambda m, x: x * 10 ** (30 * random.Random().random())),
    ("refuse rng-state-operation", "run_and_save_rng_state", checkpointed),
    ("note path", "", lambda m, x: x + 1 if x.sum() > 0 else x),
    ("refuse data-dependent-branch", "", halved),
    ("note asserted-value", "", refuse_negative),
    ("note baked-weight", "", lambda m, x: x + 1 if m.table.sum() > 0 else x),
    ("host host-scalar", "item", lambda m, x: x * x.max().item()),
    ("host host-scalar", "item", lambda m, x: x * x.max().tolist()),
    ("host host-scalar", "item", lambda m, x: torch.arange(x.sum().long().item()).sum() + x),
    ("host data-dependent-shape", "nonzero", lambda m, x: x + x.nonzero().sum()),
    ("host data-dependent-shape", "index", lambda m, x: x + x[x > 0.5].sum()),
    ("host data-dependent-shape", "masked_select", lambda m, x: x + x.masked_select(x > 0.5).sum()),
    ("host data-dependent-shape", "_unique2", lambda m, x: x + torch.unique(x).sum()),
    ("host data-dependent-shape", "unique_consecutive", lambda m, x: x + torch.unique_consecutive(x).sum()),
    ("host data-dependent-shape", "bincount", lambda m, x: x + torch.bincount(x.view(-1).long()).sum()),
    ("host data-dependent-shape", "repeat_interleave", lambda m, x: x + x.repeat_interleave(x[0].long(), dim=1).sum()),
    ("refuse data-dependent-shape", "index", lambda m, x: x[x > 0.5]),
    ("host data-dependent-select", "item", lambda m, x: x + x.t()[x.sum().long().item() % 4].sum()),
    ("host device-copy", "to_host", lambda m, x: x.cpu() * 2),
    ("host cpu-operation", "mul", on_the_cpu),
    ("host cpu-operation", "to_host", lambda m, x: torch.ones(4, device="cpu").to(x.device) + x),
    ("refuse several-devices", "", lambda m, x: x + x.cpu()),
    ("note pinned-memory", "", lambda m, x: x.cpu().pin_memory().cuda()),
    ("host control-flow", "cond", lambda m, x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))),
    ("host control-flow", "while_loop", loop),
    ("host control-flow", "map_impl", lambda m, x: torch._higher_order_ops.map(lambda row: row * 2, x)),
    ("host control-flow", "scan", lambda m, x: torch._higher_order_ops.scan(lambda c, r: (c + r, r * 1), m.table[0] * 1, x)[1]),
    ("note boolean-index-put", "index_put_", fill),
    ("host boolean-index-put", "index_put_", assign),
    ("host incompatible-operator", "_fused_moving_avg_obs_fq_helper_functional", observe),
    ("host cudagraph-unsafe", "unsafe", lambda m, x: unsafe(x)),
    ("note custom-operator", "plain", lambda m, x: plain(x)),
    ("note aliased-output", "view", lambda m, x: x.view(-1, 2, 2)),
    ("note aliased-output", "b_model_table", lambda m, x: (x + 1, m.table)),
    ("refuse mutated-attribute", "clamp_", Clamped()),
    ("note outside-effect", "", printing),
    ("note outside-effect", "", listing),
    ("note outside-effect", "", Numbered()),
    ("note training-mode", "", nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)).train()),
]  # fmt: skip
"""The finding, its node ("" for none), and the model."""

PASSED: list[tuple[str, Callable[..., Any] | nn.Module]] = [
    ("a write to a copy", lambda m, x: x.clone().add_(1)),
    ("a write to a new tensor", lambda m, x: torch.zeros_like(x).copy_(x)),
    ("a maximum that stays a tensor", lambda m, x: x * x.max()),
    ("dropout outside training", nn.Dropout().eval()),
    ("attention without dropout", lambda m, x: attention(x[None], x[None], x[None])),
    ("random slopes outside training", nn.RReLU().eval()),
    ("a choice by where", lambda m, x: torch.where(x.sum() > 0, x + 1, x - 1)),
    ("a mask that stays", lambda m, x: x + torch.where(x > 0.5, x, 0).sum()),
    ("a masked fill", lambda m, x: x.masked_fill(x > 0.5, 0.0)),
    ("nonzero of a fixed size", lambda m, x: x + torch.nonzero_static(x, size=4).sum()),
    ("repeats that are a number", lambda m, x: x.repeat_interleave(2, dim=1)),
    ("a position that is read on the GPU", lambda m, x: x.index_select(1, x.sum().long().remainder(4).reshape(1))),
    ("moves to where it is", lambda m, x: x.to(m.table.device).cuda() + torch.ones(4, device=x.device)),
    ("a copy to the host that nobody reads", lambda m, x: (x.cpu(), x + 1)[1]),
    ("an assertion on the GPU", lambda m, x: (torch._assert_async(x.sum() > 0), x + 1)[1]),
    ("an assertion about a size", lambda m, x: (torch._check(x.shape[0] > 0), x + 1)[1]),
    ("an integer index", lambda m, x: m.table[x[:, 0].long()]),
    ("an assignment by position", lambda m, x: torch.zeros_like(x).index_put_((x[:, 0].long(),), x)),
    ("a scatter", lambda m, x: torch.zeros_like(x).scatter_add(1, x.long(), x)),
    ("an associative scan", lambda m, x: x.cumsum(0)),
    ("topk", lambda m, x: x.topk(2).values),
    ("a global table that the first call makes", cached),
    ("batch normalization outside training", nn.BatchNorm1d(4).eval()),
]


@pytest.mark.parametrize(("expected", "node", "function"), CASES, ids=[f"{case[0]} {case[1]}" for case in CASES])
def test_every_rule_is_hit(expected: str, node: str, function: Callable[..., Any]) -> None:
    exported_model = exported(function)
    checked = check(exported_model)
    findings = checked.findings
    (hit, *_) = [finding for finding in findings if labels((finding,)) == [expected]] or [None]
    assert hit is not None, labels(findings)
    assert hit.node.rstrip("0123456789").rstrip("_") == node.rstrip("_") or hit.node == node
    assert all((hit.message, hit.effect, hit.fix)) and "\n" not in hit.message + hit.effect + hit.fix
    if not isinstance(function, nn.Module) and node != "b_model_table":
        file, _, line = hit.where.rpartition(":")
        assert (
            file == "tests/cpu/checks/test_checks.py"
            and hit.source == source_line(int(line)) != "return self.function(self, *values)"
        )
    if hit.severity == "host":
        assert placed(checked)[hit.node] == hit.rule


@pytest.mark.parametrize("function", [case[1] for case in PASSED], ids=[case[0] for case in PASSED])
def test_what_a_graph_can_hold_is_passed(function: Callable[..., Any]) -> None:
    exported_model = exported(function)
    checked = check(exported_model)
    findings = checked.findings
    assert labels(findings) == [] and placed(checked) == {}


@torch.library.custom_op("cgchecks::of_numpy", mutates_args=())
def of_numpy(x: torch.Tensor) -> torch.Tensor:
    """Doubles its input with NumPy, which PyTorch cannot trace."""
    return torch.from_numpy(x.numpy() * 2)


of_numpy.register_fake(lambda x: torch.empty_like(x))


def test_an_operator_that_needs_python_is_refused_where_the_host_runs_it() -> None:
    traced = exported(lambda self, x: plain(of_numpy(x)))
    assert not [finding for finding in check(traced).findings if finding.severity == "refuse"], "a capture records what it launches"
    for checked in (check(traced, "cpu"), check(traced, fallback_ops=["cgchecks::of_numpy", "cgchecks::plain"])):
        (refusal,) = [finding for finding in checked.findings if finding.severity == "refuse"]
        assert refusal.rule == "operator-without-code" and refusal.message.startswith(
            "cgchecks.of_numpy runs on the host without Python"
        )
        assert refusal.where.startswith("tests/cpu/checks/test_checks.py:")


def test_every_rule_has_a_case_or_a_test_of_its_own() -> None:
    rule_names = {
        "sparse-output", "deterministic-scatter", "fallback-op", "overlapping-input", "non-tensor-input", "too-many-keys",
        "small-region", "data-dependent-follower", "assert-scalar", "mismatched-integers", "near-ties",
        "operator-without-code", "operator-without-kernel", "unknown-collective", "widened-bound", "earlier-calls",
        "moved-to-gpu", "wrapped-module", "tensor-assertion", "quantized-weights",
    }  # fmt: skip
    assert {case[0].split()[1] for case in CASES} | rule_names == {
        explanation.name for explanation in explanations() if explanation.kind == "finding"
    }, "add a new rule to CASES"
    assert {name(rule) for rule in RULES} <= {explanation.name for explanation in explanations()}, "what --allow and explain know"


@pytest.mark.parametrize("rule", [*RULES, too_many_keys], ids=name)
def test_every_rule_explains_itself(rule: Callable[..., Any]) -> None:
    text = rule.__doc__ or ""
    assert [part for part in ("What it looks for: ", "Why", "Effect: ", "Fix: ", "Source: ") if part not in text] == []


# --- rules that need more than a function -------------------------------------------------------------------------


def test_a_bound_that_eager_pytorch_widens_is_told() -> None:
    (finding,) = cgcompile.check(Model(lambda m, x: (x * 1e4).sin()), rows, sizes=[2, 4], target="cpu").findings
    assert (finding.rule, finding.severity) == ("widened-bound", "note") and finding.message.endswith(" instead of 1.0e-04")


def test_operators_that_the_user_keeps_on_the_host() -> None:
    exported_model = exported(lambda m, x: plain(x.topk(2).values))
    for spelled in ("aten.topk", "aten::topk", "aten.topk.default"):
        checked = check(exported_model, fallback_ops=[spelled])
        findings = checked.findings
        assert labels(findings) == ["host fallback-op", "note custom-operator"] and findings[0].node == "topk"
        assert placed(checked) == {"topk": "fallback-op"}
    assert labels(check(exported_model, fallback_ops=["cgchecks::plain"]).findings)[0] == "host fallback-op"


def test_an_operator_that_is_not_called_is_no_fallback_op() -> None:
    with raises("fallback-op-unknown", match="'aten.tpok': the model calls no such operator") as caught:
        check(exported(lambda m, x: x.topk(2).values), fallback_ops=["aten.tpok"])
    assert "aten.topk" in caught.value.hint and caught.value.exit_code == 2


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Enables deterministic algorithms during a test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_scatters_under_deterministic_algorithms() -> None:
    for function in (
        lambda m, x: torch.zeros_like(x).scatter_add(1, x.long(), x),
        lambda m, x: torch.zeros_like(x).scatter_add_(1, x.long(), x),
        lambda m, x: torch.zeros_like(x).index_put_((x[:, 0].long(),), x),
    ):
        assert labels(check(exported(function)).findings) == ["host deterministic-scatter"]
    assert labels(check(exported(lambda m, x: x + 1)).findings) == []


def test_inputs_that_share_memory_or_are_numbers() -> None:
    def pair(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.rand(batch, 8)
        return both[:, :4], both[:, 4:]

    findings = check(exported(lambda m, x, y: x + y, pair)).findings
    assert labels(findings) == ["note overlapping-input"] and "'values_0' and 'values_1' share memory" in findings[0].message
    findings = check(exported(lambda m, x: x + 1, lambda batch: torch.rand(1, 4).expand(batch, 4))).findings
    assert labels(findings) == ["note overlapping-input"] and "is expanded" in findings[0].message
    findings = check(exported(lambda m, x, n: x * n, lambda batch: (torch.rand(batch, 4), 3))).findings
    assert labels(findings) == ["note non-tensor-input"] and "fixed to 3" in findings[0].message


def test_assertions_that_export_added_are_part_of_what_they_are_about() -> None:
    exported_model = exported(lambda m, x: torch.arange(x.sum().long().item()).sum() + x)
    assert labels(check(exported_model).findings) == ["host host-scalar"]
    (node,) = [node for node in exported_model.programs.first.graph.nodes if node.target is aten._assert_scalar.default]
    node.meta["stack_trace"] = 'File "/home/user/model.py", line 7, in forward\n    assert small'
    findings = check(exported_model).findings
    assert labels(findings) == ["host host-scalar", "note assert-scalar"]
    assert (findings[1].where, findings[1].source) == ("/home/user/model.py:7", "assert small")


def test_many_keys() -> None:
    assert list(too_many_keys({"batch": (1, 2), "seq": (1, 2)}, 4)) == []
    (finding,) = too_many_keys({"batch": (1, 2), "seq": (1, 2)}, 3)
    assert finding.rule == "too-many-keys" and "--max-keys 4" in finding.fix


# --- operations that follow an obstacle ---------------------------------------------------------------------------


def test_what_takes_a_value_that_depends_on_data_follows_until_sizes_are_known() -> None:
    exported_model = exported(lambda m, x: m.linear(x) + x[x > 0.5].sin().cos().sum().exp())
    checked = check(exported_model)
    findings = checked.findings
    (shape,) = [finding for finding in findings if finding.severity == "host"]
    assert shape.effect == "this operation and the 3 after it run on the host between two graphs"
    placements = placed(checked)
    assert {node: placements[node] for node in ("index", "sin", "cos", "sum_1")} == {
        "index": "data-dependent-shape", **dict.fromkeys(("sin", "cos", "sum_1"), "data-dependent-follower")
    }  # fmt: skip
    assert {"linear", "gt", "exp", "add"} & placements.keys() == set()


def test_what_only_the_host_uses_is_made_there() -> None:
    exported_model = exported(lambda m, x: (x.cpu() + torch.ones(4, device="cpu") * m.table[0]).cuda() + torch.zeros(4))
    placements = placed(check(exported_model))
    assert {"ones", "to_host", "mul", "add", "select"} <= placements.keys()
    assert {"to_device", "zeros", "add_1"} & placements.keys() == set()


def test_obstacles_inside_control_flow_place_the_whole_operator() -> None:
    exported_model = exported(lambda m, x: torch.cond(x.sum() > 0, lambda x: unsafe(x), lambda x: x - 1, (x,)))
    checked = check(exported_model)
    findings = checked.findings
    assert {finding.node for finding in findings if finding.severity == "host"} == {"cond"}
    assert placed(checked).keys() == {"cond"}


def test_branches_and_loops_become_conditional_nodes() -> None:
    def both(m: Any, x: torch.Tensor) -> torch.Tensor:
        return loop(m, torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)))

    checked = check(exported(both), conditionals=True)
    notes = [(finding.severity, finding.message) for finding in checked.findings if finding.rule == "control-flow"]
    assert notes == [("note", f"the GPU evaluates the condition of {name}") for name in ("cond", "while_loop")]
    assert not placed(checked)


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        (lambda x: unsafe(x), r"an operation inside it runs on the host \([\w-]+, tests/cpu/checks/test_checks.py:\d+\)"),
        (lambda x: x[x > 0].sum() + x, r"a value inside it depends on data \(index, tests/cpu/checks/test_checks.py:\d+\)"),
    ],
    ids=["host", "data"],
)
def test_a_branch_of_the_hosts_takes_all_there(inside: Any, reason: str) -> None:
    checked = check(exported(lambda m, x: torch.cond(x.sum() > 0, inside, lambda x: x - 1, (x,))), conditionals=True)
    (control_flow,) = [finding for finding in checked.findings if finding.rule == "control-flow"]
    assert control_flow.severity == "host"
    assert re.fullmatch(
        f"the CPU evaluates the condition of cond, and both branches run there, since {reason}", control_flow.message
    )
    assert "cond" in placed(checked)


def test_a_loop_with_something_of_the_hosts_turns_there() -> None:
    def counted(m: Any, x: torch.Tensor) -> torch.Tensor:
        start = torch.zeros((), dtype=torch.int64)
        return torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + x[x > 0].sum()), (start, x.sin()))[1]

    checked = check(exported(counted), conditionals=True)
    (control_flow,) = [finding for finding in checked.findings if finding.rule == "control-flow"]
    assert control_flow.severity == "host" and control_flow.message.startswith(
        "the CPU evaluates the condition of while_loop, and every iteration runs there"
    )
    assert re.search(r"since a value inside it depends on data \(index, \S+test_checks.py:\d+\)$", control_flow.message)


def test_writes_to_a_buffer_of_two_names_are_refused() -> None:
    with raises("state-shared", match="the buffers 'table' and 'again' share memory"):
        check(exported(Tied()))


def test_buffers_that_one_line_writes_to_are_one_note() -> None:
    messages = [finding.message for finding in check(exported(Averages())).findings]
    assert messages == [
        "forward() writes to the buffer 'calls'",
        "forward() writes to 6 buffers: 'mean0', 'mean1', 'mean2' and 3 more",
    ]


def test_nothing_is_placed_for_the_cpu() -> None:
    exported_model = exported(lambda m, x: (x.cpu() * 2).cuda() + x[x > 0.5].sum() + x.cpu())
    assert labels(check(exported_model, "cpu").findings) == []
    writing = exported(lambda m, x: x.add_(1) * x.max().item())
    assert labels(check(writing, "cpu").findings) == ["note mutated-input"]


def test_strict_refuses_what_is_on_the_host() -> None:
    checked = check(exported(lambda m, x: x * x.max().item()))
    refuse(checked, False, (), "size")
    with raises("check-refused", match=r"test_checks.py:\d+: host-scalar: "):
        refuse(checked, True, (), "size")


# --- PyTorch's own lists ------------------------------------------------------------------------------------------


def test_pytorch_lists_nothing_that_no_rule_knows() -> None:
    listed = getattr(torch._inductor.utils, "FORBIDDEN_CUDAGRAPH_OPS", frozenset())
    elsewhere = {"run_and_save_rng_state", "run_with_rng_state", "aten._local_scalar_dense", "aten._assert_scalar"}
    assert listed <= INCOMPATIBLE | elsewhere


@pytest.mark.parametrize("spelled", sorted(DETERMINISTIC_SCATTER | INCOMPATIBLE))
def test_the_operators_that_are_listed_exist(spelled: str) -> None:
    namespace, packet, *overload = spelled.split(".")
    if namespace == "aten" and overload:
        assert hasattr(getattr(aten, packet), overload[0])


# --- the whole report ---------------------------------------------------------------------------------------------


class Five(nn.Module):
    """Five obstacles between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(12)])
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:6]:
            x = torch.relu(layer(x))
        x = x / x.abs().max().item()
        selected = x[x > 0].sum()
        if round(selected.item(), 1) > 3:
            x = x * 2
        for layer in self.layers[6:]:
            x = torch.relu(layer(x))
        self.seen += 1
        return x + selected + torch.rand_like(x)


class Turning(nn.Module):
    """A loop whose body reads the number of positive elements on the host."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = torch.zeros((), dtype=torch.int64, device=x.device)
        return torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + x[x > 0].sum()), (start, x.sin()))[1] * 2


def test_a_report_says_what_becomes_of_a_loop_with_the_host_inside() -> None:
    report = cgcompile.check(Turning().eval(), rows, sizes=[1, 8], target="cuda")
    (control_flow,) = [finding for finding in report.findings if finding.rule == "control-flow"]
    assert "and every iteration runs there, since a value inside it depends on data (index, " in control_flow.message
    assert control_flow.effect == "this operation and the 1 before it run on the host between two graphs"
    assert [(region.kind, region.reason) for region in report.regions] == [("graph", ""), ("host", "control-flow"), ("graph", "")]
    assert dict(report.regions[1].operations)["while_loop"] == 1


def lines(report: cgcompile.Report) -> dict[str, str]:
    return {finding.rule: finding.source for finding in report.findings}


def test_five_obstacles_in_one_run() -> None:
    report = cgcompile.check(Five().eval(), rows, sizes=[1, 8], target="cuda")
    assert lines(report) == {
        "mutated-buffer": "self.seen += 1",
        "random-operation": "return x + selected + torch.rand_like(x)",
        "data-dependent-branch": "if round(selected.item(), 1) > 3:",
        "host-scalar": "x = x / x.abs().max().item()",
        "data-dependent-shape": "selected = x[x > 0].sum()",
    } | ({"small-region": lines(report)["small-region"]} if "small-region" in lines(report) else {})
    assert report.refused and all(finding.where and finding.fix for finding in report.findings)
    assert [region.kind for region in report.regions] == ["graph", "host", "graph"]
    assert dict(report.regions[0].operations)["linear"] == dict(report.regions[2].operations)["linear"] == 6
    assert ("item", 1) in report.regions[1].operations and report.regions[1].reason
    assert all(number > 0 for region in report.regions for _, number in region.reads)


def test_a_report_without_obstacles() -> None:
    report = cgcompile.check(nn.Linear(4, 4), rows, target="cuda")
    assert (report.findings, report.refused, report.assumed) == ((), False, ("batch",))
    assert [region.kind for region in report.regions] == ["graph"]
    assert report.regions[0].reads == (("input", 8 * 4 * 4),), "under the name in the model"


def test_a_report_for_the_cpu_has_no_regions() -> None:
    report = cgcompile.check(Model(lambda m, x: x * x.max().item()), rows, target="cpu")
    assert (report.target, report.findings, report.regions) == ("cpu", (), ())


def test_nobody_named_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    for here, target in (("", "cpu"), ("sm_90", "cuda")):
        monkeypatch.setattr("cgcompile.targets.choice._here", lambda here=here: here)
        assert cgcompile.check(nn.Linear(4, 4), rows).target == target


def test_strict_and_host_ops_in_a_report() -> None:
    model = Model(lambda m, x: x.topk(2).values)
    assert not cgcompile.check(model, rows, fallback_ops=["aten.topk"], target="cuda").refused
    assert cgcompile.check(model, rows, fallback_ops=["aten.topk"], strict=True, target="cuda").refused


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        (lambda m, x: faceless(x) + 1, "custom-operator"),
        (lambda m, x: torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([x, x + 1]), 0.0), "sparse-output"),
        (lambda m, x: x + torch.chunk(x[x > 0], 2)[0].sum(), "data-dependent-branch"),
        (lambda m, x: torch.cov(x, aweights=x[0].abs()), "data-dependent-branch"),
    ],
    ids=["faceless", "nested", "branch", "branch of an operator"],
)
def test_what_stops_the_export_is_a_finding(function: Callable[..., Any], rule: str) -> None:
    report = cgcompile.check(Model(function), rows, target="cuda")
    assert labels(report.findings) == [f"refuse {rule}"]
    assert report.findings[0].where.startswith("tests/cpu/checks/test_checks.py:") and report.findings[0].source
    assert "was not checked" in report.findings[0].effect and report.unpartitioned


def test_an_operator_of_cpp_without_a_fake_implementation_is_named_with_the_remedy(tmp_path: Path) -> None:
    library = torch.library.Library("cgchecks_cpp", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    model = Model(lambda m, x: torch.ops.cgchecks_cpp.twice(x) + 1)
    with raises("export-failed", match="needs a fake implementation of the operator cgchecks_cpp::twice") as caught:
        cgcompile.build(model, rows, sizes=[1, 2], target="cpu", out=tmp_path / "x.cgb")
    assert "register_fake('cgchecks_cpp::twice')" in caught.value.hint
    library._destroy()


def test_what_stops_only_a_dynamic_export_is_found_in_the_programs_of_the_sizes() -> None:
    report = cgcompile.check(Model(lambda m, x: x.to_sparse().to_dense()), rows, target="cuda")
    (refusal,) = report.findings
    assert (refusal.severity, refusal.rule) == ("refuse", "sparse-output")
    assert refusal.where.startswith("tests/cpu/checks/test_checks.py:") and "to_sparse" in refusal.source
    assert refusal.message == "to_sparse gives a tensor of the layout torch.sparse_coo"
    assert "was not checked" not in refusal.effect
    assert "to_sparse" in report.per_size


def test_other_failures_stay_errors() -> None:
    with raises("eager-failed", match="test_checks.py"):
        cgcompile.check(Model(lambda m, x: x @ x), rows, target="cuda")
    with raises("structure-unsupported"):
        cgcompile.check(Model(lambda m, x: 3), rows, target="cuda")
    with raises("target-unavailable"):
        cgcompile.check(nn.Linear(4, 4), rows, target="sm_1")


def test_a_loop_without_bound_is_told_with_its_line_where_torch_export_stops_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The export of such a loop gives no program, so the check can only report the error. An example is torchdiffeq's dopri5."""

    def stopped(*_args: Any, **_options: Any) -> Any:
        turns = TooManyTurns("solver.py:7", "while t < end:", ", called from model.py:3")
        refused = PathsRefused("data-dependent-branch", turns, "this loop has no known bound", "take fixed steps")
        raise ModelError("data-dependent-branch", "solver.py:7: this loop has no known bound", refused.hint) from refused

    monkeypatch.setattr("cgcompile.pipeline.check.export", stopped)
    (finding,) = cgcompile.check(nn.Identity(), lambda: torch.ones(4)).findings
    assert (finding.where, finding.source, finding.fix) == ("solver.py:7", "while t < end:", "take fixed steps")
    assert finding.message == "this loop has no known bound, called from model.py:3"
