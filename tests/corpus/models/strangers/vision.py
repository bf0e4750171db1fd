"""Images and volumes: super-resolution, segmentation, registration, feature matching, text in images, faces."""

from __future__ import annotations

import torch
from torch import nn

from ...case import Case, Made
from ..shared import fractions, noise
from .stranger import model_case, stranger

SMALL = fractions(3, 16, 16)
VOLUME = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}


def patches(model: str, **options: object) -> Case:
    """A descriptor of kornia over patches of 32 x 32."""
    return stranger("features", f"kornia.feature:{model}", fractions(1, 32, 32), **options)


class Matches(nn.Module):
    """LoFTR before it selects matches: the probability that a place in one image matches a place in the other."""

    def __init__(self, matcher: nn.Module) -> None:
        super().__init__()
        self.matcher = matcher

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> dict[str, torch.Tensor]:
        """Matches two images with one channel."""
        return self.matcher({"image0": first, "image1": second})


def loftr() -> Made:
    """LoFTR with random weights."""
    import copy

    from kornia.feature import LoFTR
    from kornia.feature.loftr.loftr import default_cfg

    config = copy.deepcopy(default_cfg)
    config["resnetfpn"] = {"initial_dim": 16, "block_dims": [16, 24, 32]}
    config["coarse"] = {**config["coarse"], "d_model": 32, "d_ffn": 32, "nhead": 2, "layer_names": ["self", "cross"]}
    config["fine"] = {**config["fine"], "d_model": 16, "d_ffn": 16, "nhead": 2}
    return Matches(LoFTR(pretrained=None, config=config)), lambda batch: (
        torch.rand(batch, 1, 32, 32), torch.rand(batch, 1, 32, 32),
    )  # fmt: skip


def heat_map() -> Made:
    """DISK's network, before points are selected."""
    from kornia.feature import DISK

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.disk = DISK()

        def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.disk.heatmap_and_dense_descriptors(images)

    return Dense(), lambda batch: (torch.rand(batch, 3, 32, 32),)


