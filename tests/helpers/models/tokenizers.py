"""A byte tokenizer for tests: one token for each of the first `letters` bytes, and two special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BEGIN, END = 256, 257
"""The special tokens <s> and </s>."""


def byte_tokenizer(letters: int = 256) -> Any:
    """Returns a tokenizers.Tokenizer of the first `letters` bytes, printable ones first; needs `tokenizers`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:letters]
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def write_tokenizer(folder: Path, letters: int = 256, **settings: Any) -> None:
    """Writes the tokenizer in the Hub's layout; `settings` go into tokenizer_config.json."""
    byte_tokenizer(letters).save(str(folder / "tokenizer.json"))
    names = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | settings))
