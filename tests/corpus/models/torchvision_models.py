"""One of the smaller models of every family of torchvision; a few at their published image size."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..case import BATCH, Case, Made
from .shared import fractions

NEEDS = ("torchvision",)


def picture(
    name: str, side: int, part: str = "", sizes: Mapping[str, tuple[int, ...]] = BATCH, shape: tuple[int, ...] = (), **options: Any
) -> Case:
    """A model by its name in torchvision.models or its submodule `part`. Inputs are images of `side`, or have `shape`."""

    def make() -> Made:
        module = importlib.import_module(f"torchvision.models{part and f'.{part}'}")
        draw = fractions(*(shape or (3, side, side)))
        return getattr(module, name)(weights=None, **options), lambda batch: (draw(batch),)

    return Case(name=f"torchvision/{part or 'classification'}/{name}", make=make, sizes=sizes, needs=NEEDS)


def resnet_fpn() -> Made:
    """The backbone of torchvision's detectors: a feature pyramid."""
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    return resnet_fpn_backbone(backbone_name="resnet18", weights=None), lambda batch: (torch.rand(batch, 3, 64, 64),)


def retinanet_head() -> Made:
    """A detector without the selection of boxes, which depends on data."""
    from torchvision.models.detection import retinanet_resnet50_fpn

    class Raw(torch.nn.Module):
        """Returns scores and boxes of every anchor."""

        def __init__(self) -> None:
            super().__init__()
            whole = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=5)
            self.backbone, self.head = whole.backbone, whole.head

        def forward(self, x: torch.Tensor) -> Any:
            """[batch, 3, side, side] -> {"cls_logits": [batch, anchors, classes], "bbox_regression": [batch, anchors, 4]}."""
            return self.head(list(self.backbone(x).values()))

    return Raw(), lambda batch: (torch.rand(batch, 3, 64, 64),)


def raft() -> Made:
    """Optical flow between two images, with four refinement rounds."""
    from torchvision.models.optical_flow import raft_small

    class Rounds(torch.nn.Module):
        """Returns the last estimate."""

        def __init__(self) -> None:
            super().__init__()
            self.network = raft_small(weights=None)

        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            """Two images [batch, 3, side, side] -> flow [batch, 2, side, side]."""
            return self.network(first, second, num_flow_updates=4)[-1]

    return Rounds(), lambda batch: (torch.rand(batch, 3, 128, 128), torch.rand(batch, 3, 128, 128))


def fasterrcnn() -> Made:
    """A complete detector. Its number of boxes depends on the image, so a build must refuse it."""
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    network = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=5)
    return network, lambda: ([torch.rand(3, 64, 64)],)


CLIP = {"shape": (3, 8, 32, 32)}


class Detector(nn.Module):
    """Selects the boxes of one image as torchvision's detectors do: the best scores, then class-wise non-maximum suppression."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.shifts = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        from torchvision.ops import batched_nms

        scores, labels = self.scores(image).sigmoid().flatten(2)[0].max(0)
        rows, columns = torch.meshgrid(*[torch.arange(float(size), device=image.device) for size in image.shape[2:]], indexing="ij")
        corner = torch.stack([columns, rows], -1).reshape(-1, 2) + self.shifts(image)[0, :2].flatten(1).T
        boxes = torch.cat([corner, corner + 4 + self.shifts(image)[0, 2:].flatten(1).T.abs()], 1)
        best = scores.topk(100).indices
        boxes, scores, labels = boxes[best], scores[best], labels[best]
        kept = batched_nms(boxes, scores, labels, 0.5)[:30]
        return {"boxes": boxes[kept], "scores": scores[kept], "labels": labels[kept]}


CASES = [
    Case(
        name="torchvision/detection/batched_nms",
        make=lambda: (Detector(), lambda side: (torch.rand(1, 3, side, side),)),
        sizes={"side": (16, 32)},
        needs=NEEDS,
    ),
    picture("resnet18", 64),
    picture("vit_b_16", 64, image_size=64),
    picture("swin_t", 64),
    picture("efficientnet_b0", 64),
    picture("deeplabv3_mobilenet_v3_large", 64, "segmentation", weights_backbone=None),
    picture("r3d_18", 0, "video", **CLIP),
    picture("alexnet", 64),
    picture("convnext_tiny", 64),
    picture("densenet121", 64),
    picture("efficientnet_v2_s", 64),
    picture("googlenet", 64, init_weights=False, aux_logits=False),
    picture("inception_v3", 96, init_weights=False, aux_logits=False),
    picture("maxvit_t", 224, sizes={"batch": (1, 3)}),
    picture("mnasnet0_5", 64),
    picture("mobilenet_v2", 64),
    picture("mobilenet_v3_small", 64),
    picture("regnet_y_400mf", 64),
    picture("regnet_x_400mf", 64),
    picture("resnext50_32x4d", 64),
    picture("shufflenet_v2_x0_5", 64),
    picture("squeezenet1_1", 64),
    picture("swin_v2_t", 64),
    picture("vgg11_bn", 64),
    picture("wide_resnet50_2", 64),
    picture("fcn_resnet50", 64, "segmentation", weights_backbone=None),
    picture("lraspp_mobilenet_v3_large", 64, "segmentation", weights_backbone=None),
    picture("mc3_18", 0, "video", **CLIP),
    picture("r2plus1d_18", 0, "video", **CLIP),
    picture("s3d", 0, "video", {"batch": (1, 3)}, shape=(3, 14, 224, 224)),
    picture("swin3d_t", 0, "video", **CLIP),
    picture("mvit_v1_b", 0, "video", {"batch": (1, 2)}, shape=(3, 16, 224, 224)),
    Case(name="torchvision/detection/resnet18_fpn", make=resnet_fpn, needs=NEEDS),
    Case(name="torchvision/detection/retinanet_head", make=retinanet_head, needs=NEEDS),
    Case(name="torchvision/detection/fasterrcnn", make=fasterrcnn, sizes={}, needs=NEEDS),
    Case(name="torchvision/optical_flow/raft_small", make=raft, needs=NEEDS),
    picture("resnet50", 224),
]
