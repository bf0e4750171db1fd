"""Third-party transformers, state-space models, recurrent cells, taggers, proteins."""

from __future__ import annotations

import torch
from torch import nn

from ...case import Made
from ..shared import ids, noise
from .stranger import model_case, stranger

WORDS, LENGTH = 50, 12
TEXT = ids(LENGTH, WORDS)
TWO_HEADS = {"dim": 16, "depth": 1, "heads": 2}


class Tagger(nn.Module):
    """A bidirectional LSTM with a conditional random field, which returns the log likelihood of tags."""

    def __init__(self, crf: nn.Module) -> None:
        super().__init__()
        self.embedding, self.lstm, self.crf = nn.Embedding(WORDS, 8), nn.LSTM(8, 8, bidirectional=True, batch_first=True), crf
        self.head = nn.Linear(16, 5)

    def forward(self, words: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Computes the log likelihood; the first word of each sentence must be valid."""
        return self.crf(self.head(self.lstm(self.embedding(words))[0]), tags, mask)


def sentences(batch: int) -> tuple[torch.Tensor, ...]:
    """Draws words, tags, and a mask of valid words: all of the first sentence, some of the others."""
    lengths = torch.cat([torch.tensor([LENGTH]), torch.randint(3, LENGTH, (batch,))])[:batch]
    mask = torch.arange(LENGTH)[None] < lengths[:, None]
    return torch.randint(0, WORDS, (batch, LENGTH)), torch.randint(0, 5, (batch, LENGTH)), mask


def crf() -> Made:
    """The tagger with pytorch-crf."""
    from torchcrf import CRF

    return Tagger(CRF(5, batch_first=True)), sentences


def torch_crf() -> Made:
    """The tagger with TorchCRF."""
    from TorchCRF import CRF

    return Tagger(CRF(5)), sentences


def allen_crf() -> Made:
    """The tagger with AllenNLP's layer."""
    from allencrf.conditional_random_field import ConditionalRandomField

    return Tagger(ConditionalRandomField(5)), sentences


def partial_crf() -> Made:
    """The tagger with pytorch-partial-crf."""
    from pytorch_partial_crf import CRF

    return Tagger(CRF(5)), sentences


def viterbi() -> Made:
    """Viterbi decoding with bi-lstm-crf."""
    from bi_lstm_crf import CRF

    class Best(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.crf = CRF(8, 5)

        def forward(self, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.crf(features, mask)[0]

    return Best(), lambda batch: (torch.randn(batch, LENGTH, 8), sentences(batch)[2])


def x_decoder(**options: object) -> Made:
    """A decoder of x-transformers."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=1, heads=2, attn_dim_head=8, **options)
    return TransformerWrapper(num_tokens=WORDS, max_seq_len=16, attn_layers=layers), lambda batch: (TEXT(batch),)


def mamba() -> Made:
    """A block of mamba.py."""
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=16, n_layers=1, d_state=4)), lambda batch: (torch.randn(batch, LENGTH, 16),)


def minimal_rnn() -> Made:
    """A recurrent cell with one gate."""
    from torchrecurrent import MinimalRNN

    return MinimalRNN(8, 12), lambda batch: (torch.randn(LENGTH, batch, 8),)


def bert() -> Made:
    """BERT of spaCy's curated transformers."""
    from curated_transformers.models import BERTConfig, BERTEncoder

    config = BERTConfig(
        embedding_width=16, hidden_width=16, intermediate_width=32, n_attention_heads=2, n_hidden_layers=1, n_pieces=WORDS,
        n_positions=16,
    )  # fmt: skip

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = BERTEncoder(config)

        def forward(self, pieces: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            from curated_transformers.layers import AttentionMask

            return self.encoder(pieces, AttentionMask(mask)).last_hidden_layer_state

    return Last(), lambda batch: (TEXT(batch), sentences(batch)[2])


def lit_gpt() -> Made:
    """Lightning's LitGPT with Llama layers."""
    from litgpt.config import Config
    from litgpt.model import GPT

    model = GPT(Config(
        block_size=16, vocab_size=WORDS, padded_vocab_size=WORDS, n_layer=1, n_head=2, n_embd=16, n_query_groups=1,
        rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
        intermediate_size=32,
    ))  # fmt: skip
    return model, lambda batch: (TEXT(batch),)


def lora() -> Made:
    """A BERT layer with PEFT's LoRA."""
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertModel

    bert = BertModel(BertConfig(vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32))
    model = get_peft_model(bert, LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=False))
    return model, lambda batch: {"input_ids": TEXT(batch), "attention_mask": torch.ones(batch, LENGTH, dtype=torch.int64)}


def sentence_bert() -> Made:
    """A pooling layer, a dense layer and a norm of sentence-transformers over embedded words."""
    from sentence_transformers.models import Dense, Normalize, Pooling

    class Sentences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, 16)
            self.rest = nn.Sequential(Pooling(16, pooling_mode="mean"), Dense(16, 8), Normalize())

        def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.rest({"token_embeddings": self.words(words), "attention_mask": mask})["sentence_embedding"]

    return Sentences(), lambda batch: (TEXT(batch), sentences(batch)[2].long())


def esm2() -> Made:
    """ESM-2 with one layer and its correction for masked tokens."""
    from esm import Alphabet
    from esm.model.esm2 import ESM2

    alphabet = Alphabet.from_architecture("ESM-1b")
    return ESM2(num_layers=1, embed_dim=16, attention_heads=2, alphabet=alphabet), lambda batch: (
        torch.randint(4, 24, (batch, LENGTH)),
    )


def msa() -> Made:
    """The MSA transformer."""
    from argparse import Namespace

    from esm import Alphabet
    from esm.model.msa_transformer import MSATransformer

    arguments = Namespace(
        embed_dim=16, ffn_embed_dim=32, attention_heads=2, layers=1, dropout=0.1, attention_dropout=0.1, activation_dropout=0.1,
        max_tokens_per_msa=2**14, max_tokens=2**14, max_positions=32, embed_positions_msa=True, logit_bias=True,
        embed_positions_msa_dim=16,
    )  # fmt: skip
    return MSATransformer(arguments, Alphabet.from_architecture("msa_transformer")), lambda batch: (
        torch.randint(4, 24, (batch, 3, LENGTH)),
    )


CASES = [
    model_case("taggers", "torchcrf.CRF", crf),
    model_case("taggers", "TorchCRF.CRF", torch_crf),
    model_case("taggers", "allencrf.CRF", allen_crf),
    model_case("taggers", "pytorch_partial_crf.CRF", partial_crf),
    model_case("taggers", "bi_lstm_crf.CRF", viterbi),
    stranger("taggers", "bi_lstm_crf:BiRnnCrf", lambda batch: sentences(batch)[0].clamp(min=1) * sentences(batch)[2],
        vocab_size=WORDS, tagset_size=5, embedding_dim=8, hidden_dim=8),
    model_case("text", "x_transformers.Decoder", lambda: x_decoder(rotary_pos_emb=True)),
    model_case("text", "x_transformers.Decoder_alibi", lambda: x_decoder(alibi_pos_bias=True)),
    model_case("text", "x_transformers.Decoder_sparse", lambda: x_decoder(attn_sparse_topk=4)),
    model_case("text", "curated_transformers.BERTEncoder", bert),
    model_case("text", "litgpt.GPT", lit_gpt),
    model_case("text", "peft.LoRA", lora),
    model_case("text", "sentence_transformers.Pooling", sentence_bert),
    stranger("text", "performer_pytorch:PerformerLM", TEXT, num_tokens=WORDS, max_seq_len=16, dim_head=8, **TWO_HEADS),
    stranger("text", "linformer:Linformer", noise(LENGTH, 16), dim=16, seq_len=LENGTH, depth=1, heads=2, k=4),
    stranger("text", "nystrom_attention:Nystromformer", noise(LENGTH, 16), dim=16, dim_head=8, heads=2, depth=1, num_landmarks=4,
        pinv_iterations=2),
    stranger("text", "local_attention:LocalTransformer", TEXT, num_tokens=WORDS, dim=16, depth=1, max_seq_len=16, causal=True,
        local_attn_window_size=4, heads=2, dim_head=8),
    stranger("text", "reformer_pytorch:ReformerLM", ids(16, WORDS), num_tokens=WORDS, max_seq_len=16, bucket_size=4, n_hashes=2,
        ff_chunks=2, dim_head=8, use_full_attn=True, **TWO_HEADS),
    stranger("text", "perceiver_pytorch:PerceiverIO", noise(LENGTH, 8), dim=8, queries_dim=8, depth=1, num_latents=4, latent_dim=16,
        latent_heads=2, cross_dim_head=8, latent_dim_head=8),
    stranger("text", "g_mlp_pytorch:gMLP", TEXT, num_tokens=WORDS, dim=16, depth=1, seq_len=LENGTH),
    model_case("states", "mambapy.Mamba", mamba),
    stranger("states", "s5:S5", noise(LENGTH, 8), width=8, state_width=8),
    model_case("states", "torchrecurrent.MinimalRNN", minimal_rnn),
    model_case("proteins", "esm.ESM2", esm2),
    model_case("proteins", "esm.MSATransformer", msa),
]  # fmt: skip
