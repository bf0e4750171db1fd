"""ResNet-50 v1.5 (strides are in the 3x3 convolutions) in plain torch.  It classifies 224 x 224 pictures; its weights are random
with a fixed seed.

    cgcompile build examples/resnet.py --sizes 1,8 -o resnet.cgb
    RESNET_DTYPE=float16 RESNET_LAYOUT=channels_last cgcompile build examples/resnet.py --sizes 1,8,32 --target cuda

RESNET_DTYPE is float32 (default), float16 or bfloat16; RESNET_LAYOUT, the memory format of weights and pictures, is contiguous
(default) or channels_last.
"""

import os

import torch
from torch import nn

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""(channels of the 3x3 convolutions, number of blocks) of each stage.  A block has `EXPANSION` times as many output channels."""
EXPANSION = 4
CLASSES = 1000
SIDE = 224
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def convolution(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Returns a convolution and its normalization.  They divide height and width by `stride`."""
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels))


class Bottleneck(nn.Module):
    """Residual block of a 1x1, a 3x3 and a 1x1 convolution.  If the shape changes, a 1x1 convolution projects the input."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * EXPANSION
        self.reduce = convolution(in_channels, width, 1)
        self.conv = convolution(width, width, 3, stride)
        self.expand = convolution(width, out_channels, 1)
        changes_shape = stride > 1 or in_channels != out_channels
        self.project = convolution(in_channels, out_channels, 1, stride) if changes_shape else nn.Identity()
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, in_channels, h, w) -> (batch, 4 * width, h / stride, w / stride)."""
        y = self.relu(self.conv(self.relu(self.reduce(x))))
        return self.relu(self.expand(y) + self.project(x))


class ResNet(nn.Module):
    """Pictures (batch, 3, 224, 224) -> logits (batch, 1000)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
        blocks: list[nn.Module] = []
        channels = 64
        for stage, (width, count) in enumerate(STAGES):
            for block in range(count):
                blocks.append(Bottleneck(channels, width, stride=2 if stage > 0 and block == 0 else 1))
                channels = width * EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Returns the logits, not their softmax."""
        return self.head(self.pool(self.blocks(self.stem(pictures))).flatten(1))


def initialize(module: ResNet) -> None:
    """Sets random weights and statistics like those of a trained network.  Normalizations change their inputs.  Residual branches
    have small weights, so that activations keep their magnitude through 50 layers and fit float16."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(part, nn.BatchNorm2d):
            scale = 0.3 if ".expand." in name else 1.0
            nn.init.uniform_(part.weight, 0.8 * scale, 1.2 * scale)
            nn.init.normal_(part.bias, std=0.1)
            nn.init.normal_(part.running_mean, std=0.1)
            nn.init.uniform_(part.running_var, 0.5, 1.5)


def from_environment(variable: str, values: dict) -> object:
    """Returns the value that an environment variable names, or the first value if the variable is not set."""
    name = os.environ.get(variable, next(iter(values)))
    if name not in values:
        raise ValueError(f"{variable}: expected one of {', '.join(values)}, got {name!r}")
    return values[name]


def model() -> nn.Module:
    """Returns the network in eval mode, with the same random weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = ResNet()
        initialize(module)
    dtype, layout = from_environment("RESNET_DTYPE", DTYPES), from_environment("RESNET_LAYOUT", LAYOUTS)
    return module.eval().to(dtype=dtype, memory_format=layout)


def inputs(batch: int) -> tuple[torch.Tensor]:
    """Returns `batch` random pictures."""
    pictures = torch.randn(batch, 3, SIDE, SIDE, dtype=from_environment("RESNET_DTYPE", DTYPES))
    return (pictures.contiguous(memory_format=from_environment("RESNET_LAYOUT", LAYOUTS)),)
