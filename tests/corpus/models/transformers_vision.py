"""Image and video models of transformers, small but complete."""

from __future__ import annotations

import torch

from ..case import Case, Made
from .shared import named, noise, pixels, transformer

VIT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
STAGES = {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]}


def detr() -> Made:
    """A detector with a convolutional backbone and random weights."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(embedding_size=16, out_features=["stage4"], layer_type="basic", **STAGES)
    config = DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=64,
        encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        num_queries=10,
    )  # fmt: skip
    return DetrForObjectDetection(config), pixels(64)


def rt_detr() -> Made:
    """A detector with deformable attention."""
    from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig

    backbone = RTDetrResNetConfig(
        embedding_size=16, out_features=["stage2", "stage3", "stage4"], layer_type="basic", hidden_sizes=[16, 32, 32, 64],
        depths=[1, 1, 1, 1],
    )  # fmt: skip
    config = RTDetrConfig(
        backbone_config=backbone, encoder_hidden_dim=32, encoder_in_channels=[32, 32, 64], encoder_layers=1, encoder_ffn_dim=64,
        encoder_attention_heads=2, d_model=32, num_queries=10, decoder_in_channels=[32, 32, 32], decoder_layers=2,
        decoder_attention_heads=2, decoder_ffn_dim=64, num_denoising=0, eval_size=None, feat_strides=[8, 16, 32],
        use_pretrained_backbone=False, use_timm_backbone=False, backbone=None,
    )  # fmt: skip
    model = RTDetrForObjectDetection(config)
    for module in model.modules():  # otherwise all scores are equal but for rounding, and any ten are the best
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight)
    torch.nn.init.normal_(model.model.enc_score_head.weight, std=1000.0)
    return model, pixels(64)


def upernet() -> Made:
    """Segmentation over a ConvNeXt."""
    from transformers import ConvNextConfig, UperNetConfig, UperNetForSemanticSegmentation

    backbone = ConvNextConfig(out_features=["stage1", "stage2", "stage3", "stage4"], **STAGES)
    config = UperNetConfig(backbone_config=backbone, hidden_size=32, num_labels=5, auxiliary_in_channels=32, auxiliary_channels=16)
    return UperNetForSemanticSegmentation(config), pixels(64)


def depth_anything() -> Made:
    """Depth estimation over a DINOv2."""
    from transformers import DepthAnythingConfig, DepthAnythingForDepthEstimation, Dinov2Config

    backbone = Dinov2Config(
        **{**VIT, "patch_size": 14, "image_size": 28}, out_features=["stage1", "stage2"], reshape_hidden_states=False,
        apply_layernorm=True,
    )  # fmt: skip
    config = DepthAnythingConfig(
        backbone_config=backbone, patch_size=14, reassemble_hidden_size=64, reassemble_factors=[4, 2], neck_hidden_sizes=[16, 16],
        fusion_hidden_size=16, head_hidden_size=16,
    )  # fmt: skip
    return DepthAnythingForDepthEstimation(config), pixels(56)


def vit_published() -> Made:
    """ViT-Base at its published size, with random weights."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig()), pixels(224)


