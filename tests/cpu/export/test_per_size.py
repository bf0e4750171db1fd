"""Models that torch.export cannot keep dynamic get a program for every int_key."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from cgcompile.checks import check
from cgcompile.export.export import export, refuse_branches
from cgcompile.export.exported import Exported
from cgcompile.export.functionalization import functional
from cgcompile.export.signature.signature import describe_signature
from cgcompile.model.flat_module import ProgramModule, run_eager
from cgcompile.model.load import load_source
from cgcompile.model.source import sample
from cgcompile.targets.weights import shapes_of
from cgcompile.transforms.padding.proof import prove_padding
from cgcompile.transforms.prepared import Prepared, prepare
from tests.cpu.models import Batched
from tests.helpers.raising import raises


class Holding(nn.Module):
    """Calls a function with this module, which has several tensors, and the inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(8, 8)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(self, *tensors)


def rows(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 8),)


def exported(function: Callable[..., Any], inputs: Callable[..., Any] = rows, **sizes: tuple[int, ...]) -> Exported:
    torch.manual_seed(0)
    return export(load_source(Holding(function).eval(), inputs), sizes or {"batch": (1, 3, 8)})


def prepared(exported: Exported) -> Prepared:
    functionalized = {key: functional(program) for key, program in exported.programs.distinct}
    return prepare(exported, describe_signature(exported), functionalized, markers=False)


def branch(m: Holding, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x) if x.shape[0] > 4 else x * 2


def alone(m: Holding, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x) if x.shape[0] == 1 else x * 2


