"""Cells and neurons, quantized and Bayesian weights, hypernetworks, genomes, finance, optics, filters, logic and explanations."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...case import Case, Made
from ..shared import ids, noise
from .scores import Called
from .stranger import Draw, model_case, stranger

WORDS = 40
TEXT = ids(8, WORDS)
SMALL = {"src_vocab_size": WORDS, "emb_dim": 16, "nheads": 2, "nlayers": 1}
STEPS = 6


def called(field: str, name: str, make: Callable[[], tuple[Any, ...]], *draws: Draw) -> Case:
    """A case of a function. `make` returns it, and then the modules that it uses."""

    def made() -> Made:
        function, *held = make()
        return Called(function, *held), lambda batch: tuple([draw(batch) for draw in draws])

    return model_case(field, name, made)


def at(target: str) -> Any:
    """Imports the object that is written `package.module:name`."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def second(*shape: int) -> Draw:
    """Draws floats whose second dimension is the batch."""
    return lambda batch: torch.randn(shape[0], batch, *shape[1:])


def decoder(name: str, model: str, **options: Any) -> Case:
    """A language model of ibm-fms."""

    def make() -> Made:
        module = importlib.import_module(f"fms.models.{name}")
        config = getattr(module, f"{model}Config")(**{**SMALL, **options})
        decoder_model = getattr(module, model)(config)
        decoder_model.reset_parameters()  # a new model has no values
        return decoder_model, lambda batch: (TEXT(batch),)

    return model_case("text", f"fms.{model}", make)


def waves() -> tuple[Any, ...]:
    """A one-dimensional U-Net with modulation, attention and cross attention."""
    apex = importlib.import_module("a_unet.apex")
    outer, inner = [apex.ResnetItem, apex.ModulationItem], [apex.ResnetItem, apex.AttentionItem, apex.CrossAttentionItem]
    blocks = [
        apex.XBlock(channels=8, factor=2, items=outer),
        apex.XBlock(channels=16, factor=2, items=inner, attention_heads=2, attention_features=8),
    ]
    options = {"resnet_groups": 4, "modulation_features": 12, "embedding_features": 6}
    net = apex.XUNet(dim=1, in_channels=2, blocks=blocks, skip_t=apex.SkipCat, **options)
    return lambda x, features, embedding: net(x, features=features, embedding=embedding), net


def quantized(*layers: tuple[str, tuple[Any, ...], dict[str, Any]]) -> Callable[[], tuple[Any, ...]]:
    """Layers of brevitas."""

    def make() -> tuple[Any, ...]:
        net = nn.Sequential(*[getattr(importlib.import_module("brevitas.nn"), name)(*args, **more) for name, args, more in layers])
        return net, net

    return make


def generated() -> tuple[Any, ...]:
    """A network whose weights come from a hypernetwork."""
    net = at("hypnettorch.mnets:MLP")(n_in=3, n_out=2, hidden_layers=(5,), no_weights=True, verbose=False)
    shapes = net.param_shapes
    hyper = at("hypnettorch.hnets:HMLP")(shapes, uncond_in_size=0, cond_in_size=4, layers=(8,), num_cond_embs=3, verbose=False)
    return lambda x: net(x, weights=hyper(cond_id=1)), hyper, net


def lorentz() -> tuple[Any, ...]:
    """A transformer over multivectors."""
    lgatr = importlib.import_module("lgatr")
    widths = {"in_mv_channels": 1, "out_mv_channels": 1, "hidden_mv_channels": 4, "in_s_channels": 2, "out_s_channels": 1}
    net = lgatr.LGATr(num_blocks=1, **widths, hidden_s_channels=8, attention={"num_heads": 2}, mlp={})
    return lambda vectors, scalars: net(multivectors=lgatr.embed_vector(vectors).unsqueeze(-2), scalars=scalars), net


def calibrated() -> tuple[Any, ...]:
    """A lattice of two calibrated inputs."""
    numpy, layers = importlib.import_module("numpy"), importlib.import_module("pytorch_lattice.layers")
    calibrators = [layers.NumericalCalibrator(numpy.linspace(-2, 2, 5), output_min=0.0, output_max=1.0) for _ in range(2)]
    lattice = layers.Lattice([2, 2])
    columns = lambda x: torch.cat([calibrator(x[:, [number]]) for number, calibrator in enumerate(calibrators)], 1)  # noqa: E731
    return lambda x: lattice(columns(x)), lattice, *calibrators


