"""Every layer of torch.nn, eight in one build. If a group is not right, its layers are built one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..case import BATCH, Case, Made
from .shared import fractions, ids, noise

Draw = Callable[[int], torch.Tensor]
Layer = tuple[str, Callable[[], nn.Module], tuple[Draw, ...]]


class Group(nn.Module):
    """Runs several layers side by side, each with its own inputs."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: Sequence[Sequence[torch.Tensor]]) -> list[Any]:
        """Returns the output of every layer."""
        return [layer(*tensors) for layer, tensors in zip(self.layers, inputs, strict=True)]


def layer(kind: Callable[..., nn.Module], *options: Any, x: Draw | tuple[Draw, ...], name: str = "", **more: Any) -> Layer:
    """Returns (name, maker, inputs) of a layer. No option may be a module: it would be made before the seed is set."""
    return name or kind.__name__, lambda: kind(*options, **more), x if isinstance(x, tuple) else (x,)


def group(number: int, layers: Sequence[Layer]) -> Case:
    """Returns a case of several layers, whose members are the single layers."""
    return Case(
        name=f"layers/group-{number:02}", make=_maker(layers), sizes=BATCH,
        members=tuple([Case(name=f"layers/{member[0]}", make=_maker([member]), sizes=BATCH) for member in layers]),
    )  # fmt: skip


def _maker(layers: Sequence[Layer]) -> Callable[[], Made]:
    def make() -> Made:
        def inputs(batch: int) -> tuple[list[tuple[torch.Tensor, ...]]]:
            return ([tuple([draw(batch) for draw in draws]) for _, _, draws in layers],)

        return Group([build() for _, build, _ in layers]), inputs

    return make


def signs(*shape: int) -> Draw:
    """Draws -1 and 1."""
    return lambda batch: torch.randint(0, 2, (batch, *shape)).float() * 2 - 1


def classes(count: int, *shape: int) -> Draw:
    """Draws class indices."""
    return lambda batch: torch.randint(0, count, (batch, *shape))


def steps(*shape: int) -> Draw:
    """Draws noise whose first axis is time: [shape[0], batch, ...]."""
    return lambda batch: torch.randn(shape[0], batch, *shape[1:])


def positive(*shape: int) -> Draw:
    """Draws floats from 0.1 to 1.1."""
    return lambda batch: torch.rand(batch, *shape) + 0.1


def fixed(value: int) -> Draw:
    """Returns the same number for every row."""
    return lambda batch: torch.full((batch,), value)


