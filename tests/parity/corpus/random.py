"""Random numbers and the generator's state, dropout in training and eval mode, recomputation."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..case import case, rows, sequences, two

_case = partial(case, kind="random numbers")


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x).relu()


class DropoutInTraining(Dropout):
    """The same model without model.eval()."""


class DropoutOfZero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.0, training=True)


class AttentionWithoutDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.0, is_causal=True)


class AttentionWithDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1, is_causal=True)


class NoiseOfItsOwn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class NoiseAsInput(nn.Module):
    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        return x + 0.1 * noise


class Multinomial(nn.Module):
    """Samples a token."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.multinomial(x.softmax(-1), 1)


class ExponentialRace(nn.Module):
    """Samples a token without synchronization: the minimum of exponential waiting times."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.softmax(-1) / torch.empty_like(x).exponential_(1)).argmax(-1)


class GumbelOfInput(nn.Module):
    """Samples a token, with the random numbers as an input."""

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        return (x - noise.sigmoid().log().neg().log()).argmax(-1)


class Bernoulli(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bernoulli(x.sigmoid())


class LeakyInTraining(nn.Module):
    """A random slope; in eval mode, its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.leaky = nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.leaky(x)


class LeakyAtRandom(LeakyInTraining):
    """The same model without model.eval()."""


class RestoreGeneratorState(nn.Module):
    """An operation that runs with a saved generator state, as activation checkpointing leaves it in a graph.

    torch.export cannot export the operation that saves the state, run_and_save_rng_state.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.get_rng_state()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.higher_order.run_with_rng_state(self.state, torch.ops.aten.relu.default, x)


class CheckpointedLayer(nn.Module):
    """Activation checkpointing recomputes nothing in inference."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


CASES = (
    _case(Dropout, rows, near=("training-mode",)),
    _case(DropoutInTraining, rows, "random-operation", "training-mode", training=True),
    _case(DropoutOfZero, rows, near=("random-operation",)),
    _case(AttentionWithoutDropout, sequences, near=("random-operation",)),
    _case(AttentionWithDropout, sequences, "random-operation"),
    _case(NoiseOfItsOwn, rows, "random-operation"),
    _case(NoiseAsInput, two, near=("random-operation",)),
    _case(Multinomial, rows, "random-operation"),
    _case(ExponentialRace, rows, "random-operation"),
    _case(GumbelOfInput, two, near=("random-operation",)),
    _case(Bernoulli, rows, "random-operation"),
    _case(LeakyInTraining, rows, near=("random-operation",)),
    _case(LeakyAtRandom, rows, "random-operation", training=True),
    _case(RestoreGeneratorState, rows, "rng-state-operation"),
    _case(CheckpointedLayer, rows, near=("rng-state-operation",)),
)
