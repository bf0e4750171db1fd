"""Values that depend only on weights are computed during lowering; with them, the remaining graph gives the same result."""

from __future__ import annotations

import torch
from torch import nn

from cgcompile.export.export import export
from cgcompile.export.signature.signature import describe_signature
from cgcompile.model.load import load_source
from cgcompile.offline.decompose.constant_folding import fold
from cgcompile.offline.decompose.retrace import Retraced, retrace
from cgcompile.offline.lower.fake_device import fake_device
from cgcompile.offline.lower.inductor import lower_key
from cgcompile.offline.lowered import WEIGHT, FoldedConstant
from cgcompile.offline.lowering_jobs import live_weights, whole_jobs
from cgcompile.targets.architectures import arch
from cgcompile.targets.weights import contents
from cgcompile.transforms.output_aliases import OutputAlias, find_aliases


def folded(model: nn.Module, x: torch.Tensor, writes: bool = False) -> tuple[Retraced, tuple[FoldedConstant, ...], list[object]]:
    """Folds the graph of a model. Returns it with its constants and the remaining operations."""
    program = torch.export.export(model.eval(), (x,))
    values = {**program.state_dict, **program.constants}
    with fake_device(arch("sm_90")):
        retraced, constants = fold(retrace(program, (x,), writes=writes), values)
    return retraced, constants, [node.target for node in retraced.graph.graph.nodes if node.op == "call_function"]


def computed(retraced: Retraced, constants: tuple[FoldedConstant, ...], model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Returns the result of the folded graph, on the CPU."""
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    bytes_of = {constant.name: constant.contents for constant in constants}
    arguments = []
    for (kind, name), like in zip(retraced.names, retraced.tensors, strict=True):
        if name in bytes_of:
            flat = torch.frombuffer(bytearray(bytes_of[name]), dtype=like.dtype)
            arguments.append(flat.as_strided(like.shape, like.stride()))
        else:
            arguments.append(held[name] if kind == WEIGHT else x)
    for node in retraced.graph.graph.nodes:
        node.kwargs = {key: torch.device("cpu") if isinstance(value, torch.device) else value for key, value in node.kwargs.items()}
    retraced.graph.recompile()
    return retraced.graph(*arguments)[0]


def test_the_scale_of_a_normalization_is_a_weight() -> None:
    torch.manual_seed(0)
    model = nn.BatchNorm2d(6)
    nn.init.uniform_(model.running_var, 0.5, 2.0)
    x = torch.randn(2, 6, 3, 3)
    retraced, constants, left = folded(model, x)
    assert torch.ops.aten.sqrt.default not in left and torch.ops.aten.reciprocal.default not in left and constants
    torch.testing.assert_close(computed(retraced, constants, model, x), model(x))


def test_the_bias_of_one_row_stays_a_weight_that_an_update_may_change() -> None:
    """torch decomposes the sum to the bias times 1, plus the product."""
    torch.manual_seed(0)
    model, x = nn.Linear(96, 5), torch.randn(1, 96)
    retraced, constants, _ = folded(model, x)
    assert constants == () and "bias" in [name for _, name in retraced.names]
    torch.testing.assert_close(computed(retraced, constants, model, x), model(x))


def test_a_normalization_is_one_product_and_one_sum() -> None:
    """Each factor after a convolution costs a load per element: four factors made a product of ResNet-50 six times slower."""
    torch.manual_seed(0)
    model = nn.BatchNorm2d(6).half()
    nn.init.uniform_(model.running_var, 0.5, 2.0)
    nn.init.normal_(model.running_mean)
    nn.init.normal_(model.weight)
    nn.init.normal_(model.bias)
    x = torch.randn(2, 6, 3, 3).half()
    retraced, constants, left = folded(model, x)
    assert len(constants) == 2 and torch.ops.aten.sub.Tensor not in left and torch.ops.aten.rsqrt.default not in left
    torch.testing.assert_close(computed(retraced, constants, model, x), model(x), rtol=2e-3, atol=2e-3)


def test_a_weight_that_is_normalized_by_its_own_statistics() -> None:
    class Standardized(nn.Module):
        """Standardizes weights like the convolutions of BiT."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = nn.functional.batch_norm(self.weight[None], None, None, training=True, momentum=0.0, eps=1e-6)
            return x @ rows.reshape_as(self.weight).t()

    model, x = Standardized(), torch.randn(4, 8)
    retraced, constants, _ = folded(model, x)
    torch.testing.assert_close(computed(retraced, constants, model, x), model(x))


def test_a_weight_laid_out_anew_is_kept_and_a_view_is_not() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.t() + nn.functional.pad(self.weight, [0, 2]).sum(0)

    model, x = Turned(), torch.randn(4, 5)
    wide = nn.functional.pad(x, [0, 0])
    retraced, constants, left = folded(model, wide)
    assert [len(constant.contents) for constant in constants] == [7 * 4], "the sum over the padded weight, and not its transpose"
    assert torch.ops.aten.constant_pad_nd.default not in left
    torch.testing.assert_close(computed(retraced, constants, model, wide), model(wide))


def test_a_wider_copy_of_a_large_weight_is_not_kept() -> None:
    class Widened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(300, 300).half())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight.float()

    _, constants, left = folded(Widened(), torch.randn(300, 300))
    assert constants == () and torch.ops.prims.convert_element_type.default in left