def truth() -> tuple[Any, ...]:
    """The truth of "for all x and y: p(x) and not p(y)"."""
    ltn = importlib.import_module("ltn")
    predicate = ltn.Predicate(nn.Sequential(nn.Linear(3, 8), nn.ELU(), nn.Linear(8, 1), nn.Sigmoid()))
    every = ltn.Quantifier(ltn.fuzzy_ops.AggregPMeanError(p=2), quantifier="f")
    no, both = ltn.Connective(ltn.fuzzy_ops.NotStandard()), ltn.Connective(ltn.fuzzy_ops.AndProd())

    def formula(x: torch.Tensor, y: torch.Tensor) -> Any:
        first, other = ltn.Variable("x", x), ltn.Variable("y", y)
        return every([first, other], both(predicate(first), no(predicate(other)))).value

    return formula, predicate


def explained(kind: str, **options: Any) -> Callable[[], tuple[Any, ...]]:
    """The attribution of a small network's output to its inputs."""

    def make() -> tuple[Any, ...]:
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        method = at(f"captum.attr:{kind}")(net)
        return lambda x: method.attribute(x, target=1, **options).detach(), net

    return make


def lens() -> tuple[Any, ...]:
    """The intensity of a field behind a lens and a phase modulator."""
    optics, elements = importlib.import_module("torchoptics"), importlib.import_module("torchoptics.elements")
    at_once = {"wavelength": 7e-7, "spacing": 1e-5}
    lens, phase = elements.Lens((16, 16), 0.02, z=0, spacing=1e-5), nn.Parameter(torch.randn(16, 16))
    system = optics.System(lens, elements.PhaseModulator(phase, z=0.01, spacing=1e-5))
    return lambda x: system.measure_at_z(optics.Field(x.to(torch.cdouble), **at_once), 0.02).intensity(), system


def hedge() -> tuple[Any, ...]:
    """The delta and the price of a European option."""
    option = at("pfhedge.nn:BSEuropeanOption")(strike=1.0)

    def values(x: torch.Tensor) -> Any:
        moneyness, time, volatility = x[:, 0] * 0.1, x[:, 1].abs() + 0.1, x[:, 2].abs() + 0.1
        return option(torch.stack([moneyness, time, volatility], 1)), option.price(moneyness, time, volatility)

    return values, option


