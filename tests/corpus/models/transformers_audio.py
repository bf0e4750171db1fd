"""Audio models of transformers."""

from __future__ import annotations

from ..case import Case, Made
from .shared import VOCABULARY, ids, named, noise, transformer

WAVES = named(input_values=noise(800))
ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
CONVOLUTIONS = {
    "conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3), "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "mask_time_length": 2, "vocab_size": 32,
}  # fmt: skip
WHISPER = {
    "vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": 80, "max_source_positions": 50,
    "max_target_positions": 32, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip


def encodec() -> Made:
    """The codec, which encodes and decodes."""
    import torch
    from transformers import EncodecConfig, EncodecModel

    class Codec(torch.nn.Module):
        """Quantizes the audio to codes and decodes them."""

        def __init__(self) -> None:
            super().__init__()
            self.codec = EncodecModel(
                EncodecConfig(num_filters=8, hidden_size=16, codebook_size=32, codebook_dim=16, num_residual_layers=1,
                              upsampling_ratios=[4, 4], target_bandwidths=[6.0], sampling_rate=2000, num_lstm_layers=1)
            )  # fmt: skip

        def forward(self, input_values: torch.Tensor) -> torch.Tensor:
            """Waves [batch, 1, samples] -> waves of the same shape."""
            return self.codec.decoder(self.codec.encoder(input_values))

    return Codec(), named(input_values=noise(1, 320))


CASES = [
    transformer("audio/whisper", "WhisperForConditionalGeneration", "WhisperConfig",
        named(input_features=noise(80, 100), decoder_input_ids=ids(8)), **WHISPER),
    transformer("audio/wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", WAVES, **ENCODER, **CONVOLUTIONS),
    transformer("audio/whisper-classification", "WhisperForAudioClassification", "WhisperConfig",
        named(input_features=noise(80, 100)), **WHISPER),
    transformer("audio/hubert", "HubertModel", "HubertConfig", WAVES, **ENCODER, **CONVOLUTIONS),
    transformer("audio/wavlm", "WavLMModel", "WavLMConfig", WAVES, **ENCODER, **CONVOLUTIONS),
    transformer("audio/unispeech", "UniSpeechModel", "UniSpeechConfig", WAVES, **ENCODER, **CONVOLUTIONS),
    transformer("audio/unispeech-sat", "UniSpeechSatModel", "UniSpeechSatConfig", WAVES, **ENCODER, **CONVOLUTIONS),
    transformer("audio/sew", "SEWModel", "SEWConfig", WAVES, squeeze_factor=2, **ENCODER, **CONVOLUTIONS),
    transformer("audio/sew-d", "SEWDModel", "SEWDConfig", WAVES, squeeze_factor=1, pos_att_type=("p2c", "c2p"), position_buckets=8,
        max_position_embeddings=64, **ENCODER, **CONVOLUTIONS),
    transformer("audio/data2vec", "Data2VecAudioModel", "Data2VecAudioConfig", WAVES, **ENCODER,
        **{**CONVOLUTIONS, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3}),
    transformer("audio/wav2vec2-conformer", "Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig", WAVES,
        conv_depthwise_kernel_size=5, position_embeddings_type="relative", **ENCODER, **CONVOLUTIONS),
    transformer("audio/wav2vec2-bert", "Wav2Vec2BertModel", "Wav2Vec2BertConfig", named(input_features=noise(20, 32)),
        feature_projection_input_dim=32, conv_depthwise_kernel_size=5, **ENCODER),
    transformer("audio/ast", "ASTModel", "ASTConfig", named(input_values=noise(64, 32)), patch_size=8, max_length=64,
        num_mel_bins=32, frequency_stride=8, time_stride=8, **ENCODER),
    transformer("audio/speech-to-text", "Speech2TextForConditionalGeneration", "Speech2TextConfig",
        named(input_features=noise(60, 80), decoder_input_ids=ids(8)), vocab_size=VOCABULARY, d_model=64, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
        conv_channels=64, max_source_positions=64, max_target_positions=32, use_cache=False),
    transformer("audio/univnet", "UnivNetModel", "UnivNetConfig", named(input_features=noise(10, 100),
        noise_sequence=noise(10, 64)), model_hidden_channels=8),
    transformer("audio/fastspeech2-hifigan", "FastSpeech2ConformerHifiGan", "FastSpeech2ConformerHifiGanConfig",
        named(spectrogram=noise(10, 16)), model_in_dim=16, upsample_initial_channel=32, upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8]),
    Case(name="transformers/audio/encodec", make=encodec, needs=("transformers",)),
    transformer("audio/moonshine", "MoonshineForConditionalGeneration", "MoonshineConfig",
        named(input_values=noise(2000), decoder_input_ids=ids(8)), vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128,
        encoder_num_hidden_layers=1, decoder_num_hidden_layers=1, encoder_num_attention_heads=4, decoder_num_attention_heads=4,
        encoder_num_key_value_heads=4, decoder_num_key_value_heads=4, use_cache=False),
]  # fmt: skip
