"""Tabular data, recommendations, time series."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...case import Case, Made
from ..shared import noise
from .stranger import model_case, stranger

COLUMNS = (4, 5, 6)
"""Number of categories in each of three columns."""

FIELDS = [4, 5, 6, 7]
WIDE = {"embed_dim": 8}
DEEP = {**WIDE, "mlp_dims": (16,)}


def categories(batch: int) -> torch.Tensor:
    """Draws three columns of categories."""
    return torch.stack([torch.randint(0, count, (batch,)) for count in COLUMNS], 1)


def clicks(name: str, model: str, **options: Any) -> Case:
    """A model of torchfm: click probability from four fields."""

    def fields(batch: int) -> torch.Tensor:
        return torch.stack([torch.randint(0, count, (batch,)) for count in FIELDS], 1)

    return stranger("recommenders", f"torchfm.model.{name}:{model}", fields, field_dims=FIELDS, **options)


def deepctr(name: str, **options: Any) -> Case:
    """A model of DeepCTR: two columns of categories and one of numbers."""

    def make() -> Made:
        import deepctr_torch.models
        from deepctr_torch.inputs import DenseFeat, SparseFeat

        columns = [SparseFeat("user", 6, embedding_dim=4), SparseFeat("item", 9, embedding_dim=4), DenseFeat("price", 1)]
        model = getattr(deepctr_torch.models, name)(columns, columns, dnn_hidden_units=(16, 8), **options)

        def inputs(batch: int) -> torch.Tensor:
            return torch.cat([torch.randint(0, 6, (batch, 2)).float(), torch.rand(batch, 1)], 1)

        return model, lambda batch: (inputs(batch),)

    return model_case("recommenders", f"deepctr_torch.{name}", make)


def frame(name: str, **options: Any) -> Case:
    """A model of PyTorch Frame, called with tensors instead of a table."""

    def make() -> Made:
        import torch_frame
        from torch_frame.data.stats import StatType
        from torch_frame.nn import models

        statistics = {
            "a": {StatType.MEAN: 0.0, StatType.STD: 1.0, StatType.QUANTILES: [-2.0, -1.0, 0.0, 1.0, 2.0]},
            "b": {StatType.MEAN: 1.0, StatType.STD: 2.0, StatType.QUANTILES: [-2.0, -1.0, 0.0, 1.0, 2.0]},
        }

        class Numbers(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = getattr(models, name)(
                    out_channels=2,
                    num_layers=2,
                    col_stats=statistics,
                    col_names_dict={torch_frame.numerical: ["a", "b"]},
                    **options,
                )

            def forward(self, numbers: torch.Tensor) -> torch.Tensor:
                return self.model(torch_frame.TensorFrame({torch_frame.numerical: numbers}, {torch_frame.numerical: ["a", "b"]}))

        return Numbers(), lambda batch: (torch.randn(batch, 2),)

    return model_case("tabular", f"torch_frame.{name}", make)


def tabm() -> Made:
    """TabM over numbers and categories."""
    from tabm import TabM

    model = TabM.make(n_num_features=3, cat_cardinalities=list(COLUMNS), d_out=2, n_blocks=2, d_block=16, k=4)
    return model, lambda batch: (torch.randn(batch, 3), categories(batch))


def ft_transformer() -> Made:
    """The transformer of "Revisiting deep learning models for tabular data"."""
    from rtdl_revisiting_models import FTTransformer

    model = FTTransformer(
        n_cont_features=3, cat_cardinalities=list(COLUMNS), d_out=2, n_blocks=1, d_block=16, attention_n_heads=2,
        attention_dropout=0.1, ffn_d_hidden=16, ffn_d_hidden_multiplier=None, ffn_dropout=0.1, residual_dropout=0.0,
    )  # fmt: skip
    return model, lambda batch: (torch.randn(batch, 3), categories(batch))


def piecewise() -> Made:
    """Piecewise linear embeddings of numbers, by bins."""
    from rtdl_num_embeddings import PiecewiseLinearEmbeddings, compute_bins

    bins = compute_bins(torch.randn(50, 3), n_bins=6)
    return PiecewiseLinearEmbeddings(bins, 4, activation=False, version="B"), lambda batch: (torch.randn(batch, 3),)


def deep_ar() -> Made:
    """GluonTS' DeepAR: the parameters of the forecast distribution."""
    from gluonts.torch.model.deepar.module import DeepARModel

    model = DeepARModel(freq="D", context_length=8, prediction_length=1, num_layers=1, hidden_size=16, lags_seq=[1, 2],
                        num_parallel_samples=1)  # fmt: skip
    length = model._past_length

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, cat: Any, real: Any, time: Any, past: Any, seen: Any, later: Any) -> Any:
            return self.model.unroll_lagged_rnn(cat, real, time, past, seen, later)[:2]

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return (
            torch.zeros(batch, 1, dtype=torch.int64), torch.zeros(batch, 1), torch.randn(batch, length, 1),
            torch.rand(batch, length), torch.ones(batch, length), torch.randn(batch, 1, 1),
        )  # fmt: skip

    return Loss(), inputs


