"""A Llama with random weights and a byte tokenizer, in the Hub's layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_llama(folder: Path, shape: Mapping[str, Any]) -> None:
    """Writes config.json, model.safetensors and tokenizer.json; `shape` holds arguments of transformers' LlamaConfig."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = transformers.AutoConfig.for_model("llama", vocab_size=len(letters), bos_token_id=None, eos_token_id=None, **shape)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
