"""Diffusion models: denoising networks and their autoencoders."""

from __future__ import annotations

import torch

from ..shared import noise
from .stranger import integers, stranger

UNET = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "block_out_channels": (32, 64), "layers_per_block": 1,
    "cross_attention_dim": 32, "attention_head_dim": 8, "norm_num_groups": 8, "in_channels": 4,
}  # fmt: skip
PROMPT = noise(12, 32)
STEP = integers(1000)


def flux(batch: int) -> dict[str, torch.Tensor]:
    """Draws an image of 16 patches and a prompt of 12 tokens, with their positions."""
    return {
        "hidden_states": torch.randn(batch, 16, 4), "encoder_hidden_states": torch.randn(batch, 12, 32),
        "pooled_projections": torch.randn(batch, 32), "timestep": torch.rand(batch),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)), "txt_ids": torch.zeros(12, 3),
    }  # fmt: skip


def pixart(batch: int) -> dict[str, object]:
    """Returns the inputs of PixArt without a resolution embedding."""
    return {
        "hidden_states": torch.randn(batch, 4, 8, 8), "encoder_hidden_states": torch.randn(batch, 12, 32),
        "timestep": torch.randint(0, 1000, (batch,)), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }  # fmt: skip


def video(batch: int) -> dict[str, torch.Tensor]:
    """Draws four frames in latent space, and a prompt."""
    return {
        "hidden_states": torch.randn(batch, 2, 4, 8, 8), "encoder_hidden_states": torch.randn(batch, 12, 32),
        "timestep": torch.randint(0, 1000, (batch,)),
    }  # fmt: skip


def wan(batch: int) -> dict[str, torch.Tensor]:
    """Returns the inputs of `video` with channels first."""
    return {**video(batch), "hidden_states": torch.randn(batch, 4, 2, 8, 8)}


CASES = [
    stranger("diffusion", "diffusers:UNet2DModel", noise(3, 16, 16), STEP, sample_size=16, block_out_channels=(32, 32),
        layers_per_block=1, norm_num_groups=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D")),
    stranger("diffusion", "diffusers:UNet2DConditionModel", noise(4, 16, 16), STEP, PROMPT, sample_size=16,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **UNET),
    stranger("diffusion", "diffusers:ControlNetModel", noise(4, 16, 16), STEP, PROMPT, noise(3, 32, 32),
        conditioning_embedding_out_channels=(16, 32), **UNET),
    stranger("diffusion", "diffusers:UNet1DModel", noise(14, 16), STEP, block_out_channels=(8, 8, 16, 16), in_channels=14,
        out_channels=14, time_embedding_type="positional", use_timestep_embedding=True, act_fn="swish", freq_shift=1.0,
        out_block_type="OutConv1DBlock", flip_sin_to_cos=False, down_block_types=("DownResnetBlock1D",) * 4,
        up_block_types=("UpResnetBlock1D",) * 3, mid_block_type="MidResTemporalBlock1D"),
    stranger("diffusion", "diffusers:DiTTransformer2DModel", noise(4, 8, 8), STEP, integers(10), num_attention_heads=2,
        attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, sample_size=8, num_embeds_ada_norm=10),
    stranger("diffusion", "diffusers:PixArtTransformer2DModel", inputs=pixart, num_attention_heads=2, attention_head_dim=16,
        in_channels=4, out_channels=8, num_layers=2, sample_size=8, caption_channels=32, cross_attention_dim=32,
        use_additional_conditions=False),
    stranger("diffusion", "diffusers:FluxTransformer2DModel", inputs=flux, patch_size=1, in_channels=4, num_layers=1,
        num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8)),
    stranger("diffusion", "diffusers:SD3Transformer2DModel", noise(4, 8, 8), PROMPT, noise(64), STEP, sample_size=8,
        patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4, caption_projection_dim=32,
        joint_attention_dim=32, pooled_projection_dim=64, out_channels=4),
    stranger("diffusion", "diffusers:CogVideoXTransformer3DModel", inputs=video, num_attention_heads=2, attention_head_dim=16,
        in_channels=4, out_channels=4, time_embed_dim=16, text_embed_dim=32, num_layers=2, sample_width=8, sample_height=8,
        sample_frames=5, max_text_seq_length=12),
    stranger("diffusion", "diffusers:WanTransformer3DModel", inputs=wan, patch_size=(1, 2, 2), num_attention_heads=2,
        attention_head_dim=12, in_channels=4, out_channels=4, text_dim=32, freq_dim=16, ffn_dim=32, num_layers=2),
    stranger("diffusion", "diffusers:AutoencoderKL", noise(3, 32, 32), block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"), latent_channels=4,
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D")),
    stranger("diffusion", "diffusers:VQModel", noise(3, 32, 32), block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"), num_vq_embeddings=16,
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D")),
    stranger("diffusion", "diffusers:AutoencoderTiny", noise(3, 32, 32), encoder_block_out_channels=(16, 16),
        decoder_block_out_channels=(16, 16), num_encoder_blocks=(1, 2), num_decoder_blocks=(2, 1)),
]  # fmt: skip
