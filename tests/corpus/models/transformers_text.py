"""Text encoders of transformers with two layers."""

from __future__ import annotations

from .shared import VOCABULARY, ids, named, noise, ones, only_ids, tokens, transformer, zeros

SIZE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 64,
}  # fmt: skip
BERT = {**SIZE, "type_vocab_size": 2}
SENTENCE = named(input_ids=ids(), attention_mask=ones(16), token_type_ids=zeros(16))


def two_dimensions(batch: int, seq: int) -> dict[str, object]:
    """Returns ids and masks of any length."""
    return {"input_ids": ids(seq)(batch), "attention_mask": ones(seq)(batch)}


LONGFORMER = {"attention_window": 8, **SIZE, "max_position_embeddings": 80}
"""If the mask is an input, a branch tests whether any token has global attention. Otherwise the model's own mask decides it."""

CASES = [
    transformer("text/bert", "BertModel", "BertConfig", SENTENCE, **BERT),
    transformer("text/bert-classification", "BertForSequenceClassification", "BertConfig", SENTENCE, **BERT),
    transformer("text/bert-lengths", "BertModel", "BertConfig", two_dimensions, {"batch": (1, 3), "seq": (8, 16)}, **BERT),
    transformer("text/roberta", "RobertaForMaskedLM", "RobertaConfig", tokens(), **{**SIZE, "max_position_embeddings": 80}),
    transformer("text/distilbert", "DistilBertForQuestionAnswering", "DistilBertConfig", tokens(), vocab_size=VOCABULARY, dim=64,
        n_layers=2, n_heads=4, hidden_dim=128),
    transformer("text/albert", "AlbertModel", "AlbertConfig", SENTENCE, embedding_size=32, **BERT),
    transformer("text/electra", "ElectraForTokenClassification", "ElectraConfig", SENTENCE, embedding_size=32, **BERT),
    transformer("text/deberta", "DebertaModel", "DebertaConfig", tokens(), relative_attention=True, pos_att_type=["c2p", "p2c"],
        **{**SIZE, "type_vocab_size": 0}),
    transformer("text/deberta-v2", "DebertaV2Model", "DebertaV2Config", tokens(), relative_attention=True,
        pos_att_type=["c2p", "p2c"], position_buckets=8, **{**SIZE, "type_vocab_size": 0}),
    transformer("text/mpnet", "MPNetModel", "MPNetConfig", tokens(), **SIZE),
    transformer("text/xlnet", "XLNetModel", "XLNetConfig", tokens(), vocab_size=VOCABULARY, d_model=64, n_layer=2, n_head=4,
        d_inner=128, use_mems_eval=False),
    transformer("text/xlm", "XLMModel", "XLMConfig", tokens(), vocab_size=VOCABULARY, emb_dim=64, n_layers=2, n_heads=4),
    transformer("text/xlm-roberta", "XLMRobertaModel", "XLMRobertaConfig", tokens(), **{**SIZE, "max_position_embeddings": 80}),
    transformer("text/camembert", "CamembertModel", "CamembertConfig", tokens(), **{**SIZE, "max_position_embeddings": 80}),
    transformer("text/funnel", "FunnelModel", "FunnelConfig", SENTENCE, vocab_size=VOCABULARY, block_sizes=[1, 1],
        num_decoder_layers=1, d_model=64, n_head=4, d_head=16, d_inner=128),
    transformer("text/longformer", "LongformerModel", "LongformerConfig", only_ids(), **LONGFORMER),
    transformer("text/longformer-masked", "LongformerModel", "LongformerConfig", tokens(), **LONGFORMER),
    transformer("text/big-bird", "BigBirdModel", "BigBirdConfig", tokens(32), block_size=4, num_random_blocks=1,
        attention_type="original_full", **SIZE),
    transformer("text/nystromformer", "NystromformerModel", "NystromformerConfig", only_ids(), segment_means_seq_len=16,
        num_landmarks=4, **SIZE),
    transformer("text/fnet", "FNetModel", "FNetConfig", only_ids(), vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2,
        intermediate_size=128, max_position_embeddings=64),
    transformer("text/convbert", "ConvBertModel", "ConvBertConfig", SENTENCE, embedding_size=64, **BERT),
    transformer("text/squeezebert", "SqueezeBertModel", "SqueezeBertConfig", SENTENCE, embedding_size=64, **BERT),
    transformer("text/mobilebert", "MobileBertModel", "MobileBertConfig", SENTENCE, embedding_size=32, intra_bottleneck_size=32,
        true_hidden_size=32, **BERT),
    transformer("text/rembert", "RemBertModel", "RemBertConfig", SENTENCE, input_embedding_size=32, output_embedding_size=32,
        **BERT),
    transformer("text/roformer", "RoFormerModel", "RoFormerConfig", SENTENCE, embedding_size=64, **BERT),
    transformer("text/modernbert", "ModernBertForMaskedLM", "ModernBertConfig", tokens(), pad_token_id=0, cls_token_id=1,
        sep_token_id=2, bos_token_id=1, eos_token_id=2, local_attention=8, **SIZE),
    transformer("text/ernie", "ErnieModel", "ErnieConfig", SENTENCE, **BERT),
    transformer("text/canine", "CanineModel", "CanineConfig", tokens(64), hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=128, max_position_embeddings=128, local_transformer_stride=32,
        downsampling_rate=4),
    transformer("text/megatron-bert", "MegatronBertModel", "MegatronBertConfig", SENTENCE, **BERT),
    transformer("text/ibert", "IBertModel", "IBertConfig", tokens(), quant_mode=False, **{**SIZE, "max_position_embeddings": 80}),
    transformer("text/esm", "EsmModel", "EsmConfig", tokens(), pad_token_id=1, mask_token_id=4, position_embedding_type="rotary",
        **SIZE),
    transformer("text/layoutlm", "LayoutLMModel", "LayoutLMConfig", named(input_ids=ids(), bbox=zeros(16, 4),
        attention_mask=ones(16)), **BERT),
    transformer("text/yoso", "YosoModel", "YosoConfig", tokens(), use_expectation=True, **SIZE),
    transformer("text/decision-transformer", "DecisionTransformerModel", "DecisionTransformerConfig",
        named(states=noise(5, 17), actions=noise(5, 4), rewards=noise(5, 1), returns_to_go=noise(5, 1), timesteps=zeros(5),
        attention_mask=ones(5)), hidden_size=64, n_layer=2, n_head=4, state_dim=17, act_dim=4, max_ep_len=32, use_cache=False),
]  # fmt: skip
