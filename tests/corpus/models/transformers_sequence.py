"""Encoder-decoder models and time series models of transformers."""

from __future__ import annotations

from typing import Any

import torch

from ..case import Case
from .shared import VOCABULARY, ids, named, noise, ones, transformer

BOTH = named(input_ids=ids(), attention_mask=ones(16), decoder_input_ids=ids(8))
T5 = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "use_cache": False,
      "decoder_start_token_id": 0}  # fmt: skip
BART = {"vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64,
        "use_cache": False}  # fmt: skip


def both(name: str, model: str, config: str, options: dict[str, Any], **more: Any) -> Case:
    """An encoder-decoder model whose inputs are token ids of both."""
    return transformer(f"sequence/{name}", model, config, BOTH, **{**options, **more})


def series(batch: int) -> dict[str, torch.Tensor]:
    """Draws twenty-four past and four future steps of one variable."""
    return {
        "past_values": torch.randn(batch, 31), "past_time_features": torch.randn(batch, 31, 2),
        "past_observed_mask": torch.ones(batch, 31), "future_values": torch.randn(batch, 4),
        "future_time_features": torch.randn(batch, 4, 2),
    }  # fmt: skip


SERIES = {
    "prediction_length": 4, "context_length": 24, "num_time_features": 2, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "use_cache": False,
}  # fmt: skip

CASES = [
    both("t5", "T5ForConditionalGeneration", "T5Config", T5),
    both("bart", "BartForConditionalGeneration", "BartConfig", BART),
    transformer("sequence/t5-encoder", "T5EncoderModel", "T5Config", named(input_ids=ids(), attention_mask=ones(16)), **T5),
    both("mt5", "MT5ForConditionalGeneration", "MT5Config", T5),
    both("umt5", "UMT5ForConditionalGeneration", "UMT5Config", T5),
    both("longt5", "LongT5ForConditionalGeneration", "LongT5Config", T5, local_radius=7),
    both("switch-transformers", "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", T5, num_experts=4,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
    both("mbart", "MBartForConditionalGeneration", "MBartConfig", BART),
    both("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", BART),
    both("marian", "MarianMTModel", "MarianConfig", BART, pad_token_id=0, decoder_start_token_id=1),
    both("m2m-100", "M2M100ForConditionalGeneration", "M2M100Config", BART),
    both("blenderbot", "BlenderbotForConditionalGeneration", "BlenderbotConfig", BART),
    transformer("sequence/led", "LEDForConditionalGeneration", "LEDConfig", named(input_ids=ids(), decoder_input_ids=ids(8)),
        **BART, attention_window=8, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64),
    both("prophetnet", "ProphetNetForConditionalGeneration", "ProphetNetConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_encoder_layers": 2,
        "num_decoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "max_position_embeddings": 64,
        "use_cache": False}),
    transformer("sequence/fsmt", "FSMTForConditionalGeneration", "FSMTConfig",
        named(input_ids=ids(), attention_mask=ones(16), decoder_input_ids=ids(8), decoder_attention_mask=ones(8)),
        **{**{k: v for k, v in BART.items() if k != "vocab_size"}, "langs": ["en", "de"], "src_vocab_size": VOCABULARY,
        "tgt_vocab_size": VOCABULARY}),
    transformer("series/patchtst", "PatchTSTForPrediction", "PatchTSTConfig", named(past_values=noise(32, 3)), num_input_channels=3,
        context_length=32, patch_length=8, patch_stride=8, prediction_length=4, d_model=16, num_hidden_layers=2,
        num_attention_heads=4, ffn_dim=32, loss="mse"),
    transformer("series/patchtsmixer", "PatchTSMixerForPrediction", "PatchTSMixerConfig", named(past_values=noise(32, 3)),
        num_input_channels=3, context_length=32, patch_length=8, patch_stride=8, prediction_length=4, d_model=16, num_layers=2,
        loss="mse"),
    transformer("series/informer", "InformerModel", "InformerConfig", series, **SERIES),
    transformer("series/autoformer", "AutoformerModel", "AutoformerConfig", series, label_length=8, **SERIES),
    transformer("series/time-series-transformer", "TimeSeriesTransformerModel", "TimeSeriesTransformerConfig", series, **SERIES),
    transformer("series/timesfm", "TimesFmModel", "TimesFmConfig", named(past_values=noise(32),
        past_values_padding=lambda batch: torch.zeros(batch, 32, dtype=torch.int64),
        freq=lambda batch: torch.zeros(batch, 1, dtype=torch.int64)), patch_length=8, context_length=32, horizon_length=8,
        hidden_size=32, intermediate_size=64, head_dim=8, num_hidden_layers=2, num_attention_heads=4),
]  # fmt: skip
