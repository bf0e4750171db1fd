"""Models of transformers with several kinds of input."""

from __future__ import annotations

import torch

from ..case import Case, Made
from .shared import TOKENS, VOCABULARY, ids, named, noise, ones, pixels, transformer, zeros

TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 64,
}  # fmt: skip
VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
}
LLAMA = {**TEXT, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BOTH = named(input_ids=ids(), pixel_values=noise(3, 32, 32), attention_mask=ones(16))
IMAGE = 499
"""The token that stands for a patch of the image."""


def with_picture(pieces: int, side: int = 32, mask: bool = True):
    """Returns a sentence that begins with as many image tokens as the image has patches."""

    def inputs(batch: int) -> dict[str, torch.Tensor]:
        words = torch.randint(5, IMAGE, (batch, 8))
        tensors = {
            "input_ids": torch.cat([torch.full((batch, pieces), IMAGE), words], 1),
            "pixel_values": torch.randn(batch, 3, side, side),
        }
        return {**tensors, "attention_mask": torch.ones(batch, pieces + 8, dtype=torch.int64)} if mask else tensors

    return inputs


def vilt() -> Made:
    """ViLT reads the patches in a random order, so only the pooled state is compared: it does not depend on the order."""
    from transformers import ViltConfig, ViltModel

    class Pooled(torch.nn.Module):
        """Returns the pooled state."""

        def __init__(self) -> None:
            super().__init__()
            self.network = ViltModel(ViltConfig(max_image_length=16, **{**TEXT, **VISION}))

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
            """[batch, 16], [batch, 16], [batch, 3, 32, 32] -> [batch, 64]."""
            return self.network(input_ids=input_ids, attention_mask=attention_mask, pixel_values=pixel_values).pooler_output

    return Pooled(), named(input_ids=ids(), attention_mask=ones(16), pixel_values=noise(3, 32, 32))


def llava() -> Made:
    """Llama with images encoded by CLIP."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION, projection_dim=64), text_config=LlamaConfig(**LLAMA), image_token_id=IMAGE,
        image_token_index=IMAGE, image_seq_length=16, vision_feature_layer=-1,
    )  # fmt: skip
    return LlavaForConditionalGeneration(config), with_picture(16)


def paligemma() -> Made:
    """Gemma with images encoded by SigLIP."""
    from transformers import GemmaConfig, PaliGemmaConfig, PaliGemmaForConditionalGeneration, SiglipVisionConfig

    config = PaliGemmaConfig(
        vision_config=SiglipVisionConfig(**VISION, projection_dim=64, vision_use_head=False),
        text_config=GemmaConfig(**LLAMA, head_dim=16, num_image_tokens=16), image_token_index=IMAGE, image_token_id=IMAGE,
        projection_dim=64,
    )  # fmt: skip
    return PaliGemmaForConditionalGeneration(config), with_picture(16, mask=False)


def qwen2_vl_vision() -> Made:
    """Qwen2-VL's image encoder, for images of one grid."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    class OneGrid(torch.nn.Module):
        """Encodes images of 8 x 8 patches each."""

        def __init__(self) -> None:
            super().__init__()
            self.network = Qwen2VisionTransformerPretrainedModel(
                Qwen2VLVisionConfig(depth=2, embed_dim=32, hidden_size=64, num_heads=4, mlp_ratio=2, patch_size=4, in_channels=3)
            )

        def forward(self, patches: torch.Tensor) -> torch.Tensor:
            """[pictures * 64, 96] -> [pictures * 16, 64]."""
            output = self.network(patches, grid_thw=torch.tensor([[1, 8, 8]], device=patches.device))
            return output if isinstance(output, torch.Tensor) else output.last_hidden_state

    def inputs() -> tuple[torch.Tensor, ...]:
        return (torch.randn(64, 3 * 2 * 4 * 4),)

    return OneGrid(), inputs


def vision_encoder_decoder() -> Made:
    """A ViT encoder with a GPT-2 decoder."""
    from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    decoder = GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=64, use_cache=False,
    add_cross_attention=True,
                         is_decoder=True)  # fmt: skip
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**VISION), decoder)
    return VisionEncoderDecoderModel(config=config), named(pixel_values=noise(3, 32, 32), decoder_input_ids=ids(8))


def blip_2_query() -> Made:
    """BLIP-2's query transformer."""
    from transformers import Blip2QFormerConfig, Blip2QFormerModel

    config = Blip2QFormerConfig(**TEXT, encoder_hidden_size=64, cross_attention_frequency=1)
    return Blip2QFormerModel(config), named(query_embeds=noise(8, 64), encoder_hidden_states=noise(16, 64))


def perceiver() -> Made:
    """Perceiver: latents that attend to any input."""
    from transformers import PerceiverConfig, PerceiverModel

    config = PerceiverConfig(
        num_latents=8, d_latents=32, d_model=48, num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=4,
        num_cross_attention_heads=4,
    )  # fmt: skip
    return PerceiverModel(config), named(inputs=noise(20, 48))


