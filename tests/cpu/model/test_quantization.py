"""Quantized models are replaced by plain ones with the same results and plain tensors. The user's model is not changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cgcompile.errors import ModelError
from cgcompile.export.export import export
from cgcompile.export.weights import weight_tensors
from cgcompile.model.load import load_source
from cgcompile.model.quantization.dynamic_linear import activation_step
from cgcompile.model.quantization.plain_model import plain_model


def perceptron() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval()


def dynamic(model: nn.Module, *kinds: type[nn.Module], dtype: torch.dtype = torch.qint8) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized_model: nn.Module = torch.ao.quantization.quantize_dynamic(model, set(kinds), dtype=dtype)
    return quantized_model


def per_row() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized_model: nn.Module = torch.ao.quantization.quantize_dynamic(
            perceptron(), {nn.Linear: torch.ao.quantization.per_channel_dynamic_qconfig}
        )
    return quantized_model


SAMPLES = {
    "normal": torch.linspace(-3, 5, 320).reshape(5, 64).sin(),
    "positive": torch.linspace(0.5, 5, 320).reshape(5, 64),
    "negative": torch.linspace(-5, -0.5, 320).reshape(5, 64),
    "zero": torch.zeros(5, 64),
    "small": torch.linspace(-1e-4, 3e-4, 320).reshape(5, 64),
    "three axes": torch.linspace(-3, 5, 640).reshape(2, 5, 64).cos(),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
@pytest.mark.parametrize("make", [lambda: dynamic(perceptron(), nn.Linear), per_row], ids=["one scale", "scale of each row"])
def test_dynamic_linear_in_plain_operations(make: Callable[[], nn.Module], sample: torch.Tensor) -> None:
    model = make()
    before = type(model[0])  # type: ignore[index]
    plain = plain_model(model, "model.py")
    with torch.no_grad():
        wanted, got = model(sample), plain(sample)
    assert torch.allclose(wanted, got, rtol=0, atol=1e-6 * float(wanted.abs().max()))
    assert {name: tensor.dtype for name, tensor in plain.named_buffers()}["0._packed_params.weight"] == torch.int8
    assert type(model[0]) is before and model is not plain  # type: ignore[index]


@pytest.mark.parametrize("make", [lambda: dynamic(perceptron(), nn.Linear), per_row], ids=["one scale", "scale of each row"])
def test_no_name_of_the_state_dict_means_another_tensor(make: Callable[[], nn.Module]) -> None:
    model = make()
    assert "0.scale" in model.state_dict()  # the scale of the activations, which nothing reads
    tensors = plain_model(model, "model.py").state_dict()
    assert not tensors.keys() & model.state_dict().keys()
    assert {name.removeprefix("0._packed_params.") for name in tensors if name.startswith("0.")} >= {"weight", "scale", "bias"}


def test_a_step_too_small_for_a_reciprocal() -> None:
    step, zero = activation_step(torch.full((4,), 1e-41), 127)
    assert (float(step), float(zero)) == (pytest.approx(0.1), 0.0)


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (lambda: dynamic(nn.Sequential(nn.LSTM(8, 8)), nn.LSTM), r"model.py: 0 \(torch.ao.nn.quantized.dynamic"),
        (lambda: dynamic(perceptron(), nn.Linear, dtype=torch.float16), r"packs torch.float16 for a library"),
    ],
    ids=["lstm", "half"],
)
def test_packed_weights_are_refused(model: Callable[[], nn.Module], what: str) -> None:
    with pytest.raises(ModelError, match=what) as caught:
        plain_model(model(), "model.py")
    assert caught.value.code == "quantization-unsupported"


def test_a_model_without_quantization_is_itself() -> None:
    model = perceptron()
    assert plain_model(model, "model.py") is model


# --- tensor subclasses ------------------------------------------------------------------------------------------------


class Scaled(torch.Tensor):
    """int8 data times a scale, as in quantization libraries: a product dequantizes."""

    data8: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data8: torch.Tensor, scale: torch.Tensor) -> Scaled:
        wrapper: Scaled = torch.Tensor._make_wrapper_subclass(cls, data8.shape, dtype=scale.dtype, device=data8.device)  # type: ignore[attr-defined]
        return wrapper

    def __init__(self, data8: torch.Tensor, scale: torch.Tensor) -> None:
        self.data8, self.scale = data8, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return cls(inner["data8"], inner["scale"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            x, weight, bias = args
            return function(x, weight.data8.to(weight.scale.dtype) * weight.scale, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is torch.ops.aten.detach.default, function
        return cls(args[0].data8, args[0].scale)


def scaled() -> nn.Module:
    model = perceptron()
    for layer in (model[0], model[2]):  # type: ignore[index]
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        layer.weight = nn.Parameter(Scaled(torch.round(layer.weight.detach() / scale).to(torch.int8), scale), requires_grad=False)
    return model


def check_exported(model: nn.Module) -> dict[str, torch.Tensor]:
    """Checks that the program computes what the model does. Returns the program's weights."""
    source = load_source(model, lambda batch: (torch.linspace(-3, 5, 64 * batch).reshape(batch, 64).sin(),))
    exported = export(source, {"batch": (1, 4)})
    program = exported.programs.first
    (argument,) = source.inputs(3)
    with torch.no_grad():
        assert torch.allclose(model(argument), program.module()(argument)[0], rtol=0, atol=1e-6)
    operators = {node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert {operator.namespace for operator in operators} <= {"aten"}
    weights = weight_tensors(program)
    assert {type(weight) for weight in weights.values()} <= {torch.Tensor, nn.Parameter}
    return {name.removeprefix("model."): weight for name, weight in weights.items()}


def test_a_subclass_is_stored_as_its_inner_tensors() -> None:
    model = scaled()
    weights = check_exported(model)
    assert {name: weight.dtype for name, weight in weights.items() if name.startswith("0.")} == {
        "0.bias": torch.float32, "0.weight_tensors.data8": torch.int8, "0.weight_tensors.scale": torch.float32,
    }  # fmt: skip
    assert isinstance(model[0].weight, Scaled)  # type: ignore[index]


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_torchao(config: str) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = perceptron()
    quantization.quantize_(model, getattr(quantization, config)())
    weights = check_exported(model)
    assert weights["0.weight_tensors.qdata"].dtype == torch.int8