def detected() -> Made:
    """The points, scores and descriptors that DISK selects."""
    from kornia.feature import DISK

    class Points(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.disk = DISK()

        def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
            return [features.keypoints for features in self.disk(images, n=8)]

    return Points(), lambda side: (torch.rand(1, 3, side, side),)  # the output list has as many items as there are images


def faces() -> Made:
    """Face detection with non-maximum suppression. The weights are random, because the package would download them."""
    from unittest.mock import patch

    from kornia.contrib import face_detection

    kind = face_detection.YuNet
    with patch.object(face_detection, "YuNet", lambda phase, pretrained: kind(phase, pretrained=False)):
        detector = face_detection.FaceDetector(top_k=20, confidence_threshold=0.0, keep_top_k=5)
    return detector, lambda side: (255 * torch.rand(1, 3, side, side),)


def crnn() -> Made:
    """Legere's recognizer of a line of text."""
    from legere.model import CompactCRNN, ModelConfig

    config = ModelConfig(
        stem_channels=8, blocks=((8, 16, (2, 2)), (16, 16, (2, 1)), (16, 16, (2, 1)), (16, 16, (2, 1))), gru_hidden=16
    )
    return CompactCRNN(config), lambda batch: (torch.rand(batch, 1, 32, 64),)


def efficient_net() -> Made:
    """EfficientNet with two kinds of blocks."""
    from efficientnet_pytorch import EfficientNet
    from efficientnet_pytorch.utils import efficientnet

    blocks, options = efficientnet(image_size=32, num_classes=5)
    blocks = [block._replace(num_repeat=1) for block in blocks[:2]]
    return EfficientNet(blocks, options), lambda batch: (torch.rand(batch, 3, 32, 32),)


def registration() -> Made:
    """VoxelMorph in two dimensions: the field that moves one image onto another."""
    from voxelmorph.nn.models import VxmPairwise

    model = VxmPairwise(ndim=2, source_channels=1, target_channels=1, nb_features=(8, 8, 8), integration_steps=3)
    return model, lambda batch: (torch.rand(batch, 1, 16, 16), torch.rand(batch, 1, 16, 16))


CASES = [
    stranger("volumes", "monai.networks.nets:UNet", noise(1, 16, 16, 16), channels=(4, 8, 16), strides=(2, 2), **VOLUME),
    stranger("volumes", "monai.networks.nets:SegResNet", noise(1, 16, 16, 16), init_filters=4, blocks_down=(1, 1),
        blocks_up=(1,), norm=("GROUP", {"num_groups": 2}), **VOLUME),
    stranger("volumes", "monai.networks.nets:UNETR", noise(1, 32, 32, 32), img_size=(32, 32, 32), feature_size=4, hidden_size=16,
        mlp_dim=16, num_heads=2, **VOLUME),
    stranger("volumes", "monai.networks.nets:DynUNet", noise(1, 16, 16, 16), kernel_size=[3, 3, 3], strides=[1, 2, 2],
        upsample_kernel_size=[2, 2], filters=[4, 8, 8], **VOLUME),
    stranger("volumes", "monai.networks.nets:AttentionUnet", noise(1, 16, 16, 16), channels=(4, 8), strides=(2,), **VOLUME),
    stranger("volumes", "unet:UNet", noise(1, 16, 16, 16), dimensions=3, num_encoding_blocks=2, out_channels_first_layer=4,
        padding=1),
    stranger("volumes", "dynamic_network_architectures.architectures.unet:PlainConvUNet", noise(1, 16, 16, 16), input_channels=1,
        n_stages=2, features_per_stage=(4, 8), conv_op=nn.Conv3d, kernel_sizes=3, strides=(1, 2), n_conv_per_stage=1,
        num_classes=2, n_conv_per_stage_decoder=1, norm_op=nn.InstanceNorm3d, nonlin=nn.LeakyReLU),
    model_case("volumes", "voxelmorph.VxmPairwise", registration),
    patches("HardNet", pretrained=False),
    patches("TFeat", pretrained=False),
    patches("SIFTDescriptor", patch_size=32, rootsift=True),
    patches("MKDDescriptor", patch_size=32, whitening=None, output_dims=32),
    model_case("features", "kornia.LoFTR", loftr),
    model_case("features", "kornia.DISK_dense", heat_map),
    model_case("features", "kornia.DISK", detected, sizes={"side": (32, 48)}),
    stranger("features", "kornia.filters:Canny", SMALL, hysteresis=False),
    stranger("features", "kornia.filters:Canny", SMALL, variant="Canny_hysteresis"),
    stranger("features", "kornia.contrib:DistanceTransform", lambda batch: (torch.rand(batch, 1, 12, 12) > 0.8).float(),
        kernel_size=3),
    model_case("detectors", "kornia.FaceDetector", faces, sizes={"side": (64, 96)}),
    model_case("letters", "legere.CompactCRNN", crnn),
    model_case("pictures", "efficientnet_pytorch.EfficientNet", efficient_net),
    stranger("pictures", "mlp_mixer_pytorch:MLPMixer", SMALL, image_size=16, channels=3, patch_size=8, dim=16, depth=1,
        num_classes=5),
    stranger("pictures", "perceiver_pytorch:Perceiver", fractions(8, 8, 3), input_channels=3, input_axis=2, num_freq_bands=2,
        max_freq=4.0, depth=1, num_latents=4, latent_dim=16, latent_heads=2, latent_dim_head=8, cross_dim_head=8, num_classes=5),
    stranger("pictures", "axial_attention:AxialAttention", noise(16, 8, 8), dim=16, dim_index=1, heads=2),
    stranger("pictures", "siren_pytorch:SirenNet", noise(2), dim_in=2, dim_hidden=16, dim_out=3, num_layers=2),
]  # fmt: skip