def speech_encoder_clap() -> Made:
    """CLAP's audio encoder."""
    from transformers import ClapAudioConfig, ClapAudioModelWithProjection

    config = ClapAudioConfig(
        spec_size=64, num_mel_bins=16, patch_size=2, patch_stride=[2, 2], window_size=4, depths=[2, 2], num_attention_heads=[2, 2],
        patch_embeds_hidden_size=16, hidden_size=32, projection_dim=16, num_hidden_layers=2,
    )  # fmt: skip
    return ClapAudioModelWithProjection(config), named(input_features=noise(1, 200, 16))


NEEDS = ("transformers",)
TOWERS = {"text_config": {**TEXT, "projection_dim": 32, "eos_token_id": 2}, "vision_config": {**VISION, "projection_dim": 32}}
CASES = [
    transformer("multimodal/clip", "CLIPModel", "CLIPConfig", BOTH, projection_dim=32, **TOWERS),
    Case(name="transformers/multimodal/llava", make=llava, needs=NEEDS),
    transformer("multimodal/siglip", "SiglipModel", "SiglipConfig", BOTH, **TOWERS),
    transformer("multimodal/clip-vision", "CLIPVisionModelWithProjection", "CLIPVisionConfig", pixels(32), projection_dim=32,
        **VISION),
    transformer("multimodal/clipseg", "CLIPSegForImageSegmentation", "CLIPSegConfig", BOTH, projection_dim=32, reduce_dim=16,
        extract_layers=[0, 1], conditional_layer=0, decoder_num_attention_heads=4, decoder_intermediate_size=32, **TOWERS),
    transformer("multimodal/chinese-clip", "ChineseCLIPModel", "ChineseCLIPConfig", BOTH, projection_dim=32, **TOWERS),
    transformer("multimodal/align", "AlignTextModel", "AlignTextConfig", named(input_ids=ids(), attention_mask=ones(16)), **TEXT),
    transformer("multimodal/blip", "BlipVisionModel", "BlipVisionConfig", pixels(32), **VISION),
    Case(name="transformers/multimodal/blip-2-query", make=blip_2_query, needs=NEEDS),
    Case(name="transformers/multimodal/vilt", make=vilt, needs=NEEDS),
    transformer("multimodal/lxmert", "LxmertModel", "LxmertConfig", named(input_ids=ids(), visual_feats=noise(6, 32),
        visual_pos=noise(6, 4), attention_mask=ones(16)), vocab_size=VOCABULARY, hidden_size=64, num_attention_heads=4,
        intermediate_size=128, l_layers=1, x_layers=1, r_layers=1, visual_feat_dim=32, max_position_embeddings=64),
    transformer("multimodal/visual-bert", "VisualBertModel", "VisualBertConfig",
        named(input_ids=ids(), attention_mask=ones(16), visual_embeds=noise(6, 32), visual_attention_mask=ones(6),
        visual_token_type_ids=ones(6)), visual_embedding_dim=32, **TEXT),
    transformer("multimodal/layoutlmv3", "LayoutLMv3Model", "LayoutLMv3Config",
        named(input_ids=ids(), bbox=zeros(TOKENS, 4), attention_mask=ones(16), pixel_values=noise(3, 32, 32)), input_size=32,
        coordinate_size=8, shape_size=16, patch_size=8, **{**TEXT, "max_position_embeddings": 80}),
    transformer("multimodal/git", "GitForCausalLM", "GitConfig", BOTH, vision_config=VISION, use_cache=False, **TEXT),
    transformer("multimodal/owlvit", "OwlViTVisionModel", "OwlViTVisionConfig", pixels(32), **VISION),
    transformer("multimodal/groupvit", "GroupViTTextModel", "GroupViTTextConfig", named(input_ids=ids(), attention_mask=ones(16)),
        **TEXT),
    transformer("multimodal/flava", "FlavaImageModel", "FlavaImageConfig", pixels(32), **VISION),
    transformer("multimodal/x-clip", "XCLIPTextModel", "XCLIPTextConfig", named(input_ids=ids(), attention_mask=ones(16)), **TEXT),
    Case(name="transformers/multimodal/paligemma", make=paligemma, needs=NEEDS),
    Case(name="transformers/multimodal/qwen2-vl-vision", make=qwen2_vl_vision, sizes={}, needs=NEEDS),
    Case(name="transformers/multimodal/vision-encoder-decoder", make=vision_encoder_decoder, needs=NEEDS),
    Case(name="transformers/multimodal/perceiver", make=perceiver, needs=NEEDS),
    Case(name="transformers/multimodal/clap-audio", make=speech_encoder_clap, needs=NEEDS),
]  # fmt: skip
