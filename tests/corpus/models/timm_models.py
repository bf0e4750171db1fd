"""Models of many families of timm, the smallest of each."""

from __future__ import annotations

from typing import Any

from ..case import Case, Made
from .shared import noise


def picture(name: str, side: int = 64, **options: Any) -> Case:
    """A model by its name in timm."""

    def make() -> Made:
        import timm

        draw = noise(3, side, side)
        return timm.create_model(name, pretrained=False, num_classes=10, **options), lambda batch: (draw(batch),)

    return Case(name=f"timm/{name}", make=make, needs=("timm",))


CASES = [
    picture("resnet10t"),
    picture("vit_tiny_patch16_224", img_size=64),
    picture("efficientvit_b0"),
    picture("mixer_s32_224", 64, img_size=64),
    picture("convnext_atto"),
    picture("tf_efficientnet_lite0"),
    picture("mobilenetv4_conv_small"),
    picture("ghostnet_050"),
    picture("hardcorenas_a"),
    picture("fastvit_t8"),
    picture("edgenext_xx_small"),
    picture("coat_tiny", img_size=64),
    picture("deit_tiny_patch16_224", img_size=64),
    picture("eva02_tiny_patch14_224", 56, img_size=56),
    picture("gmlp_s16_224", img_size=64),
    picture("res2net50_14w_8s"),
    picture("dla34"),
    picture("hrnet_w18_small"),
    picture("nfnet_l0"),
    picture("repvgg_a0"),
    picture("xcit_nano_12_p16_224", img_size=64),
]
