"""Scores of triples, sequences, trees and items, and further models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...case import Case, Made
from ..shared import noise
from .stranger import integers, model_case, stranger

ENTITIES, RELATIONS = 20, 5
FIELDS = [5, 6, 7]


class Called(nn.Module):
    """A module whose forward() calls a function; the modules that it uses are attributes."""

    def __init__(self, function: Callable[..., Any], *held: nn.Module) -> None:
        super().__init__()
        self.held = nn.ModuleList(held)
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def triples(name: str, *sizes: int) -> Case:
    """A model of TorchKGE, which scores triples."""

    def make() -> Made:
        import torchkge.models

        model = getattr(torchkge.models, name)(*sizes, ENTITIES, RELATIONS)
        return Called(model.scoring_function, model), lambda batch: (
            torch.randint(0, ENTITIES, (batch,)), torch.randint(0, ENTITIES, (batch,)), torch.randint(0, RELATIONS, (batch,)),
        )  # fmt: skip

    return model_case("triples", f"torchkge.{name}", make)


def chain() -> Made:
    """A linear-chain CRF: its partition function, and the best tags."""
    from supar.structs import LinearChainCRF

    transitions = torch.randn(6, 6)

    def best(scores: torch.Tensor, lengths: torch.Tensor) -> Any:
        distribution = LinearChainCRF(scores, transitions, lengths)
        return distribution.log_partition, distribution.argmax

    return Called(best), lambda batch: (torch.randn(batch, 6, 5), torch.full((batch,), 6))


def trees() -> Made:
    """Dependency trees: their partition function, and the marginals by a derivative."""
    from supar.structs import MatrixTree

    def marginals(scores: torch.Tensor, lengths: torch.Tensor) -> Any:
        distribution = MatrixTree(scores, lengths)
        return distribution.log_partition, distribution.marginals

    return Called(marginals), lambda batch: (torch.randn(batch, 6, 6), torch.full((batch,), 5))


def biaffine() -> Made:
    """A biaffine layer, which scores arcs."""
    from supar.modules import MLP, Biaffine

    dependent, head, arcs = MLP(8, 6), MLP(8, 6), Biaffine(6, 1, bias_x=True)
    nn.init.normal_(arcs.weight)
    return Called(lambda x: arcs(dependent(x), head(x)), dependent, head, arcs), lambda batch: (torch.randn(batch, 7, 8),)


def crystal() -> Made:
    """CGCNN of one crystal with a variable number of atoms."""
    from cgcnn2.model import CrystalGraphConvNet

    model = CrystalGraphConvNet(10, 4, atom_fea_len=8, n_conv=2, h_fea_len=8)
    return model, lambda atoms: (
        torch.randn(atoms, 10), torch.randn(atoms, 5, 4), torch.randint(0, atoms, (atoms, 5)), [torch.arange(atoms)],
    )  # fmt: skip


def matrix_product() -> Made:
    """A matrix product state, which must be traced before a call with another batch."""
    from tensorkrowch.models import MPSLayer

    model = MPSLayer(n_features=5, in_dim=2, out_dim=3, bond_dim=4)
    model.trace(torch.zeros(1, 4, 2))
    return model, lambda batch: (torch.rand(batch, 4, 2),)


def protein() -> Made:
    """ProteinBERT."""
    from protein_bert_pytorch import ProteinBERT

    model = ProteinBERT(
        num_tokens=21, num_annotation=20, dim=16, dim_global=16, depth=1, attn_heads=2, attn_dim_head=8, num_global_tokens=2
    )
    return model, lambda batch: (
        torch.randint(0, 21, (batch, 24)), torch.randint(0, 2, (batch, 20)).float(), torch.ones(batch, 24, dtype=torch.bool),
    )  # fmt: skip


CASES = [
    triples("TransHModel", 8),
    triples("HolEModel", 8),
    triples("ConvKBModel", 8, 3),
    model_case("taggers", "supar.LinearChainCRF", chain),
    model_case("taggers", "supar.MatrixTree", trees),
    model_case("taggers", "supar.Biaffine", biaffine),
    stranger("recommenders", "torch_recommenders.models.xDeepFM:ExtremeDeepFactorizationMachineModel", integers(5, 3),
        field_dims=FIELDS, embed_dim=4, mlp_dims=(8,), dropout=0.1, cross_layer_sizes=(6, 6)),
    stranger("tabular", "lassonet.model:LassoNet", noise(6), arguments=(6, 8, 3)),
    stranger("tabular", "torch_wavelet_kan:WaveletKANLayer", noise(4), arguments=(4, 8)),
    stranger("series", "liquidnn:LiquidLSTM", noise(6, 4), arguments=(4, 8)),
    stranger("diffusion", "azula.nn.unet:UNet", noise(3, 8, 8), noise(8), arguments=(3, 3), hid_channels=(8, 16),
        hid_blocks=(1, 1), mod_features=8, groups=4),
    stranger("diffusion", "azula.nn.vit:ViT", noise(3, 8, 8), noise(8), arguments=(3, 3), hid_channels=16, hid_blocks=1,
        mod_features=8, patch_size=2, attention_heads=2),
    model_case("molecules", "cgcnn2.CrystalGraphConvNet", crystal, sizes={"atoms": (6, 12)}),
    model_case("quantum", "tensorkrowch.MPSLayer", matrix_product),
    model_case("proteins", "protein_bert_pytorch.ProteinBERT", protein),
]  # fmt: skip
"""The cases of this module."""