def test_equal_results_have_one_name_and_changed_weights_another() -> None:
    torch.manual_seed(0)
    one, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    nn.init.uniform_(other.running_var, 0.5, 2.0)
    x = torch.randn(3, 4)
    names = [{constant.name for constant in folded(model, x)[1]} for model in (one, one, other)]
    assert names[0] == names[1] and names[0] != names[2]


def test_a_buffer_that_the_program_changes_is_left_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x + self.calls.sqrt()

    _, constants, left = folded(Counting(), torch.randn(3), writes=True)
    assert constants == () and torch.ops.aten.sqrt.default in left


def test_a_weight_that_a_caller_may_write_to_is_left_alone() -> None:
    """If an output shares memory with a weight, the caller may write to the weight: the next call must use the new values."""

    class Handed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * self.scale.exp(), self.scale

    model, x = Handed().eval(), torch.randn(1, 8)
    source = load_source(model, lambda batch: (torch.randn(batch, 8),))
    exported = export(source, {"batch": (1,)})
    aliases = find_aliases(exported, describe_signature(exported).outputs, ())
    tensors = exported.programs.weights()
    live = live_weights(tensors, aliases, ())
    assert live == ("model.scale",)
    ((_, job),) = whole_jobs(exported.programs, {(1,): (x,)}, {(1,): False}, live).items()
    kept = [lower_key(job.program, (1,), job.tensors, arch("sm_90"), live=names).constants for names in (job.live, ())]
    assert kept[0] == () and [constant.contents for constant in kept[1]] == [contents(model.scale.exp(), (1,))]


def test_live_weights_are_state_too_and_all_that_lies_in_their_memory() -> None:
    """The program of one int_key may write to state that the program of another one reads; so no program may fold it."""
    weight, counter = torch.ones(3), torch.ones(4)
    tensors = {"model.a": weight, "model.tied": weight[1:], "model.count": counter, "model.b": torch.ones(3), "c": torch.empty(0)}
    alias = OutputAlias(output=0, memory="weights", index=0, name="a", views={})
    input_alias = OutputAlias(output=1, memory="inputs", index=0, name="", views={})
    assert live_weights(tensors, [alias, input_alias], ["model.count"]) == ("model.a", "model.count", "model.tied")


def test_what_is_filled_later_is_no_constant() -> None:
    """Circular padding fills an empty tensor with parts of the input. Before the fix, a convolution of that tensor was folded as a
    constant."""
    torch.manual_seed(0)
    model = nn.Conv1d(4, 3, 3, padding=1, padding_mode="circular", bias=False)
    x = torch.randn(2, 4, 9)
    retraced, constants, _ = folded(model, x)
    torch.testing.assert_close(computed(retraced, constants, model, x), model(x))


class Spectrum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the magnitudes of the frequencies."""
        return torch.fft.rfft(x).abs()


def test_factors_of_a_fourier_transform_are_constants() -> None:
    x = torch.randn(3, 12)
    retraced, constants, left = folded(Spectrum(), x)
    assert len(constants) == 1 and not constants[0].sources
    assert torch.ops.aten.cos.default not in left and torch.ops.aten.arange.start_step not in left
    torch.testing.assert_close(computed(retraced, constants, Spectrum(), x), Spectrum()(x))
