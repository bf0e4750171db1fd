"""Small configurations of torchaudio's models."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ..case import Case, Made
from .shared import ids, noise

Draw = Callable[[int], torch.Tensor]


def audio(name: str, *draws: Draw, maker: str = "", **options: Any) -> Case:
    """A model by its name in torchaudio.models, with its inputs by position."""

    def make() -> Made:
        module = importlib.import_module("torchaudio.models")
        return getattr(module, maker or name)(**options), lambda batch: tuple([draw(batch) for draw in draws])

    return Case(name=f"torchaudio/{name}", make=make, needs=("torchaudio",))


def lengths(value: int) -> Draw:
    """Returns the same length for every row."""
    return lambda batch: torch.full((batch,), value)


def wav2vec2(**options: Any) -> dict[str, Any]:
    """Options of wav2vec 2.0 with two layers over a short feature extractor."""
    return {
        "extractor_mode": "group_norm", "extractor_conv_layer_config": [(16, 10, 5), (16, 3, 2), (16, 3, 2)],
        "extractor_conv_bias": False,
        "encoder_embed_dim": 32, "encoder_projection_dropout": 0.0, "encoder_pos_conv_kernel": 16, "encoder_pos_conv_groups": 2,
        "encoder_num_layers": 2, "encoder_num_heads": 4, "encoder_attention_dropout": 0.0, "encoder_ff_interm_features": 64,
        "encoder_ff_interm_dropout": 0.0, "encoder_dropout": 0.0, "encoder_layer_norm_first": False, "encoder_layer_drop": 0.0,
        "aux_num_out": 8, **options,
    }  # fmt: skip


CASES = [
    audio("Conformer", noise(20, 16), lengths(20), input_dim=16, num_heads=4, ffn_dim=32, num_layers=2,
        depthwise_conv_kernel_size=5),
    audio("wav2vec2", noise(800), maker="wav2vec2_model", **wav2vec2()),
    audio("hubert", noise(800), maker="wav2vec2_model", **wav2vec2(extractor_mode="layer_norm", encoder_layer_norm_first=True)),
    audio("wavlm", noise(800), maker="wavlm_model", **{**wav2vec2(), "encoder_num_buckets": 8, "encoder_max_distance": 16}),
    audio("Wav2Letter", noise(1, 2000), num_classes=8, input_type="waveform", num_features=1),
    audio("DeepSpeech", noise(1, 20, 16), n_feature=16, n_hidden=32, n_class=8),
    audio("ConvTasNet", noise(1, 400), num_sources=2, enc_num_feats=16, msk_num_feats=16, msk_num_hidden_feats=32, msk_num_layers=2,
        msk_num_stacks=2),
    audio("WaveRNN", noise(1, 48), noise(1, 16, 8), upsample_scales=[2, 2, 3], n_classes=16, hop_length=12, n_res_block=2, n_rnn=32,
        n_fc=32, n_freq=16, n_hidden=16, n_output=16),
    audio("Tacotron2", ids(10, 30), lengths(10), noise(16, 12), lengths(12), n_mels=16, n_symbol=40, symbol_embedding_dim=32,
        encoder_embedding_dim=32, encoder_n_convolution=2, attention_rnn_dim=32, attention_hidden_dim=16,
        attention_location_n_filter=8, decoder_rnn_dim=32, prenet_dim=16, postnet_embedding_dim=16, postnet_n_convolution=3),
    audio("Emformer", noise(24, 16), lengths(20), input_dim=16, num_heads=4, ffn_dim=32, num_layers=2, segment_length=4,
        left_context_length=4, right_context_length=4),
    audio("HDemucs", noise(2, 8192), sources=["voice", "rest"], audio_channels=2, channels=8, nfft=1024, depth=5),
    audio("squim_objective", noise(2000), maker="squim_objective_base"),
]  # fmt: skip