def tracked() -> tuple[Any, ...]:
    """A Kalman filter of a position and a speed."""
    kf = importlib.import_module("torch_kf")
    moves, seen = torch.tensor([[1.0, 1.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    model = kf.KalmanFilter(moves, seen, torch.eye(2) * 0.1, torch.eye(1))

    def states(x: torch.Tensor) -> Any:
        start = kf.GaussianState(torch.zeros(x.shape[1], 2, 1), torch.eye(2).expand(x.shape[1], 2, 2))
        result = model.filter(start, x, return_all=True)
        return result.mean, result.covariance

    return (states,)


def processed(kind: str) -> Callable[[], tuple[Any, ...]]:
    """An audio effect of dasp-pytorch."""

    def make() -> tuple[Any, ...]:
        effect = at(f"dasp_pytorch:{kind}")(44100)
        return (lambda x, parameters: effect.process_normalized(x, parameters.sigmoid()),)

    return make


def flowed() -> tuple[Any, ...]:
    """An ordinary differential equation with fixed steps."""
    utils = importlib.import_module("flow_matching.utils")

    class Velocity(utils.ModelWrapper):  # type: ignore[misc, name-defined]
        def forward(self, x: torch.Tensor, t: torch.Tensor, **extras: Any) -> torch.Tensor:
            velocity: torch.Tensor = self.model(torch.cat([x, t.expand(x.shape[0], 1)], 1))
            return velocity

    model = Velocity(nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 2)))
    solver = at("flow_matching.solver:ODESolver")(velocity_model=model)
    return lambda x: solver.sample(x_init=x, step_size=0.25, method="midpoint"), model


def rotations() -> tuple[Any, ...]:
    """The rotations nearest to matrices, and quaternions between two."""
    roma = importlib.import_module("roma")

    def nearest(matrices: torch.Tensor, quaternions: torch.Tensor) -> Any:
        unit = quaternions / quaternions.norm(dim=-1, keepdim=True)
        between = roma.unitquat_slerp(unit, roma.quat_conjugation(unit), torch.linspace(0, 1, 3))
        return roma.special_procrustes(matrices), roma.rotmat_to_unitquat(roma.special_gramschmidt(matrices)), between

    return (nearest,)


def remembering() -> tuple[Any, ...]:
    """A transformer whose layers read the outputs of all layers at earlier steps."""
    feedback = importlib.import_module("labml_nn.transformers.feedback")
    inner, attention = at("labml_nn.transformers.feed_forward:FeedForward")(8, 16), feedback.FeedbackAttention(2, 8, 0.0)
    layer = feedback.FeedbackTransformerLayer(d_model=8, attn=attention, feed_forward=inner, dropout_prob=0.0)
    net = feedback.FeedbackTransformer(layer, 2)
    return net, net


CASES = [
    stranger("volumes", "cellpose.resnet_torch:CPnet", noise(2, 16, 16), arguments=([2, 8, 16], 3, 3)),
    stranger("control", "elegantrl.agents.AgentDQN:QNetDuel", noise(6), arguments=([16, 16], 6, 3)),
    stranger("control", "elegantrl.agents.AgentSAC:ActorSAC", noise(6), arguments=([16, 16], 6, 3)),
    called("diffusion", "a_unet.XUNet", waves, noise(2, 16), noise(12), noise(3, 6)),
    called("diffusion", "flow_matching.ODESolver", flowed, noise(2)),
    stranger("text", "mega_pytorch:Mega", ids(12, WORDS), dim=16, num_tokens=WORDS, depth=2, ema_heads=4, attn_dim_qk=8,
        attn_dim_value=16, laplacian_attn_fn=True),
    stranger("text", "n_grammer_pytorch:VQNgrammer", noise(12, 8), num_clusters=8, num_heads=2, dim_per_head=4, ngram_vocab_size=61,
        ngram_emb_dim=2),
    called("text", "labml_nn.FeedbackTransformer", remembering, second(4, 8)),
    decoder("llama", "LLaMA", kvheads=1, max_expected_seq_len=16, multiple_of=8),
    decoder("granite", "Granite", kvheads=1, head_dim=8),
    decoder("gpt_bigcode", "GPTBigCode", max_expected_seq_len=16),
    stranger("neurons", "cebra.models:init", noise(6, 14), arguments=("offset10-model", 6, 16, 3)),
    stranger("tabular", "kan_gpt.kan.KAN:KAN", noise(3), width=[3, 4, 2], grid=3, k=3),
    called("tabular", "pytorch_lattice.Lattice", calibrated, noise(2)),
    called("logic", "ltn.Quantifier", truth, noise(3), noise(3)),
    called("quantized", "brevitas.QuantLinear", quantized(
        ("QuantIdentity", (), {"bit_width": 8}), ("QuantLinear", (8, 16), {"bias": True, "weight_bit_width": 4}),
        ("QuantReLU", (), {"bit_width": 4}), ("QuantLinear", (16, 3), {"bias": True, "weight_bit_width": 4})), noise(8)),
    called("quantized", "brevitas.QuantConv2d", quantized(
        ("QuantConv2d", (3, 8, 3), {"weight_bit_width": 2, "padding": 1}), ("QuantReLU", (), {"bit_width": 3}),
        ("QuantConv2d", (8, 4, 3), {"groups": 4})), noise(3, 12, 12)),
    stranger("quantized", "bitlinear_pytorch:BitLinear", noise(8), arguments=(8, 16)),
    called("hypernetworks", "hypnettorch.HMLP", generated, noise(3)),
    called("physics", "lgatr.LGATr", lorentz, noise(5, 4), noise(5, 2)),
    called("explanations", "captum.IntegratedGradients", explained("IntegratedGradients", n_steps=8), noise(5)),
    called("explanations", "captum.Saliency", explained("Saliency"), noise(5)),
    called("optics", "torchoptics.System", lens, noise(16, 16)),
    called("finance", "pfhedge.BSEuropeanOption", hedge, noise(3)),
    called("series", "torch_kf.KalmanFilter", tracked, second(STEPS, 1, 1)),
    stranger("genomes", "bpnetlite.bpnet:BPNet", noise(4, 64), n_filters=8, n_layers=2, trimming=8, n_control_tracks=0,
        verbose=False),
    called("audio", "dasp_pytorch.ParametricEQ", processed("ParametricEQ"), noise(1, 256), noise(18)),
    called("audio", "dasp_pytorch.Compressor", processed("Compressor"), noise(1, 256), noise(6)),
    called("geometry", "roma.special_procrustes", rotations, noise(3, 3), noise(4)),
    stranger("sorting", "diffsort:DiffSortNet", noise(8), arguments=("bitonic", 8), steepness=5),
    stranger("flows", "lampe.inference:NPE", noise(3), noise(4), arguments=(3, 4), transforms=2, hidden_features=[16]),
    stranger("neurons", "neuralpredictors.layers.readouts:FullGaussian2d", noise(4, 8, 8), arguments=((4, 8, 8), 5, True)),
    stranger("pictures", "pytorch_msssim:SSIM", noise(1, 24, 24), noise(1, 24, 24), data_range=1.0, size_average=False, channel=1),
    stranger("diffusion", "torchcfm.models.unet:UNetModel", lambda batch: torch.rand(batch), noise(1, 8, 8), dim=(1, 8, 8),
        num_channels=32, num_res_blocks=1, channel_mult=[1, 2], attention_resolutions="4", num_heads=2),
    stranger("text", "torchnlp.nn:Attention", noise(3, 8), noise(5, 8), arguments=(8,)),
]  # fmt: skip
"""The cases of this module."""
