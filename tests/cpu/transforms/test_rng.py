"""Models that draw random numbers: the rewritten program against PyTorch's operators, and compiled against eager."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass

from cgbundle.format.schema import Finding
from cgcompile.checks import check
from cgcompile.export.export import export
from cgcompile.export.exported import Exported
from cgcompile.export.signature.signature import describe_signature
from cgcompile.model.load import load_source
from cgcompile.transforms.rng.rewrite import RNG, can_rewrite, draws, generator_buffer, is_random, supported, with_generator
from tests.cpu.models import Batched
from tests.helpers.bundles.edits import edited

COUNT = 40_000


class Drawing(nn.Module):
    """A function of the input in training mode."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def rows(batch: int) -> tuple[Tensor]:
    return (torch.rand(batch, 8),)


def exported(model: nn.Module | Callable[..., Any], inputs: Callable[..., Any] = rows, **sizes: tuple[int, ...]) -> Exported:
    module = model if isinstance(model, nn.Module) else Drawing(model)
    model_export = export(load_source(module.train(), inputs), sizes or {"batch": (2, 5)})
    return edited(model_export, programs=model_export.programs.changed(with_generator))


def run(program: Any, *tensors: Tensor, seed: int = 0, calls: int = 0) -> list[Tensor]:
    """Returns the outputs of one call of a program from this generator state."""
    module = program.module()
    module.get_buffer(RNG).copy_(torch.tensor([seed, calls]))
    with torch.no_grad():
        outputs = module(*tensors)
    assert module.get_buffer(RNG).tolist() == [seed, calls + 1], "a call counts itself, and leaves the seed"
    return list(outputs)


# --- distributions: beside PyTorch's own -----------------------------------------------------------------------------

FLAT = torch.linspace(-2, 2, COUNT)

DISTRIBUTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(x.shape),
    "rand with a generator of None": lambda x: torch.rand(x.shape, generator=None),
    "rand_like": torch.rand_like,
    "rand float64": lambda x: torch.rand(x.shape, dtype=torch.float64),
    "rand float16": lambda x: torch.rand(x.shape, dtype=torch.float16),
    "rand bfloat16": lambda x: torch.rand(x.shape, dtype=torch.bfloat16),
    "randn": lambda x: torch.randn(x.shape),
    "randn_like": torch.randn_like,
    "randn float64": lambda x: torch.randn(x.shape, dtype=torch.float64),
    "randn bfloat16": lambda x: torch.randn(x.shape, dtype=torch.bfloat16),
    "randint": lambda x: torch.randint(10, x.shape),
    "randint from a low number": lambda x: torch.randint(-3, 40, x.shape),
    "randint of floats": lambda x: torch.randint(0, 7, x.shape, dtype=torch.float32),
    "randint above 2^32": lambda x: torch.randint(0, 3 << 40, x.shape),
    "randint up to a size": lambda x: torch.randint(0, x.shape[0], x.shape),
    "randint_like": lambda x: torch.randint_like(x, 5),
    "randint_like from a low number": lambda x: torch.randint_like(x, -5, 5),
    "random_": lambda x: torch.empty_like(x, dtype=torch.int64).random_(),
    "random_ of floats": lambda x: torch.empty_like(x).random_(),
    "random_ of bytes": lambda x: torch.empty_like(x, dtype=torch.uint8).random_(),
    "random_ to": lambda x: torch.empty_like(x).random_(6),
    "randperm": lambda x: torch.randperm(x.shape[0]),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli float64": lambda x: torch.bernoulli(x.double().sigmoid()),
    "bernoulli p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_ p": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_ p by default": lambda x: torch.empty_like(x).bernoulli_(),
    "bernoulli_ tensor": lambda x: torch.empty_like(x, dtype=torch.bool).bernoulli_(x.sigmoid()),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "uniform_ between": lambda x: torch.empty_like(x).uniform_(-3, 2),
    "uniform_ bfloat16": lambda x: torch.empty_like(x, dtype=torch.bfloat16).uniform_(-3, 2),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "normal_ around": lambda x: torch.empty_like(x).normal_(3, 0.5),
    "normal of a size": lambda x: torch.normal(1.0, 2.0, x.shape),
    "normal of means": lambda x: torch.normal(x, 0.5),
    "normal of deviations": lambda x: torch.normal(1.0, x.exp()),
    "normal of both": lambda x: torch.normal(x[:1], x.exp()),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(0.5, 0.7),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "exponential_ of a rate": lambda x: torch.empty_like(x).exponential_(3),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "cauchy_ around": lambda x: torch.empty_like(x, dtype=torch.float64).cauchy_(2, 3),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.2),
    "geometric_ of integers": lambda x: torch.empty_like(x, dtype=torch.int64).geometric_(0.01),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout_": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "dropout bfloat16": lambda x: F.dropout(x.bfloat16(), 0.3),
    "dropout of everything": lambda x: F.dropout(x, 1.0),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "native_dropout's mask": lambda x: torch.native_dropout(x, 0.3, True)[1],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "alpha_dropout_": lambda x: F.alpha_dropout(x.clone(), 0.3, True, True),
    "dropout1d": lambda x: F.dropout1d(x.view(-1, 100, 4), 0.3).reshape(-1),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x.view(-1, 100, 4), 0.3, True).reshape(-1),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_": lambda x: F.rrelu(x.clone(), training=True, inplace=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x.view(-1, 4)).reshape(-1),
    "gumbel_softmax hard": lambda x: F.gumbel_softmax(x.view(-1, 4), hard=True).argmax(-1),
    "a token by exponential race": lambda x: (x.view(-1, 8).softmax(-1) / torch.empty(COUNT // 8, 8).exponential_(1)).argmax(-1),
    "multinomial": lambda x: torch.multinomial(x.view(-1, 8).softmax(-1), 1),
    "multinomial of several": lambda x: torch.multinomial(x.view(-1, 8).double().exp(), 3),
    "multinomial of all": lambda x: torch.multinomial(x.exp(), COUNT),
    "multinomial with replacement": lambda x: torch.multinomial(x.view(-1, 8).exp(), 6, replacement=True),
    "multinomial of half precision": lambda x: torch.multinomial(x.view(-1, 8).softmax(-1).half(), 4, True),
    "attention": lambda x: F.scaled_dot_product_attention(*(x.view(1, -1, 50, 4),) * 3, dropout_p=0.3).reshape(-1),
    "a slice of a tensor": lambda x: x.view(-1, 4).clone()[:, 1:3].normal_(),
}  # fmt: skip
"""Functions that draw a fixed number of values from float32 [COUNT]."""


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_distribution_is_that_of_pytorchs_own_operator(name: str) -> None:
    """The Kolmogorov-Smirnov distance of two samples is below that of one pair in a thousand, with equal dtypes and shapes. The
    second call gives other numbers; the same seed gives the same ones."""
    function = DISTRIBUTIONS[name]
    program = with_generator(export(load_source(Drawing(function).train(), lambda: (FLAT,)), {}).programs.first)
    assert not draws(program) and generator_buffer(program) == RNG
    (sample,), (again,), (after,) = run(program, FLAT, seed=5), run(program, FLAT, seed=5), run(program, FLAT, seed=5, calls=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        eager_sample = function(FLAT)
    assert (sample.dtype, sample.shape) == (eager_sample.dtype, eager_sample.shape)
    assert torch.equal(sample, again)
    assert name == "dropout of everything" or not torch.equal(sample, after)
    assert distance(sample.double(), eager_sample.double()) < 1.95 * math.sqrt(2 / sample.numel())


def distance(left: Tensor, right: Tensor) -> float:
    """Returns the Kolmogorov-Smirnov distance: the largest difference of the two distribution functions."""
    left, right = left.reshape(-1).sort().values, right.reshape(-1).sort().values
    both = torch.cat([left, right])
    parts = [torch.searchsorted(sample, both, right=True) / len(sample) for sample in (left, right)]
    return float((parts[0] - parts[1]).abs().max())


@pytest.mark.parametrize("replacement", [False, True])
def test_a_category_of_weight_zero_is_never_drawn(replacement: bool) -> None:
    weights = torch.tensor([0.0, 1e-30, 0.0, 1e-30, 0.0]).expand(COUNT // 8, 5).clone()
    program = with_generator(
        export(load_source(Drawing(lambda w: torch.multinomial(w, 2, replacement)).train(), lambda: (weights,)), {}).programs.first
    )
    (categories,) = run(program, weights, seed=3)
    assert set(categories.flatten().tolist()) == {1, 3}


# --- models ----------------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Dropout between layers, one of them in place."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.second(F.dropout(self.norm(self.first(x)).relu(), 0.2, self.training, inplace=True)))


class Autoencoder(nn.Module):
    """The reparametrization of a variational autoencoder, with its sample and mean."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, spread = self.encode(x).chunk(2, -1)
        return {"made": self.decode(mean + torch.randn_like(spread) * spread.exp()), "mean": mean}


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = kind(4, 4, 3, dropout=0.5, **options)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


def test_a_network_in_training_mode_draws_anew_at_any_batch() -> None:
    """Batch norm's own state remains as the program's second state."""
    model_export = exported(Network())
    tensor = torch.rand(5, 8)
    first, second = run(model_export.programs.first, tensor), run(model_export.programs.first, tensor, calls=1)
    assert first[0].shape == (5, 8) and not torch.equal(first[0] == 0, second[0] == 0)
    assert run(model_export.programs.first, torch.rand(3, 8))[0].shape == (3, 8)
    assert describe_signature(model_export).outputs[0].shape == ("batch", 8)
    mutated = set(model_export.programs.first.run_decompositions({}).graph_signature.buffers_to_mutate.values())
    assert mutated == {RNG, "model.norm.running_mean", "model.norm.running_var", "model.norm.num_batches_tracked"}


def test_what_is_not_random_stays_as_in_pytorch() -> None:
    model_export = exported(Autoencoder())
    tensor = torch.rand(4, 8)
    drawn, mean = run(model_export.programs.first, tensor)
    other, same = run(model_export.programs.first, tensor, seed=1)
    assert torch.equal(mean, same) and not torch.equal(drawn, other)
    with torch.no_grad():
        assert torch.equal(mean, model_export.flat.model(tensor)["mean"])
    assert [name for name, _ in model_export.flat.like.leaves] == [spec.name for spec in describe_signature(model_export).inputs]


def test_samples_of_monte_carlo_dropout_differ_within_a_call() -> None:
    network = Network().eval()
    model_export = exported(lambda x: torch.stack([F.dropout(network.first(x), 0.5) for _ in range(3)]))
    ((first, second, third),) = run(model_export.programs.first, torch.rand(4, 8))
    assert not torch.equal(first == 0, second == 0) and not torch.equal(second == 0, third == 0)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"bidirectional": True, "batch_first": True, "proj_size": 2}),
        (nn.GRU, {"bidirectional": True, "bias": False}),
        (nn.RNN, {"nonlinearity": "relu", "batch_first": True}),
        (nn.RNN, {}),
    ],
    ids=str,
)
def test_dropout_between_the_layers_of_recurrent_networks(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    """Outputs and last states have the same distributions as in PyTorch, and the batch stays dynamic."""
    model, first = Recurrent(kind, **options), options.get("batch_first")
    inputs = lambda batch: (torch.ones(batch, 3, 4) if first else torch.ones(3, batch, 4),)  # noqa: E731
    program = exported(model, inputs, batch=(2, 3000)).programs.first
    (tensor,) = inputs(3000)
    outputs = run(program, tensor)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output, states = model(tensor)
    expected = [output, *(states if isinstance(states, tuple) else [states])]
    for mine, yours in zip(outputs, expected, strict=True):
        assert mine.shape == yours.shape
        batch = mine.shape.index(3000)
        for left, right in zip(mine.movedim(batch, -1).reshape(-1, 3000), yours.movedim(batch, -1).reshape(-1, 3000), strict=True):
            assert distance(left.round(decimals=4), right.round(decimals=4)) < 1.95 * math.sqrt(2 / 3000)


def test_attention_drops_weights() -> None:
    """With one-hot values the output is the attention weights. Weights that are not dropped are divided by 1 - p, as in PyTorch."""
    program = exported(lambda x: F.scaled_dot_product_attention(x * 0, x * 0, torch.eye(8)[None].expand(x.shape), dropout_p=0.25),
                    lambda batch: (torch.rand(batch, 8, 8),), batch=(2, 500)).programs.first  # fmt: skip
    (weights,) = run(program, torch.rand(500, 8, 8))
    kept = weights != 0
    assert torch.allclose(weights[kept], torch.tensor(1 / 8 / 0.75))
    assert kept.double().mean().item() == pytest.approx(0.75, abs=0.01)


def test_a_write_to_a_part_of_a_tensor_leaves_the_rest() -> None:
    def part(x: Tensor) -> Tensor:
        y = x * 1
        y[:, 2:4].normal_()
        y[0].uniform_(2, 3)
        return y

    tensor = torch.full((5, 8), 7.0)
    (output,) = run(exported(part).programs.first, tensor)
    assert torch.equal(output[1:, 4:], tensor[1:, 4:]) and torch.equal(output[1:, :2], tensor[1:, :2])
    assert (output[1:, 2:4] != 7).all() and ((output[0] >= 2) & (output[0] < 3)).all()


def test_numbers_of_channels_last_images_keep_their_strides() -> None:
    """Which views are possible depends on the strides that torch.export sees."""

    def image(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.to(memory_format=torch.channels_last)
        noise = torch.randn_like(y)
        return noise.permute(0, 2, 3, 1).view(x.shape[0], -1), F.dropout(y).permute(0, 2, 3, 1).view(x.shape[0], -1)

    noise, dropped = run(exported(image, lambda batch: (torch.rand(batch, 3, 4, 4),)).programs.first, torch.rand(4, 3, 4, 4))
    assert noise.shape == dropped.shape == (4, 48)


def test_numbers_for_as_many_elements_as_the_data_say() -> None:
    program = exported(lambda x: torch.rand_like(x[x > 0]).sum() + torch.randn(x.nonzero().shape[0], 2).sum()).programs.first
    assert run(program, torch.rand(3, 8) - 0.5)[0].isfinite()


# --- the program -----------------------------------------------------------------------------------------------------


def several(x: Tensor) -> tuple[Tensor, ...]:
    """Draws uniform numbers and integers first: their bits do not depend on how floats are computed."""
    return (
        torch.rand(4),
        torch.randint(-7, 1000, (x.shape[0],)),
        torch.randperm(x.shape[0]),
        torch.bernoulli(x),
        F.dropout(x, 0.5),
        torch.randn_like(x),
        torch.empty_like(x).exponential_(),
    )


EXACT = 5


@pytest.fixture(scope="module")
def program() -> Any:
    return exported(several).programs.first


@pytest.fixture(scope="module")
def smaller() -> Any:
    """A small program for tests of the whole graph: every draw is some hundred operations."""
    return exported(lambda x: (torch.rand_like(x), F.dropout(x, 0.5))).programs.first


def test_nodes_keep_their_names_and_the_users_lines(program: Any) -> None:
    before = export(load_source(Drawing(several), rows), {"batch": (2, 5)}).programs.first
    random = [node for node in before.graph.nodes if is_random(node)]
    assert len(random) == 7 and all(can_rewrite(node) for node in random)
    names = {node.name for node in before.graph.nodes}
    assert names <= {node.name for node in program.graph.nodes}
    lines = [node.meta.get("stack_trace", "") for node in program.graph.nodes if node.name not in names]
    for node in random:
        assert lines.count(node.meta["stack_trace"]) > 100, node.name


def test_every_operation_is_pytorchs_own(program: Any) -> None:
    """A saved program needs no operators of cgcompile."""
    spaces = {node.target.namespace for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert spaces == {"aten"}


def test_saved_and_loaded_it_draws_the_same(smaller: Any) -> None:
    file, tensor = io.BytesIO(), torch.rand(5, 8)
    torch.export.save(smaller, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert generator_buffer(loaded) == RNG
    for mine, other in zip(run(smaller, tensor, seed=3), run(loaded, tensor, seed=3), strict=True):
        assert torch.equal(mine, other)


def test_exported_again_it_needs_no_second_rewriting(smaller: Any) -> None:
    """A bundle's program.pt2 can be a model too."""
    again = export(load_source(smaller.module(), rows), {"batch": (2, 5)})
    assert not draws(again.programs.first) and with_generator(again.programs.first) is again.programs.first
    assert generator_buffer(again.programs.first) == f"model.{RNG}"


def test_functional_it_draws_the_same(smaller: Any) -> None:
    functional = smaller.run_decompositions({})
    assert set(functional.graph_signature.buffers_to_mutate.values()) == {RNG}
    tensor = torch.rand(5, 8)
    for mine, other in zip(run(smaller, tensor, seed=3), run(functional, tensor, seed=3), strict=True):
        assert torch.equal(mine, other)


def test_the_program_can_be_moved_to_another_device() -> None:
    """move_to_device_pass sets the device of every operation; here `meta` replaces a GPU."""
    moved = move_to_device_pass(exported(lambda x: (torch.rand_like(x), torch.randperm(x.shape[0]))).programs.first, "meta")
    assert moved.state_dict[RNG].device.type == "meta"
    for node in moved.graph.nodes:
        assert all(
            "cpu" not in str(value) for value in (*node.args, *node.kwargs.values()) if isinstance(value, str | torch.device)
        )
    outputs = moved.module()(torch.rand(5, 8, device="meta"))
    assert {tensor.device.type for tensor in outputs} == {"meta"}


def test_compiled_ahead_of_time_it_draws_the_same_and_never_twice(program: Any, tmp_path: Path) -> None:
    """AOTInductor for the CPU gives equal bits of uniform numbers, integers and masks, and equal floats within rounding, at two
    batch sizes. In 2,000 calls no 4 x 24 bits repeat (chance 1 in 10^22), and means and variances are right."""
    program.state_dict[RNG].copy_(torch.tensor([6, 0]))  # its initial state
    with torch.no_grad():
        path = torch._inductor.aot_compile(
            program.module(), program.example_inputs[0],
            options={
                "aot_inductor.output_path": str(tmp_path / "model.so"), "aot_inductor.precompile_headers": False,
                "cpp.vec_isa_ok": True,
            },
        )  # fmt: skip
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(path, 1)
    for call, batch in enumerate((5, 2, 5)):
        features = torch.rand(batch, 8)
        actual, eager = runner.run([features]), run(program, features, seed=6, calls=call)
        for index, (mine, other) in enumerate(zip(actual, eager, strict=True)):
            assert torch.equal(mine, other) if index < EXACT else torch.allclose(mine, other, atol=1e-6), (call, index)
    seen, calls = [], 2_000
    features = torch.full((2, 8), 0.25)
    for _ in range(calls):
        seen.append([tensor.double() for tensor in runner.run([features])])
    uniform, _, _, happened, dropped, normal, waited = [torch.stack(samples) for samples in zip(*seen, strict=True)]
    assert len({tuple(row) for row in uniform.tolist()}) == calls
    for values, mean, variance, fourth in (
        (uniform, 1 / 2, 1 / 12, 1 / 80), (happened, 1 / 4, 3 / 16, 21 / 256), (dropped, 1 / 4, 1 / 16, 1 / 256),
        (normal, 0, 1, 3), (waited, 1, 1, 9),
    ):  # fmt: skip
        count = values.numel()
        assert values.mean().item() == pytest.approx(mean, abs=4.5 * math.sqrt(variance / count))
        assert values.var().item() == pytest.approx(variance, abs=4.5 * math.sqrt(max(fourth - variance**2, 1e-6) / count) + 1e-4)


def test_compiled_at_run_time_it_draws_the_same() -> None:
    """torch.compile updates the module's buffer."""
    program = exported(lambda x: torch.rand_like(x)).programs.first
    expected = [run(program, torch.rand(4, 8), seed=9, calls=call)[0] for call in range(3)]
    module = program.module()
    module.get_buffer(RNG).copy_(torch.tensor([9, 0]))
    compiled = torch.compile(module)
    # one kernel: no compile processes and no precompiled headers
    once = torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False})
    with torch.no_grad(), once:
        actual = [compiled(torch.rand(4, 8))[0] for _ in range(3)]
    assert all(torch.equal(mine, other) for mine, other in zip(actual, expected, strict=True))


def test_two_programs_of_one_model_share_nothing_but_the_seed() -> None:
    """Draws are numbered within a program: with the same seed, draw N of two programs gives the same numbers."""
    first, second = [exported(lambda x: torch.rand_like(x)).programs.first for _ in range(2)]
    tensor = torch.rand(4, 8)
    assert torch.equal(run(first, tensor, seed=1)[0], run(second, tensor, seed=1)[0])
    assert first.state_dict[RNG] is not second.state_dict[RNG]


# --- what is rewritten -----------------------------------------------------------------------------------------------


def test_a_program_that_draws_nothing_is_left_alone() -> None:
    one, two = nn.LSTM(8, 8, 1), nn.LSTM(8, 8, 2, dropout=0.5).eval()
    for model in (
        nn.Dropout(0.0), nn.Dropout(0.5).eval(), nn.RReLU().eval(),
        Drawing(lambda x: one(x[None])[0]), Drawing(lambda x: two(x[None])[0]),
        Batched(lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])),
    ):  # fmt: skip
        model_export = export(load_source(model, rows), {"batch": (2, 5)})
        assert not draws(model_export.programs.first) and with_generator(model_export.programs.first) is model_export.programs.first