def order_statistic(m: Holding, x: torch.Tensor) -> torch.Tensor:
    return x.kthvalue((x.shape[0] + 1) // 2, dim=0).values


def loop(m: Holding, x: torch.Tensor) -> torch.Tensor:
    h = x[0] * 1
    for i in range(1, x.shape[0]):
        h = torch.tanh(h + x[i])
    return h


def number(m: Holding, x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor(float(int(x.shape[0])))


def halves(m: Holding, x: torch.Tensor) -> torch.Tensor:
    return x.topk(max(1, int(x.shape[0] * 0.5)), dim=0).values


def kernels_of_rows(m: Holding, x: torch.Tensor) -> torch.Tensor:
    """A convolution with other weights for every row: the rows are the groups."""
    return nn.functional.conv1d(x[None], m.linear(x)[:, None, :3], groups=x.shape[0])[0]


@pytest.mark.parametrize("function", [branch, alone, order_statistic, loop, number, halves, kernels_of_rows])
def test_every_key_has_a_program_that_gives_what_the_model_gives(function: Callable[..., Any]) -> None:
    exported_model = exported(function)
    assert not exported_model.programs.dynamic and "batch" in exported_model.programs.reason
    ready = prepared(exported_model)
    for key in exported_model.programs.by_key:
        tensors = sample(exported_model.source, {"batch": key[0]}).tensors
        (want,) = run_eager(ready.reference, tensors).outputs
        (got,) = ready.programs.at(key).module()(*tensors)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    "function", [lambda m, x: m.linear(x), lambda m, x: torch.einsum("bi,bij->bj", x, m.experts[x.argmax(-1) % 4])]
)
def test_what_can_be_dynamic_stays_dynamic(function: Callable[..., Any]) -> None:
    exported_model = exported(function)
    if torch.__version__ >= "2.13":  # torch 2.11 cannot keep `w[index]` dynamic
        assert exported_model.programs.dynamic and len(exported_model.programs.distinct) == 1 and not exported_model.programs.reason


def counted(m: Holding, x: torch.Tensor) -> torch.Tensor:
    m.calls.add_(1)
    return m.linear(x) + m.calls


def test_the_only_size_of_a_model_with_state_is_a_constant() -> None:
    """Such a model needs no padding, and a symbolic size would make tracing and compiling slower."""
    exported_model = exported(counted, batch=(8,))
    assert not exported_model.programs.dynamic and "one size" in exported_model.programs.reason and len(exported_model.shapes) == 1
    assert describe_signature(exported_model).outputs[0].shape == (8, 8)
    assert exported(counted, batch=(1, 8)).programs.dynamic and exported(lambda m, x: m.linear(x), batch=(8,)).programs.dynamic


def test_a_mixture_of_experts_is_right_at_every_size() -> None:
    prepared_model = prepared(
        exported(lambda m, x: torch.einsum("bi,bij->bj", x, m.experts[x.argmax(-1) % 4]) * (2 if x.shape[0] > 4 else 1))
    )
    assert prepared_model.signature.outputs[0].shape == ("batch", 8) and len(prepared_model.programs.distinct) == 3


def test_literals_of_one_name_that_differ_get_names_of_their_own() -> None:
    exported_model = exported(number)
    values = {name: value.item() for name, value in exported_model.programs.weights().items() if "lifted" in name}
    assert sorted(values.values()) == [1.0, 3.0, 8.0]
    for key, program in exported_model.programs.by_key.items():
        (name,) = [name for name in program.constants if "lifted" in name]
        assert values[name] == key[0]


def test_weights_are_shared() -> None:
    programs = exported(branch).programs
    storages = {program.state_dict["model.linear.weight"].data_ptr() for _, program in programs.distinct}
    assert len(storages) == 1 and len(shapes_of(programs.weights())) == 4


def test_state_is_the_union_of_what_the_programs_write() -> None:
    def counting(m: Holding, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 4:
            m.calls.add_(1)
        return x + m.calls

    ready = prepared(exported(counting, batch=(2, 8)))
    assert ready.state == ("model.calls",) and ready.self_test_calls == 2


def test_random_numbers_of_some_sizes() -> None:
    ready = prepared(exported(lambda m, x: x + torch.rand_like(x) if x.shape[0] > 4 else x * 2, batch=(2, 8)))
    assert ready.generator and ready.state == (ready.generator,)
    for size in (2, 8):
        ran = run_eager(ready.reference, (torch.zeros(size, 8),), calls=2)
        assert ran.state[ready.generator.removeprefix("model.")].tolist() == [0, 2 if size == 8 else 0]


def test_two_dimensions_and_their_product() -> None:
    def joined(m: Holding, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(x) if x.shape[1] > 4 else x
        return y.reshape(-1, 8), torch.cat([x[0], x[:, 0]])

    exported_model = exported(joined, lambda batch, seq: (torch.randn(batch, seq, 8),), batch=(1, 3), seq=(2, 8))
    first, second = describe_signature(exported_model).outputs
    assert first.shape == (("*", "batch", "seq"), 8) and second.shape == (("+", "batch", "seq"), 8)


# --- padding ------------------------------------------------------------------------------------------------------


def proved(function: Callable[..., Any], **sizes: tuple[int, ...]) -> tuple[str, bool, str]:
    exported_model = exported(function, **sizes)
    (dimension,) = prove_padding(prepared(exported_model), lambda text: None)
    return dimension.pad, dimension.chunk, dimension.reason


def test_a_branch_between_the_sizes_is_found() -> None:
    pad, chunk, reason = proved(branch, batch=(1, 2, 8))
    assert (pad, chunk) == ("no", False) and "with batch=3 was padded with zeros to 8" in reason


def test_programs_of_other_operators_are_not_padded_though_outputs_are_alike() -> None:
    pad, chunk, reason = proved(lambda m, x: m.linear(x) if x.shape[0] > 4 else torch.mul(m.linear(x), 1), batch=(2, 8))
    assert (pad, chunk) == ("no", False) and reason.endswith("its operators cannot be compared between sizes of batch")


def test_programs_of_the_same_operations_are_padded_and_cut() -> None:
    assert proved(lambda m, x: m.linear(x) * (2.0 + 0 * int(x.shape[0])), batch=(2, 5))[:2] == ("rows", True)


def test_what_joins_rows_is_read_off_two_programs() -> None:
    pad, chunk, reason = proved(lambda m, x: x * float(int(x.shape[0]) > 0) + 0 * x.sum(0), batch=(2, 5))
    assert (pad, chunk) == ("zeros", False) and reason.startswith("sum combines elements along batch")


def test_a_shape_of_its_own_between_the_sizes_is_not_padded() -> None:
    pad, _, reason = proved(lambda m, x: torch.zeros(max(1, int(x.shape[0] * 0.5)), 8), batch=(1, 8))
    assert pad == "no" and "has the unexpected shape" in reason


# --- findings -----------------------------------------------------------------------------------------------------


def test_findings_are_told_once_with_the_keys_where_they_differ() -> None:
    def read(m: Holding, x: torch.Tensor) -> torch.Tensor:
        y = x * x.sum().item()
        if x.shape[0] > 4:
            y = y + x.max().item()
        return y

    exported_model = exported(read, batch=(2, 8))
    checked = check(exported_model)
    assert sorted(finding.message for finding in checked.findings if finding.severity == "host") == [
        "the CPU reads a number out of a tensor and waits for the GPU",
        "the CPU reads a number out of a tensor and waits for the GPU (at batch=8)",
    ]
    assert checked.placements[2,].keys() < checked.placements[8,].keys()


# --- what stays refused -------------------------------------------------------------------------------------------


def test_a_size_at_which_eager_pytorch_fails_is_refused_with_the_line() -> None:
    def fails(m: Holding, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 4, 8).sum(1) if x.shape[0] != 8 else x

    with raises("size-excluded", match=r"test_per_size.py:\d+: the model fails in eager PyTorch at batch=6: "):
        exported(fails, batch=(4, 6, 8))


def test_a_size_beyond_the_models_own_names_one_at_which_it_runs() -> None:
    def places(m: Holding, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(6.0)[torch.arange(x.shape[0])].unsqueeze(-1)

    with raises("size-excluded", match="it runs at batch=4: ") as caught:
        exported(places, batch=(4, 9))
    assert "batch=9" in str(caught.value)


def test_an_output_whose_axes_change_is_refused() -> None:
    with raises("structure-unsupported", match="its dtype or its number of axes changes with the sizes"):
        describe_signature(exported(lambda m, x: x if x.shape[0] > 4 else x.sum(0)))


def test_a_branch_on_data_is_no_matter_of_sizes() -> None:
    exported_model = exported(lambda m, x: x * 2 if x.sum() > 0 else x)
    assert exported_model.programs.dynamic
    assert [obstacle.rule for obstacle in exported_model.obstacles] == ["path"]


def test_sizes_without_a_rule_are_listed_up_to_a_limit() -> None:
    def ragged(m: Holding, x: torch.Tensor) -> torch.Tensor:
        return x[0].repeat(1 + (int(x.shape[0]) * 7919) % 13, 1)

    exported_model = exported(ragged, batch=(1, 2, 3, 5))
    shape = describe_signature(exported_model).outputs[0].shape
    assert shape != (1, 8)
    with raises("shape-irregular", match="its sizes follow no rule, and are too many to list"):
        describe_signature(exported(ragged, batch=tuple(range(1, 40, 2))))


def while_exported(m: Holding, x: torch.Tensor) -> torch.Tensor:
    """Omits a mask during export, as some libraries do."""
    return m.linear(x) if torch.compiler.is_exporting() else m.linear(x) * 2


def is_fake(x: torch.Tensor) -> bool:
    return isinstance(x, torch._subclasses.FakeTensor)


def on_fake(m: Holding, x: torch.Tensor) -> torch.Tensor:
    """Keeps a mask of ones if it cannot be read, as transformers does."""
    return m.linear(x) * (2 if is_fake(torch.ones(3, 8)) else 3)


def on_fake_inputs(m: Holding, x: torch.Tensor) -> torch.Tensor:
    """Like `on_fake`, but asks about the input."""
    return m.linear(x) * (2 if is_fake(x) else 3)


def warned(m: Holding, x: torch.Tensor) -> torch.Tensor:
    """Looks for padding in inputs that it can read, and in its own mask of ones, as transformers does."""
    if not is_fake(x) and x.sum() < -1e9:
        raise ValueError
    mask = torch.ones(x.shape[0], 7)
    return m.linear(x) if not is_fake(mask) and mask.all() else m.linear(x) + mask


@pytest.mark.parametrize("function", [while_exported, on_fake, on_fake_inputs, warned])
@pytest.mark.parametrize("sizes", [{"batch": (1, 3)}, {"batch": (3, 8)}, {}])
def test_a_model_that_checks_for_tracing_is_told_that_it_is_not_traced(
    function: Callable[..., Any], sizes: dict[str, tuple[int, ...]]
) -> None:
    source = load_source(Holding(function).eval(), rows if sizes else lambda: rows(2))
    ep = export(source, sizes)
    refuse_branches(ep)
    for key in ep.programs.by_key:
        tensors = sample(source, dict(zip(sizes, key, strict=True))).tensors
        torch.testing.assert_close(ep.programs.at(key).module()(*tensors), run_eager(ep.flat, tensors).outputs, rtol=0, atol=0)
    assert torch.compiler.is_exporting() is False and torch._subclasses.FakeTensor is FakeTensor


def masked(m: Holding, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Reads a mask that is an input, except during tracing; the traced program then fails."""
    if not is_fake(mask):
        return m.linear(x) if mask.all() else m.linear(x) * 2
    return m.linear(x) + mask[:, :5]


def required(m: Holding, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The same model, but eager PyTorch also fails with any other mask."""
    if not is_fake(mask) and mask.all():
        return m.linear(x)
    return m.linear(x) + mask[:, :5]


def test_what_eager_pytorch_asks_before_it_fails_is_asserted() -> None:
    exported = export(load_source(Holding(required).eval(), lambda batch: (*rows(batch), torch.ones(batch, 7))), {"batch": (1, 3)})
    assert [obstacle.rule for obstacle in exported.obstacles] == ["asserted-value"]


def test_what_eager_pytorch_decides_by_data_is_named_as_that() -> None:
    exported = export(load_source(Holding(masked).eval(), lambda batch: (*rows(batch), torch.ones(batch, 7))), {"batch": (1, 3)})
    assert [(obstacle.rule, "mask.all()" in obstacle.source) for obstacle in exported.obstacles] == [("path", True)]


def by_the_stack(m: Holding, x: torch.Tensor) -> torch.Tensor:
    """Reads the Python stack, which no replacement can imitate."""
    names = [frame.function for frame in inspect.stack()]
    return m.linear(x) if "_export" in names else m.linear(x) * 2


@pytest.mark.parametrize("sizes", [{"batch": (1, 3)}, {"batch": (3, 8)}])
def test_a_model_that_differs_while_traced_is_refused(sizes: dict[str, tuple[int, ...]]) -> None:
    with raises("export-differs", match=r"test_per_size.py:\d+: while torch.export traces it, .* another result at batch=\d"):
        exported(by_the_stack, **sizes)


def test_the_same_without_dimensions() -> None:
    with raises("export-differs", match=r"test_per_size.py:\d+: while torch.export traces it, the model computes another result$"):
        export(load_source(Holding(by_the_stack).eval(), lambda: rows(2)), {})


def test_branches_of_other_operators_are_not_padded_though_their_programs_are_alike() -> None:
    def either(m: Holding, x: torch.Tensor) -> torch.Tensor:
        def doubled(y: torch.Tensor) -> torch.Tensor:
            return y * 2 if y.shape[0] > 4 else torch.mul(y * 2, 1)

        return torch.cond(x[0, 0] > 9, doubled, lambda y: y + 1, (x,))

    pad, chunk, reason = proved(either, batch=(2, 8))
    assert (pad, chunk) == ("no", False) and "the model has other operators at another size of batch" in reason


def test_a_program_that_fails_where_the_model_runs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ProgramModule, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise RuntimeError("tensors are on two devices\nand more of it")

    monkeypatch.setattr(ProgramModule, "forward", fail)
    with raises("export-differs", match="fails where the model runs: tensors are on two devices$"):
        export(load_source(Batched(lambda x: x + 1), rows), {"batch": (1, 8)})