def encoder() -> nn.Module:
    """Returns a transformer encoder with two layers."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


class Pooled(nn.Module):
    """Max pooling with indices, followed by unpooling."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[axes - 1](2, return_indices=True)
        self.unpool = (nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d)[axes - 1](2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns zeros except at the maxima."""
        return self.unpool(*self.pool(x))


class Softened(nn.Module):
    """Returns the class log probabilities of AdaptiveLogSoftmaxWithLoss."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns log probabilities."""
        return self.softmax.log_prob(x)


L, P, V = noise(4, 9), noise(4, 8, 8), noise(4, 6, 6, 6)
"""Inputs with four channels and one, two or three axes."""
X = noise(8)

LAYERS: list[Layer] = [
    layer(nn.Linear, 8, 5, x=X), layer(nn.Bilinear, 8, 6, 3, x=(X, noise(6))), layer(nn.Identity, x=X),
    layer(nn.Conv1d, 4, 6, 3, x=L), layer(nn.Conv2d, 4, 6, 3, padding=1, x=P), layer(nn.Conv3d, 4, 6, 3, x=V),
    layer(nn.ConvTranspose1d, 4, 6, 3, stride=2, x=L), layer(nn.ConvTranspose2d, 4, 6, 3, stride=2, output_padding=1, x=P),
    layer(nn.ConvTranspose3d, 4, 6, 3, stride=2, x=V),
    layer(nn.Conv2d, 4, 4, 3, groups=4, dilation=2, padding="same", padding_mode="reflect", x=P, name="Conv2d-depthwise"),
    layer(nn.Unfold, 3, x=P), layer(nn.Fold, (8, 8), 2, stride=2, x=noise(16, 16)),
    layer(nn.MaxPool1d, 2, x=L), layer(nn.MaxPool2d, 3, stride=2, padding=1, x=P), layer(nn.MaxPool3d, 2, x=V),
    layer(Pooled, 1, x=noise(4, 8), name="MaxUnpool1d"),
    layer(Pooled, 2, x=P, name="MaxUnpool2d"), layer(Pooled, 3, x=V, name="MaxUnpool3d"),
    layer(nn.AvgPool1d, 2, x=L), layer(nn.AvgPool2d, 3, stride=2, ceil_mode=True, x=P), layer(nn.AvgPool3d, 2, x=V),
    layer(nn.LPPool1d, 2, 3, x=L), layer(nn.LPPool2d, 2, 3, x=P), layer(nn.LPPool3d, 2, 3, x=V),
    layer(nn.AdaptiveMaxPool1d, 4, x=L), layer(nn.AdaptiveMaxPool2d, (3, 4), x=P), layer(nn.AdaptiveMaxPool3d, 2, x=V),
    layer(nn.AdaptiveAvgPool1d, 4, x=L), layer(nn.AdaptiveAvgPool2d, (3, 4), x=P), layer(nn.AdaptiveAvgPool3d, 2, x=V),
    layer(nn.ReflectionPad1d, 2, x=L), layer(nn.ReflectionPad2d, 2, x=P),
    layer(nn.ReflectionPad3d, 1, x=V), layer(nn.ReplicationPad1d, 2, x=L), layer(nn.ReplicationPad2d, 2, x=P),
    layer(nn.ReplicationPad3d, 1, x=V), layer(nn.ZeroPad1d, 2, x=L), layer(nn.ZeroPad2d, 2, x=P), layer(nn.ZeroPad3d, 1, x=V),
    layer(nn.ConstantPad1d, 2, 1.5, x=L),
    layer(nn.ConstantPad2d, 2, 1.5, x=P), layer(nn.ConstantPad3d, 1, 1.5, x=V), layer(nn.CircularPad1d, 2, x=L),
    layer(nn.CircularPad2d, 2, x=P), layer(nn.CircularPad3d, 1, x=V), layer(nn.ELU, x=X), layer(nn.Hardshrink, x=X),
    layer(nn.Hardsigmoid, x=X),
    layer(nn.Hardtanh, x=X), layer(nn.Hardswish, x=X), layer(nn.LeakyReLU, x=X), layer(nn.LogSigmoid, x=X), layer(nn.PReLU, x=X),
    layer(nn.ReLU, x=X), layer(nn.ReLU6, x=X), layer(nn.RReLU, x=X),
    layer(nn.SELU, x=X), layer(nn.CELU, x=X), layer(nn.GELU, x=X), layer(nn.Sigmoid, x=X), layer(nn.SiLU, x=X), layer(nn.Mish, x=X),
    layer(nn.Softplus, x=X), layer(nn.Softshrink, x=X),
    layer(nn.Softsign, x=X), layer(nn.Tanh, x=X), layer(nn.Tanhshrink, x=X), layer(nn.Threshold, 0.1, 20.0, x=X),
    layer(nn.GLU, x=X), layer(nn.Softmin, -1, x=X), layer(nn.Softmax, -1, x=X), layer(nn.Softmax2d, x=P),
    layer(nn.LogSoftmax, -1, x=X), layer(Softened, x=X, name="AdaptiveLogSoftmaxWithLoss"), layer(nn.BatchNorm1d, 4, x=L),
    layer(nn.BatchNorm2d, 4, x=P), layer(nn.BatchNorm3d, 4, x=V), layer(nn.GroupNorm, 2, 4, x=P), layer(nn.InstanceNorm1d, 4, x=L),
    layer(nn.InstanceNorm2d, 4, affine=True, x=P),
    layer(nn.InstanceNorm3d, 4, x=V), layer(nn.LayerNorm, 8, x=P), layer(nn.LocalResponseNorm, 2, x=P), layer(nn.RMSNorm, 8, x=P),
    layer(nn.CrossMapLRN2d, 3, x=P), layer(nn.SyncBatchNorm, 4, x=P), layer(nn.Flatten, x=P), layer(nn.Unflatten, 1, (2, 4), x=X),
    layer(nn.Dropout, x=X), layer(nn.Dropout1d, x=L), layer(nn.Dropout2d, x=P), layer(nn.Dropout3d, x=V),
    layer(nn.AlphaDropout, x=X), layer(nn.FeatureAlphaDropout, x=P), layer(nn.ChannelShuffle, 2, x=P),
    layer(nn.PixelShuffle, 2, x=P),
    layer(nn.PixelUnshuffle, 2, x=P), layer(nn.Upsample, scale_factor=2, mode="bilinear", x=P),
    layer(nn.Upsample, scale_factor=2, mode="bicubic", x=P, name="Upsample-bicubic"),
    layer(nn.Upsample, scale_factor=2, mode="trilinear", x=V, name="Upsample-trilinear"),
    layer(nn.UpsamplingNearest2d, scale_factor=2, x=P), layer(nn.UpsamplingBilinear2d, scale_factor=2, x=P),
    layer(nn.CosineSimilarity, x=(X, X)), layer(nn.PairwiseDistance, x=(X, X)),
    layer(nn.Embedding, 30, 8, padding_idx=0, x=ids(6, 30)), layer(nn.EmbeddingBag, 30, 8, mode="mean", x=ids(6, 30)),
    layer(nn.MultiheadAttention, 8, 2, batch_first=True, x=(noise(5, 8), noise(7, 8), noise(7, 8))),
    layer(nn.TransformerEncoderLayer, 8, 2, 16, batch_first=True, x=noise(5, 8)),
    layer(nn.TransformerDecoderLayer, 8, 2, 16, batch_first=True, x=(noise(5, 8), noise(7, 8))),
    layer(nn.Transformer, 8, 2, 1, 1, 16, batch_first=True, x=(noise(5, 8), noise(7, 8))),
    layer(nn.RNNCell, 8, 6, x=X), layer(nn.LSTMCell, 8, 6, x=X),
    layer(nn.GRUCell, 8, 6, x=X), layer(nn.RNN, 8, 6, batch_first=True, x=noise(5, 8)),
    layer(nn.LSTM, 8, 6, num_layers=2, bidirectional=True, x=steps(5, 8)), layer(nn.GRU, 8, 6, batch_first=True, x=noise(5, 8)),
    layer(nn.LSTM, 8, 6, proj_size=3, batch_first=True, x=noise(5, 8), name="LSTM-projection"),
    layer(encoder, x=noise(5, 8), name="TransformerEncoder"),
    layer(nn.L1Loss, x=(X, X)), layer(nn.MSELoss, x=(X, X)),
    layer(nn.CrossEntropyLoss, label_smoothing=0.1, reduction="none", x=(X, classes(8))),
    layer(nn.NLLLoss, reduction="none", x=(X, classes(8))),
    layer(nn.NLLLoss, x=(P, classes(4, 8, 8)), name="NLLLoss-plane"),
    layer(nn.PoissonNLLLoss, x=(X, positive(8))), layer(nn.GaussianNLLLoss, x=(X, X, positive(8))),
    layer(nn.KLDivLoss, reduction="batchmean", x=(X, fractions(8))),
    layer(nn.BCELoss, x=(fractions(8), fractions(8))), layer(nn.BCEWithLogitsLoss, reduction="none", x=(X, fractions(8))),
    layer(nn.HuberLoss, x=(X, X)), layer(nn.SmoothL1Loss, x=(X, X)), layer(nn.SoftMarginLoss, x=(X, signs(8))),
    layer(nn.HingeEmbeddingLoss, x=(X, signs(8))), layer(nn.MultiMarginLoss, x=(X, classes(8))),
    layer(nn.MultiLabelMarginLoss, x=(X, classes(8, 8))),
    layer(nn.MultiLabelSoftMarginLoss, reduction="none", x=(X, fractions(8))),
    layer(nn.MarginRankingLoss, x=(noise(), noise(), signs())),
    layer(nn.CosineEmbeddingLoss, x=(X, X, signs())), layer(nn.TripletMarginLoss, x=(X, X, X)),
    layer(nn.TripletMarginWithDistanceLoss, reduction="none", x=(X, X, X)),
    layer(nn.CTCLoss, reduction="none", x=(lambda batch: torch.randn(12, batch, 8).log_softmax(2), classes(7, 4), fixed(12),
    fixed(4))),
]  # fmt: skip


class Tagger(nn.Module):
    """A tagger with a packed bidirectional LSTM, for sentences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8, padding_idx=0)
        self.lstm, self.tags = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(12, 5)

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.words(words), lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=words.shape[1])
        scores: torch.Tensor = self.tags(states)
        return scores


def sentences(batch: int, words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws words, and the number of words of each sentence."""
    return torch.randint(1, 50, (batch, words)), torch.randint(1, words + 1, (batch,))


TAGGER = Case(name="layers/packed-tagger", make=lambda: (Tagger(), sentences), sizes={"batch": (1, 4), "words": (5, 9)})

CASES = [TAGGER] + [group(1 + begin // 8, LAYERS[begin : begin + 8]) for begin in range(0, len(LAYERS), 8)]