NEEDS = ("transformers",)
CASES = [
    transformer("vision/vit", "ViTForImageClassification", "ViTConfig", pixels(32), **VIT),
    transformer("vision/swin", "SwinModel", "SwinConfig", pixels(64), image_size=64, patch_size=4, embed_dim=32, depths=[2, 2],
        num_heads=[2, 4], window_size=4),
    Case(name="transformers/vision/detr", make=detr, needs=NEEDS),
    transformer("vision/segformer", "SegformerForSemanticSegmentation", "SegformerConfig", pixels(64),
        hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 1, 1], decoder_hidden_size=32, num_labels=5),
    transformer("vision/deit", "DeiTModel", "DeiTConfig", pixels(32), **VIT),
    transformer("vision/beit", "BeitModel", "BeitConfig", pixels(32), use_relative_position_bias=True, **VIT),
    transformer("vision/dinov2", "Dinov2Model", "Dinov2Config", pixels(32), **VIT),
    transformer("vision/dinov3-vit", "DINOv3ViTModel", "DINOv3ViTConfig", pixels(32), num_register_tokens=2, **VIT),
    transformer("vision/swinv2", "Swinv2Model", "Swinv2Config", pixels(64), image_size=64, patch_size=4, embed_dim=32,
        depths=[2, 2], num_heads=[2, 4], window_size=4),
    transformer("vision/convnext", "ConvNextForImageClassification", "ConvNextConfig", pixels(64), **STAGES),
    transformer("vision/convnextv2", "ConvNextV2Model", "ConvNextV2Config", pixels(64), **STAGES),
    transformer("vision/resnet", "ResNetForImageClassification", "ResNetConfig", pixels(64), embedding_size=16, **STAGES),
    transformer("vision/regnet", "RegNetModel", "RegNetConfig", pixels(64), embedding_size=16, groups_width=16, **STAGES),
    transformer("vision/bit", "BitModel", "BitConfig", pixels(64), embedding_size=16, num_groups=4, **STAGES),
    transformer("vision/mobilevit", "MobileViTModel", "MobileViTConfig", pixels(64), image_size=64, hidden_sizes=[32, 48, 64],
        neck_hidden_sizes=[8, 16, 16, 24, 32, 32, 64]),
    transformer("vision/mobilevitv2", "MobileViTV2Model", "MobileViTV2Config", pixels(64), image_size=64, width_multiplier=0.5),
    transformer("vision/mobilenet-v1", "MobileNetV1Model", "MobileNetV1Config", pixels(64), depth_multiplier=0.25),
    transformer("vision/mobilenet-v2", "MobileNetV2Model", "MobileNetV2Config", pixels(64), depth_multiplier=0.25),
    transformer("vision/efficientnet", "EfficientNetModel", "EfficientNetConfig", pixels(64), width_coefficient=0.5,
        depth_coefficient=0.3, hidden_dim=640),
    transformer("vision/poolformer", "PoolFormerModel", "PoolFormerConfig", pixels(64), depths=[1, 1, 1, 1],
        hidden_sizes=[16, 32, 32, 64]),
    transformer("vision/pvt", "PvtModel", "PvtConfig", pixels(64), image_size=64, depths=[1, 1, 1, 1],
        hidden_sizes=[16, 32, 32, 64], num_attention_heads=[1, 2, 2, 4], mlp_ratios=[2, 2, 2, 2]),
    transformer("vision/pvt-v2", "PvtV2Model", "PvtV2Config", pixels(64), image_size=64, depths=[1, 1, 1, 1],
        hidden_sizes=[16, 32, 32, 64], num_attention_heads=[1, 2, 2, 4], mlp_ratios=[2, 2, 2, 2]),
    transformer("vision/levit", "LevitModel", "LevitConfig", pixels(64), image_size=64, hidden_sizes=[32, 48, 64],
        num_attention_heads=[2, 3, 4], depths=[1, 1, 1], key_dim=[8, 8, 8]),
    transformer("vision/focalnet", "FocalNetModel", "FocalNetConfig", pixels(64), image_size=64, embed_dim=16,
        hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 1, 1]),
    transformer("vision/cvt", "CvtModel", "CvtConfig", pixels(64), embed_dim=[16, 32, 48], num_heads=[1, 2, 3], depth=[1, 2, 3]),
    transformer("vision/data2vec", "Data2VecVisionModel", "Data2VecVisionConfig", pixels(32), **VIT),
    transformer("vision/yolos", "YolosForObjectDetection", "YolosConfig", pixels(32), num_detection_tokens=5,
        **{**VIT, "image_size": [32, 32]}),
    transformer("vision/vitdet", "VitDetModel", "VitDetConfig", pixels(64), window_block_indices=[0], window_size=4,
        dropout_prob=0.0, **{**VIT, "image_size": 64}),
    transformer("vision/dpt", "DPTForDepthEstimation", "DPTConfig", pixels(32), backbone_out_indices=[0, 1, 2, 3], is_hybrid=False,
        neck_hidden_sizes=[8, 16, 16, 32], fusion_hidden_size=16, readout_type="project", **{**VIT, "num_hidden_layers": 4}),
    transformer("vision/glpn", "GLPNForDepthEstimation", "GLPNConfig", pixels(64), hidden_sizes=[16, 32, 32, 64],
        depths=[1, 1, 1, 1], decoder_hidden_size=32, num_attention_heads=[1, 2, 2, 4]),
    Case(name="transformers/vision/upernet", make=upernet, needs=NEEDS),
    Case(name="transformers/vision/rt-detr", make=rt_detr, needs=NEEDS),
    Case(name="transformers/vision/depth-anything", make=depth_anything, needs=NEEDS),
    transformer("vision/hiera", "HieraModel", "HieraConfig", pixels(32), embed_dim=16, image_size=[32, 32], patch_kernel=[7, 7],
        patch_stride=[4, 4], patch_padding=[3, 3], mlp_ratio=2.0, depths=[1, 1], num_heads=[1, 2], query_stride=[2, 2],
        masked_unit_size=[4, 4], masked_unit_attention=[True, False], num_query_pool=1),
    transformer("vision/swiftformer", "SwiftFormerModel", "SwiftFormerConfig", pixels(64), embed_dims=[16, 32, 32, 64],
        depths=[1, 1, 1, 1]),
    transformer("vision/swin2sr", "Swin2SRForImageSuperResolution", "Swin2SRConfig", pixels(32), image_size=32, embed_dim=16,
        depths=[2], num_heads=[2], window_size=4, upscale=2),
    transformer("vision/ijepa", "IJepaModel", "IJepaConfig", pixels(32), **VIT),
    transformer("vision/textnet", "TextNetModel", "TextNetConfig", pixels(64)),
    transformer("vision/timesformer", "TimesformerModel", "TimesformerConfig", named(pixel_values=noise(4, 3, 32, 32)),
        num_frames=4, **VIT),
    transformer("vision/videomae", "VideoMAEForVideoClassification", "VideoMAEConfig", named(pixel_values=noise(4, 3, 32, 32)),
        num_frames=4, **VIT),
    transformer("vision/vivit", "VivitModel", "VivitConfig", named(pixel_values=noise(4, 3, 32, 32)), num_frames=4,
        tubelet_size=[2, 8, 8], **{k: v for k, v in VIT.items() if k != "patch_size"}),
    Case(name="transformers/vision/vit-published", make=vit_published, needs=NEEDS),
]  # fmt: skip
