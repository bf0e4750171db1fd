"""Speech recognition and synthesis, codecs, source separation, spectrograms."""

from __future__ import annotations

import torch
from torch import nn

from ...case import Made
from ..shared import noise
from .stranger import model_case, stranger

ASTEROID = {"kernel_size": 8, "n_filters": 16, "stride": 4, "bn_chan": 8}


def whisper() -> nn.Module:
    """Returns Whisper with one layer. Whisper leaves the decoder's positions uninitialized; a checkpoint would fill them."""
    from whisper.model import ModelDimensions, Whisper

    model = Whisper(ModelDimensions(
        n_mels=16, n_audio_ctx=12, n_audio_state=32, n_audio_head=2, n_audio_layer=1, n_vocab=50, n_text_ctx=16,
        n_text_state=32, n_text_head=2, n_text_layer=1,
    ))  # fmt: skip
    torch.nn.init.normal_(model.decoder.positional_embedding)
    return model


def both(batch: int) -> tuple[torch.Tensor, ...]:
    """Draws a spectrogram and the tokens so far."""
    return torch.randn(batch, 16, 24), torch.randint(0, 50, (batch, 6))


class Waveform(nn.Module):
    """Returns only the waveform of a codec."""

    def __init__(self, codec: nn.Module) -> None:
        super().__init__()
        self.codec = codec

    def forward(self, waveform: torch.Tensor) -> torch.Tensor:
        """Encodes and decodes the waveform."""
        codes = self.codec.encode(waveform)  # type: ignore[operator]
        return self.codec.decode(codes)  # type: ignore[operator]


def hifi_gan() -> Made:
    """The generator with two resolutions."""
    from hifi_gan.env import AttrDict
    from hifi_gan.models import Generator

    model = Generator(AttrDict(
        resblock="1", upsample_rates=[4, 2], upsample_kernel_sizes=[8, 4], upsample_initial_channel=32,
        resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3, 5]],
    ))  # fmt: skip
    return model, lambda batch: (torch.randn(batch, 80, 12),)


def big_vgan() -> Made:
    """A network like HiFi-GAN, with anti-aliased activations."""
    from bigvgan import BigVGAN
    from bigvgan.env import AttrDict

    model = BigVGAN(AttrDict(
        resblock="2", upsample_rates=[4], upsample_kernel_sizes=[8], upsample_initial_channel=16, num_mels=16,
        resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]], activation="snakebeta", snake_logscale=True,
    ))  # fmt: skip
    return model, lambda batch: (torch.randn(batch, 16, 12),)


def filterbank() -> Made:
    """A transform and its inverse, by learned filters."""
    from asteroid_filterbanks import Decoder, Encoder, FreeFB

    return nn.Sequential(Encoder(FreeFB(16, 8, stride=4)), Decoder(FreeFB(16, 8, stride=4))), lambda batch: (
        torch.randn(batch, 1, 64),
    )


CASES = [
    model_case("speech", "whisper.Whisper", lambda: (whisper(), both)),
    model_case("speech", "whisper.AudioEncoder", lambda: (whisper().encoder, lambda batch: (torch.randn(batch, 16, 24),))),
    model_case("speech", "whisper.TextDecoder", lambda: (whisper().decoder, lambda batch: (
        torch.randint(0, 50, (batch, 6)), torch.randn(batch, 12, 32)))),
    stranger("speech", "conformer:Conformer", noise(10, 16), dim=16, depth=1, dim_head=8, heads=2, conv_kernel_size=5),
    model_case("speech", "hifi_gan.Generator", hifi_gan),
    model_case("speech", "bigvgan.BigVGAN", big_vgan),
    stranger("codecs", "snac:SNAC", noise(1, 256), wrapped=Waveform, encoder_dim=8, encoder_rates=[2, 4], decoder_dim=32,
        decoder_rates=[4, 2], attn_window_size=None, codebook_size=16, vq_strides=[4, 2, 1], noise=False),
    stranger("codecs", "vector_quantize_pytorch:ResidualVQ", noise(12, 16), dim=16, num_quantizers=2, codebook_size=16),
    stranger("codecs", "vector_quantize_pytorch:FSQ", noise(12, 3), levels=[8, 5, 5]),
    stranger("codecs", "vector_quantize_pytorch:LFQ", noise(12, 4), codebook_size=16, dim=4),
    stranger("separation", "asteroid.models:ConvTasNet", noise(128), n_src=2, n_blocks=2, n_repeats=1, hid_chan=16,
        skip_chan=8, **ASTEROID),
    stranger("separation", "asteroid.models:DPRNNTasNet", noise(128), n_src=2, n_repeats=1, hid_size=8, chunk_size=10, **ASTEROID),
    stranger("separation", "asteroid.models:SuDORMRFNet", noise(128), n_src=2, num_blocks=1, upsampling_depth=2, kernel_size=9,
        n_filters=16, bn_chan=8),
    stranger("separation", "asteroid.models:DeMask", noise(256), hidden_dims=(16,), n_filters=64, stride=16, kernel_size=64),
    model_case("separation", "asteroid_filterbanks.FreeFB", filterbank),
    stranger("separation", "demucs.demucs:Demucs", noise(2, 1024), sources=["voice", "rest"], channels=8, depth=2, dconv_comp=4,
        norm_starts=1, resample=False, dconv_mode=0),
    stranger("separation", "demucs.demucs:Demucs", noise(2, 512), variant="Demucs_resampled", sources=["voice"], channels=8,
        depth=2, norm_starts=1, dconv_mode=0),
    stranger("separation", "bs_roformer:BSRoformer", noise(600), dim=16, depth=1, dim_head=8, heads=2, time_transformer_depth=1,
        freq_transformer_depth=1, freqs_per_bands=(8, 9, 16), dim_freqs_in=33, stft_n_fft=64, stft_hop_length=32,
        stft_win_length=64, flash_attn=False, mask_estimator_depth=1),
    stranger("spectrograms", "nnAudio.features:STFT", noise(512), n_fft=64, hop_length=32, verbose=False,
        output_format="Magnitude"),
    stranger("spectrograms", "nnAudio.features:MelSpectrogram", noise(512), sr=4000, n_fft=64, n_mels=8, hop_length=32,
        verbose=False),
    stranger("spectrograms", "nnAudio.features:CQT1992v2", noise(2048), sr=4000, n_bins=12, fmin=220, hop_length=128,
        verbose=False),
    stranger("spectrograms", "torchlibrosa:Spectrogram", noise(512), n_fft=64, hop_length=32),
]  # fmt: skip