def chronos_bolt() -> Made:
    """Amazon's Chronos-Bolt: quantiles of a forecast."""
    from chronos.chronos_bolt import ChronosBoltModelForForecasting
    from transformers import T5Config

    config = T5Config(
        vocab_size=2, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=2, feed_forward_proj="relu",
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    config.chronos_config = {
        "context_length": 32, "prediction_length": 8, "input_patch_size": 8, "input_patch_stride": 8,
        "quantiles": [0.1, 0.5, 0.9], "use_reg_token": True,
    }  # fmt: skip
    return ChronosBoltModelForForecasting(config), lambda batch: (torch.randn(batch, 32),)


def tiny_time_mixer() -> Made:
    """IBM's patch mixer."""
    from tsfm_public.models.tinytimemixer import TinyTimeMixerConfig, TinyTimeMixerForPrediction

    config = TinyTimeMixerConfig(
        context_length=32, prediction_length=8, patch_length=8, patch_stride=8, num_input_channels=2, d_model=16, num_layers=1,
        decoder_num_layers=1, decoder_d_model=16, adaptive_patching_levels=0,
    )  # fmt: skip
    return TinyTimeMixerForPrediction(config), lambda batch: (torch.randn(batch, 32, 2),)


GLUON = {"prediction_length": 4, "context_length": 16}

CASES = [
    model_case("tabular", "tabm.TabM", tabm),
    model_case("tabular", "rtdl_revisiting_models.FTTransformer", ft_transformer),
    model_case("tabular", "rtdl_num_embeddings.PiecewiseLinearEmbeddings", piecewise),
    stranger("tabular", "rtdl_num_embeddings:PeriodicEmbeddings", noise(3), n_features=3, d_embedding=8, n_frequencies=6,
        lite=True),
    stranger("tabular", "pytorch_tabnet.tab_network:TabNet", lambda batch: torch.cat([torch.randn(batch, 3), categories(batch)], 1),
        input_dim=6, output_dim=2, n_d=4, n_a=4, n_steps=2, cat_idxs=[3, 4, 5], cat_dims=list(COLUMNS), cat_emb_dim=[2, 2, 2],
        group_attention_matrix=torch.eye(6)),
    stranger("tabular", "tab_transformer_pytorch:TabTransformer", categories, noise(3), categories=COLUMNS, num_continuous=3,
        dim=16, depth=1, heads=2, dim_head=8, num_residual_streams=1, mlp_act=nn.ReLU()),
    stranger("tabular", "tab_transformer_pytorch:FTTransformer", categories, noise(3), categories=COLUMNS, num_continuous=3,
        dim=16, depth=1, heads=2, dim_head=8, num_residual_streams=1),
    frame("FTTransformer", channels=8),
    frame("ExcelFormer", in_channels=8, num_cols=2, num_heads=2),
    clicks("lr", "LogisticRegressionModel"),
    clicks("fm", "FactorizationMachineModel", **WIDE),
    clicks("ffm", "FieldAwareFactorizationMachineModel", **WIDE),
    clicks("dfm", "DeepFactorizationMachineModel", dropout=0.1, **DEEP),
    clicks("afi", "AutomaticFeatureInteractionModel", atten_embed_dim=8, num_heads=2, num_layers=1, dropouts=(0.1, 0.1), **DEEP),
    clicks("xdfm", "ExtremeDeepFactorizationMachineModel", dropout=0.1, cross_layer_sizes=(8, 8), **DEEP),
    clicks("pnn", "ProductNeuralNetworkModel", dropout=0.1, method="outer", **DEEP),
    *[deepctr(name) for name in ("DeepFM", "DCN", "AutoInt", "FiBiNET")],
    model_case("series", "gluonts.DeepAR", deep_ar),
    stranger("series", "gluonts.torch.model.d_linear.module:DLinearModel", noise(16), lambda batch: torch.ones(batch, 16),
        hidden_dimension=8, kernel_size=5, **GLUON),
    stranger("series", "gluonts.torch.model.patch_tst.module:PatchTSTModel", noise(16), lambda batch: torch.ones(batch, 16),
        patch_len=4, stride=4, padding_patch="end", d_model=16, nhead=2, dim_feedforward=16, num_feat_dynamic_real=0, dropout=0.1,
        activation="relu", norm_first=False, num_encoder_layers=1, scaling="mean", **GLUON),
    model_case("series", "chronos.ChronosBolt", chronos_bolt),
    model_case("series", "tsfm_public.TinyTimeMixer", tiny_time_mixer),
    stranger("series", "nbeats_pytorch.model:NBeatsNet", noise(10), nb_blocks_per_stack=1, hidden_layer_units=16),
    stranger("series", "pytorch_tcn:TCN", noise(4, 20), num_inputs=4, num_channels=[8, 8], kernel_size=3),
    stranger("series", "iTransformer:iTransformer", noise(12, 3), num_variates=3, lookback_len=12, depth=1, dim=16, dim_head=8,
        heads=2, pred_length=4, flash_attn=False, num_residual_streams=1),
]  # fmt: skip