def random_operators() -> set[torch._ops.OpOverload]:
    """Returns the operators that PyTorch tags as random, without `out` variants, fused kernels and backward kernels."""
    operators = set()
    for schema in torch._C._jit_get_all_schemas():
        packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None) if schema.name.startswith("aten::") else None
        overload = schema.overload_name or "default"
        if packet is not None and overload in packet.overloads():
            op = getattr(packet, overload)
            private = schema.name.startswith(("aten::_", "aten::miopen", "aten::cudnn"))
            if torch.Tag.nondeterministic_seeded in op.tags and not overload.endswith("out") and not private:
                operators.add(op)
    return operators


def test_every_random_operator_of_pytorch_is_rewritten_or_refused_on_purpose() -> None:
    left = {op.name().removeprefix("aten::") for op in random_operators() - supported()}
    left = {name for name in left if "names" not in name}  # operators with named axes, which torch before 2.13 tags as random too
    assert left == {
        "poisson", "binomial",  # no inverse transform of fixed length
        "lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data",  # packed sequences, which torch.export does not support
    }  # fmt: skip


def random_findings(function: Callable[..., Any]) -> list[Finding]:
    findings = check(export(load_source(Drawing(function), rows), {"batch": (2, 5)})).findings
    return [finding for finding in findings if finding.rule == "random-operation"]


