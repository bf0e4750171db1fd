"""Attention of many kinds, signals, complex and Clifford algebras, knowledge graphs, point clouds, solvers and Bayesian layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...case import Case, Made
from ..shared import fractions, ids, noise
from .stranger import Draw, model_case, stranger

WORDS = 50
LENGTH = 16
TEXT = ids(LENGTH, WORDS)
ROWS = noise(12, 16)
PICTURE = noise(3, 32, 32)
HEADS = {"heads": 2, "dim_head": 8}
TEXT_MODEL = {"num_tokens": WORDS, "dim": 16, "depth": 1, "max_seq_len": LENGTH, "heads": 2}


class Part(nn.Module):
    """Returns `take` of what a function of a model returns."""

    def __init__(
        self, model: nn.Module, call: Callable[..., Any] | None = None, take: Callable[[Any], Any] = lambda result: result
    ):
        super().__init__()
        self.model, self.call, self.take = model, call or model, take

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.take(self.call(*inputs))


def first(model: nn.Module) -> nn.Module:
    """Returns the first of a model's results."""
    return Part(model, take=lambda result: result[0])


class Function(nn.Module):
    """Calls a function without parameters."""

    def __init__(self, function: Callable[..., torch.Tensor], **options: Any):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs, **self.options)


def complexes(*shape: int) -> Draw:
    """Draws complex numbers."""
    return lambda batch: torch.randn(batch, *shape, dtype=torch.complex64)


def text(target: str, *draws: Draw, **options: Any) -> Case:
    """A case of a model of words."""
    return stranger("attention", target, *(draws or (TEXT,)), **options)


def slots() -> Made:
    """Slot attention, whose slots begin at random: here at their means, for otherwise no two calls are equal."""
    from slot_attention import MultiHeadSlotAttention

    model = MultiHeadSlotAttention(num_slots=3, dim=16, heads=2, dim_head=8, iters=2, hidden_dim=16)
    nn.init.constant_(model.slots_logsigma, -100.0)
    return model, lambda batch: (torch.randn(batch, 12, 16),)


# ---- signals ----


def wavelet() -> Made:
    """The discrete wavelet transform of two levels."""
    from pytorch_wavelets import DWTForward

    return DWTForward(J=2, wave="db1", mode="zero"), lambda batch: (torch.randn(batch, 2, 16, 16),)


def speaker() -> Made:
    """The speaker embedding, with the weights that the package brings."""
    from resemblyzer import VoiceEncoder

    return VoiceEncoder("cpu", verbose=False), lambda batch: (torch.rand(batch, 20, 40),)


def deformed() -> Made:
    """Deformable convolution in one dimension; the offsets are an input."""
    from dc1d.nn import DeformConv1d

    model = DeformConv1d(4, 6, 3, padding="same")
    return model, lambda batch: (torch.randn(batch, 4, 20), torch.randn(batch, 1, 20, 3))


# ---- algebras ----


def clifford_block() -> Made:
    """A residual block of Clifford convolutions."""
    from cliffordlayers.models.models_2d import CliffordBasicBlock2d

    model = CliffordBasicBlock2d((1, 1), 4, 4, norm=True)
    return model, lambda batch: (torch.randn(batch, 4, 8, 8, 4),)


def clifford_fourier() -> Made:
    """A Fourier block of Clifford algebra."""
    from cliffordlayers.models.models_2d import CliffordFourierBasicBlock2d

    model = CliffordFourierBasicBlock2d((1, 1), 4, 4, modes1=3, modes2=3)
    return model, lambda batch: (torch.randn(batch, 4, 8, 8, 4),)


# ---- genomes and molecules ----


def enformer() -> Made:
    """Enformer, small; returns the tracks of one species."""
    from enformer_pytorch import Enformer, EnformerConfig

    config = EnformerConfig(
        dim=48, depth=1, heads=2, output_heads={"human": 5}, target_length=4, attn_dim_key=8, num_downsamples=5, dim_divisible_by=8
    )
    return Part(Enformer(config), take=lambda result: result["human"]), lambda batch: (torch.randint(0, 5, (batch, 256)),)


# ---- tables, survival and recommenders ----


def mixed() -> Made:
    """An MLP of numbers and categories."""
    from torchtuples.practical import MixedInputMLP

    model = MixedInputMLP(4, [5, 6], [3, 3], [8], 2)
    return model, lambda batch: (torch.randn(batch, 4), torch.randint(0, 5, (batch, 2)))


