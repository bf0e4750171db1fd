"""ResNet-50 v1.5 (the stride in the 3x3 convolution) in plain torch, with seeded weights: 224 x 224 pictures to 1000 classes.

    cgcompile build examples/resnet.py --sizes 1,8 -o resnet.cgb
    RESNET_DTYPE=float16 RESNET_LAYOUT=channels_last cgcompile build examples/resnet.py --sizes 1,8,32 --target cuda

RESNET_DTYPE is float32 (default), float16 or bfloat16; RESNET_LAYOUT, the memory format of weights and pictures, is contiguous
(default) or channels_last.
"""

import os

import torch
from torch import nn

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Inner width and number of blocks of each stage; a block's output is `EXPANSION` times as wide."""
EXPANSION = 4
CLASSES = 1000
SIDE = 224
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def convolution(inner: int, outer: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Returns a convolution and its normalization.  It keeps the picture's size, except for the stride."""
    conv = nn.Conv2d(inner, outer, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outer))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, added to its input; a 1x1 projection where the shape changes."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = width * EXPANSION
        self.reduce = convolution(inner, width, 1)
        self.conv = convolution(width, width, 3, stride)
        self.expand = convolution(width, outer, 1)
        self.project = convolution(inner, outer, 1, stride) if stride > 1 or inner != outer else nn.Identity()
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, inner, h, w) -> (batch, 4 * width, h / stride, w / stride)."""
        y = self.relu(self.conv(self.relu(self.reduce(x))))
        return self.relu(self.expand(y) + self.project(x))


class ResNet(nn.Module):
    """Pictures (batch, 3, 224, 224) -> logits (batch, 1000)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
        blocks: list[nn.Module] = []
        inner = 64
        for stage, (width, count) in enumerate(STAGES):
            for block in range(count):
                blocks.append(Bottleneck(inner, width, stride=2 if stage > 0 and block == 0 else 1))
                inner = width * EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(inner, CLASSES)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Returns the logits, not their softmax."""
        return self.head(self.pool(self.blocks(self.stem(pictures))).flatten(1))


def fill(module: ResNet) -> None:
    """Sets weights and statistics like those of a trained network.  Normalizations have an effect, and residual branches are so
    small that activations keep their magnitude through 50 layers (they fit float16)."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(part, nn.BatchNorm2d):
            scale = 0.3 if ".expand." in name else 1.0
            nn.init.uniform_(part.weight, 0.8 * scale, 1.2 * scale)
            nn.init.normal_(part.bias, std=0.1)
            nn.init.normal_(part.running_mean, std=0.1)
            nn.init.uniform_(part.running_var, 0.5, 1.5)


def choice(variable: str, among: dict) -> object:
    """Returns the value that an environment variable selects; the first one if it is not set."""
    name = os.environ.get(variable, next(iter(among)))
    if name not in among:
        raise ValueError(f"{variable}: expected one of {', '.join(among)}, got {name!r}")
    return among[name]


def model() -> nn.Module:
    """Returns the network in eval mode, with the same random weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = ResNet()
        fill(module)
    return module.eval().to(dtype=choice("RESNET_DTYPE", DTYPES), memory_format=choice("RESNET_LAYOUT", LAYOUTS))


def inputs(batch: int) -> tuple[torch.Tensor]:
    """Returns `batch` pictures of noise."""
    pictures = torch.randn(batch, 3, SIDE, SIDE, dtype=choice("RESNET_DTYPE", DTYPES))
    return (pictures.contiguous(memory_format=choice("RESNET_LAYOUT", LAYOUTS)),)