@pytest.mark.parametrize(
    ("function", "effect", "fix"),
    [
        (lambda x: torch.poisson(x), "has no generator for it", "as an input"),
        (lambda x: torch.rand(3, out=torch.empty(3)) + x[:, :3], "has no generator for it", "as an input"),
        (
            lambda x: torch._higher_order_ops.map(lambda row: F.dropout(row, 0.5), x),
            "inside this operator",
            "model.eval()",
        ),
    ],
    ids=["poisson", "out", "inside a map"],
)
def test_what_cannot_be_rewritten_is_refused(function: Callable[..., Any], effect: str, fix: str) -> None:
    (finding,) = random_findings(function)
    assert finding.severity == "refuse" and effect in finding.effect and fix in finding.fix


class Wandering(nn.Module):
    """A loop in a loop and a branch that draw, and one draw outside."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        def turn(i: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            def inner(j: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
                return j + 1, torch.cat([w[:, 1:], torch.rand(x.shape[0], 1)], 1)

            return i + 1, torch.while_loop(lambda j, w: j < 2, inner, (torch.zeros((), dtype=torch.int64), v))[1]

        _, v = torch.while_loop(lambda i, v: i < 4, turn, (torch.zeros((), dtype=torch.int64), torch.zeros(x.shape[0], 8)))
        y = torch.cond(x.sum() > 0, lambda x: F.dropout(x + 1, 0.5, training=True), lambda x: x + torch.randn_like(x), (x,))
        return v, y, torch.rand(x.shape[0])


def test_branches_and_loops_draw_anew_in_every_turn() -> None:
    x = torch.ones(3, 5)
    program = torch.export.export(Wandering(), (x,), strict=False)
    module = with_generator(program).module(check_guards=False)
    model = export(load_source(Wandering(), lambda: (x,)), {})
    for conditionals, severities in ((True, {"note"}), (False, {"note", "refuse"})):
        reports = [finding for finding in check(model, conditionals=conditionals).findings if finding.rule == "random-operation"]
        assert {finding.severity for finding in reports} == severities, "the host's compiled code cannot draw in a body"
    state = dict(module.named_buffers())[RNG]
    state.copy_(torch.tensor([7, 0]))
    first, again = module(x), module(x)
    assert state.tolist() == [7, 2]
    state.copy_(torch.tensor([7, 0]))
    for one, two in zip(first, module(x), strict=True):
        assert torch.equal(one, two)
    turns = [*first[0].T, *again[0].T, first[2], again[2]]
    assert len({tuple(turn.tolist()) for turn in turns}) == 18, "every turn of every loop, and every call, has its own numbers"
    assert set(first[1].unique().tolist()) <= {0.0, 4.0}
    assert not torch.equal(module(-x)[1], module(-x)[1])


def test_a_saved_program_with_a_generator_is_refused_beside_another() -> None:
    class Outer(nn.Module):
        def __init__(self, *parts: nn.Module) -> None:
            super().__init__()
            self.parts = nn.ModuleList(parts)

        def forward(self, x: Tensor) -> Tensor:
            return sum(part(x)[1] for part in self.parts) + (torch.rand_like(x) if len(self.parts) == 1 else 0)

    one, other = [exported(lambda x: (x, torch.rand_like(x))).programs.first for _ in range(2)]
    for parts in ([one.module()], [one.module(), other.module()]):
        findings = check(export(load_source(Outer(*parts), rows), {"batch": (2, 5)})).findings
        refused = [finding for finding in findings if finding.severity == "refuse"]
        assert [finding.rule for finding in refused] == ["random-operation"] and "saved program" in refused[0].message


def test_what_is_rewritten_is_a_note_on_the_users_line() -> None:
    notes = random_findings(several)
    assert {note.severity for note in notes} == {"note"} and len(notes) == 7
    assert all("seed" in note.effect and note.where.startswith("tests/cpu/transforms/test_rng.py:") for note in notes)
    assert [note.source for note in notes][4] == "F.dropout(x, 0.5),"