def deeptab(name: str, folder: str, config: str, **options: Any) -> Case:
    """A case of a deeptab architecture with three numbers and two categories."""

    def make() -> Made:
        import importlib

        numbers = {f"number{index}": {"preprocessing": "standard", "dimension": 1, "categories": None} for index in range(3)}
        categories = {f"category{index}": {"preprocessing": "int", "dimension": 1, "categories": 4} for index in range(2)}
        configs = importlib.import_module("deeptab.configs")
        maker = getattr(importlib.import_module(f"deeptab.architectures.{folder}"), name)
        model = maker((numbers, categories, {}), num_classes=2, config=getattr(configs, config)(**options))

        class Table(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
                scores: torch.Tensor = self.model(list(numbers.split(1, 1)), list(categories.split(1, 1)), [])
                return scores

        return Table(), lambda batch: (torch.randn(batch, 3), torch.randint(0, 4, (batch, 2)))

    return model_case("tables", f"deeptab.{name}", make)


def rechub(name: str, make_model: Callable[[Any, Any], nn.Module], columns: Sequence[str]) -> Case:
    """A case of a torch-rechub model. `columns` names its inputs; those that begin with "past" are sequences."""

    def make() -> Made:
        from torch_rechub.basic import features

        class Columns(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = make_model(features, nn)

            def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
                result: torch.Tensor = self.model(dict(zip(columns, tensors, strict=True)))
                return result

        def inputs(batch: int) -> tuple[torch.Tensor, ...]:
            return tuple([torch.randint(1, 10, (batch, 5) if name.startswith("past") else (batch,)) for name in columns])

        return Columns(), inputs

    return model_case("recommenders", f"torch_rechub.{name}", make)


def dcn(features: Any, _: Any) -> nn.Module:
    from torch_rechub.models.ranking import DCNv2

    columns = [features.SparseFeature(name, 10, 8) for name in ("user", "item")]
    return DCNv2(columns, 2, {"dims": [8], "activation": "relu"}, use_low_rank_mixture=False)


def din(features: Any, _: Any) -> nn.Module:
    from torch_rechub.models.ranking import DIN

    user, item = [features.SparseFeature(name, 10, 8) for name in ("user", "item")]
    past = features.SequenceFeature("past", 10, 8, pooling="concat", shared_with="item")
    return DIN([user], [past], [item], {"dims": [8]}, {"dims": [8], "activation": "dice", "use_softmax": False})


def mmoe(features: Any, _: Any) -> nn.Module:
    from torch_rechub.models.multi_task import MMOE

    columns = [features.SparseFeature(name, 10, 8) for name in ("user", "item")]
    return MMOE(columns, ["classification", "regression"], 2, {"dims": [8]}, [{"dims": [4]}, {"dims": [4]}])


def hstu() -> Made:
    """HSTU, with the differences of times as a second input."""
    from torch_rechub.models.generative import HSTUModel

    model = HSTUModel(WORDS, d_model=16, n_heads=2, n_layers=1, dqk=8, dv=8, max_seq_len=LENGTH, num_time_buckets=8)
    return model, lambda batch: (torch.randint(1, WORDS, (batch, LENGTH)), torch.randint(0, 5000, (batch, LENGTH)))


def knowledge(name: str, **options: Any) -> Case:
    """A case of a pykeen model, which scores triples."""

    def make() -> Made:
        import importlib

        from pykeen.triples import KGInfo

        maker = getattr(importlib.import_module("pykeen.models"), name)
        model = maker(triples_factory=KGInfo(12, 4, create_inverse_triples=False), **options)
        columns = torch.tensor([12, 4, 12])
        return Part(model, model.score_hrt), lambda batch: ((torch.rand(batch, 3) * columns).long(),)

    return model_case("knowledge", f"pykeen.{name}", make)


# ---- forecasting ----


def interpretable() -> Made:
    """The attention of the temporal fusion transformer."""
    from pytorch_forecasting.models.temporal_fusion_transformer.sub_modules import InterpretableMultiHeadAttention

    model = InterpretableMultiHeadAttention(2, 16, dropout=0.0)
    return model, lambda batch: tuple([torch.randn(batch, 8, 16) for _ in range(3)])


def gated() -> Made:
    """The gated residual network of the temporal fusion transformer, with a context."""
    from pytorch_forecasting.models.temporal_fusion_transformer.sub_modules import GatedResidualNetwork

    return GatedResidualNetwork(8, 16, 6, context_size=4), lambda batch: (torch.randn(batch, 5, 8), torch.randn(batch, 1, 4))


def nhits() -> Made:
    """N-HiTS without covariates."""
    from pytorch_forecasting.models.nhits.sub_modules import NHiTS

    model = NHiTS(
        context_length=16, prediction_length=4, output_size=[1], static_size=0, encoder_covariate_size=0, decoder_covariate_size=0,
        static_hidden_size=0, n_blocks=[1, 1], n_layers=[2, 2], hidden_size=[[8, 8], [8, 8]], pooling_sizes=[2, 1],
        downsample_frequencies=[2, 1], pooling_mode="max", interpolation_mode="linear", dropout=0.0, activation="ReLU",
        initialization="lecun_normal", batch_normalization=False, shared_weights=False, naive_level=True,
    )  # fmt: skip

    class Series(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, past: torch.Tensor) -> Any:
            return self.model(past, torch.ones(past.shape[:2]), None, None, None)

    return Series(), lambda batch: (torch.randn(batch, 16, 1),)


# ---- points ----


def cloud(name: str, **options: Any) -> Case:
    """A case of a classifier of torch_pointcloud: 32 points of each cloud, in one list with their clouds' numbers."""

    def make() -> Made:
        import importlib

        maker = getattr(importlib.import_module("torch_pointcloud.models"), name)

        class Points(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = maker(0, 4, **options)

            def forward(self, points: torch.Tensor, clouds: torch.Tensor) -> torch.Tensor:
                scores: torch.Tensor = self.model(None, points, clouds)
                return scores

        return Points(), lambda batch: (torch.randn(batch * 32, 3), torch.arange(batch).repeat_interleave(32))

    return model_case("points", f"torch_pointcloud.{name}", make)


def skinned() -> Made:
    """Linear blend skinning of a body model, with drawn tables."""
    from smplx.lbs import lbs

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in {
                "template": (20, 3),
                "shapes": (20, 3, 4),
                "poses": (27, 60),
                "joints": (4, 20),
                "weights": (20, 4),
            }.items():
                self.register_buffer(name, torch.rand(shape))
            self.register_buffer("parents", torch.tensor([-1, 0, 1, 1]))

        def forward(self, betas: torch.Tensor, pose: torch.Tensor) -> Any:
            return lbs(betas, pose, self.template, self.shapes, self.poses, self.joints, self.parents, self.weights)

    return Body(), lambda batch: (torch.randn(batch, 4), torch.randn(batch, 12))


# ---- solvers, logic and chance ----


def neural_ode() -> Made:
    """A neural ODE of torchdyn with fixed steps."""
    from torchdyn.core import NeuralODE

    class Ode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            field = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
            self.model = NeuralODE(field, solver="rk4", sensitivity="autograd")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            path: torch.Tensor = self.model(x, torch.linspace(0, 1, 4))[1]
            return path

    return Ode(), lambda batch: (torch.randn(batch, 4),)


def symbols() -> Made:
    """Formulas of SymPy."""
    import sympy
    import sympytorch

    x, y = sympy.symbols("x y")
    formulas = [sympy.cos(x) * 2 + y, sympy.Max(x, y) ** 2, sympy.exp(-(x**2))]
    model = sympytorch.SymPyModule(expressions=formulas)

    class Formulas(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            values: torch.Tensor = self.model(x=x, y=y)
            return values

    return Formulas(), lambda batch: (torch.randn(batch), torch.randn(batch))


def simplex(name: str) -> Case:
    """A case of a sparse softmax."""

    def make() -> Made:
        import importlib

        return Function(getattr(importlib.import_module("entmax"), name), dim=-1), lambda batch: (torch.randn(batch, 12),)

    return model_case("scores", f"entmax.{name}", make)


def sinkhorn() -> Made:
    """The Sinkhorn divergence of two clouds of points."""
    from geomloss import SamplesLoss

    model = SamplesLoss("sinkhorn", p=2, blur=0.5, diameter=4.0, backend="tensorized")
    return model, lambda batch: (torch.rand(batch, 8, 2), torch.rand(batch, 8, 2))


def persistence() -> Made:
    """PersLay, which describes persistence diagrams."""
    from perslay.layers import GaussianPerslayPhi, Perslay, PowerPerslayWeight

    phi = GaussianPerslayPhi((5, 5), ((0.0, 1.0), (0.0, 1.0)), 0.2, 0.2)
    model = Perslay(PowerPerslayWeight(1.0, 1.5), phi, torch.sum, nn.Flatten())
    return model, lambda batch: (torch.rand(batch, 7, 2).sort(-1).values,)


def train() -> Made:
    """A tensor train of tntorch, evaluated in full from drawn cores."""
    import tntorch

    def full(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        dense: torch.Tensor = tntorch.Tensor([a, b, c]).torch()
        return dense

    return Function(full), lambda batch: (torch.randn(1, batch, 2), torch.randn(2, 5, 3), torch.randn(3, 4, 1))


def bayes() -> Made:
    """A Bayesian layer whose weights were frozen, as its documentation does for tests."""
    from torchbnn import BayesLinear
    from torchbnn.utils import freeze

    model = nn.Sequential(BayesLinear(0, 0.1, 4, 8), nn.ReLU(), BayesLinear(0, 0.1, 8, 2))
    freeze(model)
    return model, lambda batch: (torch.randn(batch, 4),)


def bayes_lstm() -> Made:
    """A Bayesian LSTM, frozen."""
    from blitz.modules import BayesianLSTM

    return first(BayesianLSTM(4, 8, freeze=True)), lambda batch: (torch.randn(batch, 6, 4),)


def autoencoder() -> Made:
    """pythae's default encoder of a variational autoencoder."""
    from pythae.models import VAE, VAEConfig

    model = VAE(VAEConfig(input_dim=(1, 8, 8), latent_dim=4)).encoder
    return Part(model, take=lambda result: (result.embedding, result.log_covariance)), lambda batch: (torch.randn(batch, 1, 8, 8),)


def decisions() -> Made:
    """d3rlpy's discrete decision transformer."""
    from d3rlpy.models.torch.encoders import VectorEncoder
    from d3rlpy.models.torch.transformers import DiscreteDecisionTransformer, GlobalPositionEncoding

    model = DiscreteDecisionTransformer(
        encoder=VectorEncoder((3,), [16]), embed_size=16, position_encoding=GlobalPositionEncoding(16, 30, 6), action_size=4,
        num_heads=2, context_size=18, num_layers=1, attn_dropout=0.0, resid_dropout=0.0, embed_dropout=0.0, activation=nn.ReLU(),
        embed_activation=nn.Tanh(),
    )  # fmt: skip

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        steps = torch.arange(1, 7).repeat(batch, 1)
        return torch.randn(batch, 6, 3), torch.randint(0, 4, (batch, 6, 1)), torch.randn(batch, 6, 1), steps, torch.ones(batch, 6)

    return model, inputs


def sparse(name: str, *arguments: int) -> Case:
    """A case of a sparse autoencoder of dictionary_learning."""
    return stranger("dictionaries", f"dictionary_learning.dictionary:{name}", noise(16), arguments=arguments)


def atoms(batch: int) -> tuple[torch.Tensor, ...]:
    """Features, coordinates and a mask of 8 atoms."""
    return torch.randint(0, 20, (batch, 8)), torch.randn(batch, 8, 3), torch.ones(batch, 8, dtype=torch.bool)


CASES = [
    text("h_transformer_1d:HTransformer1D", block_size=4, dim_head=8, causal=True, **TEXT_MODEL),
    text("linear_attention_transformer:LinearAttentionTransformerLM", n_local_attn_heads=1, local_attn_window_size=4, **TEXT_MODEL),
    text("sinkhorn_transformer:SinkhornTransformerLM", bucket_size=4, sinkhorn_iter=3, **TEXT_MODEL),
    text("native_sparse_attention_pytorch:SparseAttention", ROWS, dim=16, dim_head=8, heads=2, sliding_window_size=2,
        compress_block_size=4, compress_block_sliding_stride=2, selection_block_size=4, num_selected_blocks=2, causal=True),
    model_case("attention", "slot_attention.MultiHeadSlotAttention", slots),
    text("graph_transformer_pytorch:GraphTransformer", noise(6, 16), noise(6, 6, 4), dim=16, depth=1, edge_dim=4,
        with_feedforwards=True, wrapped=first, **HEADS),
    text("ponder_transformer:PonderTransformer", num_tokens=WORDS, dim=16, max_seq_len=LENGTH, **HEADS),
    text("flash_pytorch:FLASHTransformer", num_tokens=WORDS, dim=16, depth=1, group_size=4, query_key_dim=8, causal=True),
    text("infini_transformer_pytorch:InfiniTransformer", num_tokens=WORDS, dim=16, depth=1, **HEADS),
    text("ring_attention_pytorch:RingTransformer", num_tokens=WORDS, dim=16, depth=1, causal=True, bucket_size=4, ring_seq_size=8,
        **HEADS),
    text("compositional_attention_pytorch:CompositionalAttention", ROWS, dim=16, dim_head=8, num_searches=2, num_retrievals=2),
    text("hourglass_transformer_pytorch:HourglassTransformerLM", num_tokens=WORDS, dim=16, max_seq_len=LENGTH, depth=(1, 1, 1),
        shorten_factor=2, **HEADS),
    text("perceiver_ar_pytorch:PerceiverAR", num_tokens=WORDS, dim=16, depth=1, max_seq_len=LENGTH, cross_attn_seq_len=8, heads=2,
        dim_head=32),
    text("rela_transformer:ReLATransformer", dim_head=8, **TEXT_MODEL),
    text("memory_efficient_attention_pytorch.transformer:Transformer", dim_head=8, causal=True, use_flash_attn=False, **TEXT_MODEL),
    text("charformer_pytorch:GBST", num_tokens=WORDS, dim=16, max_block_size=3, downsample_factor=2, wrapped=first),
    text("sru:SRU", noise(5, 12), input_size=12, hidden_size=8, num_layers=2, bidirectional=True),
    text("discrete_key_value_bottleneck_pytorch:DiscreteKeyValueBottleneck", ROWS, dim=16, num_memories=8, dim_memory=8,
        num_memory_codebooks=2),
    stranger("vision", "segformer_pytorch:Segformer", PICTURE, dims=(8, 8, 16, 16), heads=(1, 1, 2, 2), ff_expansion=(2, 2, 2, 2),
        num_layers=1, decoder_dim=8),
    stranger("vision", "uformer_pytorch:Uformer", PICTURE, dim=8, stages=2, num_blocks=1, window_size=4, **HEADS),
    stranger("vision", "x_unet:XUnet", PICTURE, dim=8, dim_mults=(1, 2), num_blocks_per_stage=(1, 1),
        num_self_attn_per_stage=(0, 1), nested_unet_depths=(1, 0), nested_unet_dim=8, attn_heads=2, attn_dim_head=8),
    stranger("vision", "bottleneck_transformer_pytorch:BottleStack", noise(8, 16, 16), dim=8, fmap_size=16, dim_out=16,
        num_layers=2, rel_pos_emb=True, **HEADS),
    stranger("vision", "timesformer_pytorch:TimeSformer", noise(4, 3, 16, 16), dim=16, num_frames=4, num_classes=5, image_size=16,
        patch_size=8, depth=1, **HEADS),
    stranger("vision", "conv_lstm:ConvLSTM", noise(3, 2, 8, 8), input_dim=2, hidden_dim=4, kernel_size=3, num_layers=2),
    stranger("vision", "esbn_pytorch:ESBN", inputs=lambda batch: (torch.randn(2, batch, 3, 32, 32),), value_dim=8, key_dim=8,
        hidden_dim=16),
    stranger("series", "torchtsmixer:TSMixer", noise(16, 3), sequence_length=16, prediction_length=4, input_channels=3, ff_dim=8),
    stranger("series", "torchtsmixer:TSMixerExt", noise(16, 2), noise(16, 3), noise(4, 3), noise(2), sequence_length=16,
        prediction_length=4, input_channels=2, extra_channels=3, static_channels=2, hidden_channels=8, ff_dim=8),
    stranger("series", "etsformer_pytorch:ETSFormer", noise(32, 3), time_features=3, model_dim=16, layers=1, heads=2, K=2,
        wrapped=lambda model: Part(model, lambda x: model(x, num_steps_forecast=4))),
    model_case("series", "pytorch_forecasting.InterpretableMultiHeadAttention", interpretable),
    model_case("series", "pytorch_forecasting.GatedResidualNetwork", gated),
    model_case("series", "pytorch_forecasting.NHiTS", nhits),
    stranger("signals", "torch_mdct:MDCT", noise(256), win_length=64),
    stranger("signals", "torch_mdct:IMDCT", noise(32, 9), win_length=64),
    stranger("signals", "torch_frft.layer:FrFTLayer", noise(16), order=0.7),
    stranger("signals", "torch_frft.layer:DFrFTLayer", noise(16), order=0.7),
    model_case("signals", "pytorch_wavelets.DWTForward", wavelet),
    model_case("signals", "resemblyzer.VoiceEncoder", speaker),
    model_case("signals", "dc1d.DeformConv1d", deformed),
    stranger("algebras", "complextorch.nn:CVKANLayer", complexes(4), in_features=4, out_features=3, num_grid=4),
    stranger("algebras", "complextorch.nn:S4DBlock", complexes(12, 4), channels=4, state_size=4),
    stranger("algebras", "complextorch.nn:MambaBlock", complexes(6, 4), channels=4, state_size=4),
    stranger("algebras", "complextorch.nn:TransformerEncoderLayer", complexes(6, 8), d_model=8, nhead=2, dim_feedforward=8),
    stranger("algebras", "torch_eunn:EUNN", inputs=lambda batch: (torch.randn(batch, 8, 2),), hidden_size=8, capacity=4),
    stranger("algebras", "torch_eunn:EURNN", inputs=lambda batch: (torch.randn(5, batch, 4),), input_size=4, hidden_size=8),
    model_case("algebras", "cliffordlayers.CliffordBasicBlock2d", clifford_block),
    model_case("algebras", "cliffordlayers.CliffordFourierBasicBlock2d", clifford_fourier),
    model_case("molecules", "enformer_pytorch.Enformer", enformer),
    stranger("molecules", "en_transformer:EnTransformer", inputs=atoms, num_tokens=20, dim=16, depth=1, neighbors=4,
        wrapped=lambda model: Part(model, lambda feats, coors, mask: model(feats, coors, mask=mask)), heads=2, dim_head=32),
    model_case("tables", "torchtuples.MixedInputMLP", mixed),
    stranger("tables", "pycox.models.cox_time:MLPVanillaCoxTime", noise(4), fractions(1), in_features=4, num_nodes=[8, 8]),
    deeptab("Mambular", "mambular", "MambularConfig", d_model=8, n_layers=1),
    deeptab("FTTransformer", "ft_transformer", "FTTransformerConfig", d_model=8, n_layers=1, n_heads=2,
        transformer_dim_feedforward=8),
    deeptab("SAINT", "saint", "SAINTConfig", d_model=8, n_layers=1, n_heads=2),
    deeptab("NODE", "node", "NODEConfig", num_layers=1, layer_dim=8, depth=3),
    rechub("DCNv2", dcn, ("user", "item")),
    rechub("DIN", din, ("user", "item", "past")),
    rechub("MMOE", mmoe, ("user", "item")),
    model_case("recommenders", "torch_rechub.HSTUModel", hstu),
    knowledge("RotatE", embedding_dim=8),
    knowledge("TuckER", embedding_dim=8, relation_dim=4),
    knowledge("ConvE", embedding_dim=16, output_channels=4),
    knowledge("NTN", embedding_dim=8),
    cloud("PointNetClassification", mlp1_channels=(8,), mlp2_channels=(8, 16), tnet_mlp1_dims=(8, 8), tnet_mlp2_dims=(8,)),
    model_case("points", "smplx.lbs", skinned),
    model_case("solvers", "torchdyn.NeuralODE", neural_ode),
    model_case("solvers", "sympytorch.SymPyModule", symbols, needs=("sympytorch", "sympy")),
    simplex("sparsemax"),
    simplex("entmax15"),
    simplex("entmax_bisect"),
    model_case("scores", "geomloss.SamplesLoss", sinkhorn),
    model_case("scores", "perslay.Perslay", persistence),
    model_case("solvers", "tntorch.Tensor", train),
    model_case("chance", "torchbnn.BayesLinear", bayes),
    model_case("chance", "blitz.BayesianLSTM", bayes_lstm),
    model_case("chance", "pythae.VAE", autoencoder),
    model_case("control", "d3rlpy.DiscreteDecisionTransformer", decisions),
    sparse("AutoEncoder", 16, 32),
    sparse("GatedAutoEncoder", 16, 32),
    sparse("JumpReluAutoEncoder", 16, 32),
]  # fmt: skip
"""The cases of this module."""
