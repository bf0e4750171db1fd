"""A Llama of one layer and its bundle, which tests of examples/causal_lm.py and of its server share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.bundles.shared_builds import shared_build
from tests.helpers.places import ROOT

EXAMPLES = ROOT / "examples"


def llama_bundle() -> Path:
    """A folder with `llama`, as the Hub has it (128 tokens, float32), and `llama.cgb`: 2 lanes of 4 pages, 16 tokens a
    chunk, 64 pages and 8 slots to give out; without `generate`, which takes two minutes to build."""
    return shared_build("causal_lm", build)


def build(folder: Path) -> None:
    """Fills the folder; needs torch and transformers."""
    import torch
    import transformers

    import cgcompile

    sys.path.insert(0, str(EXAMPLES))
    from language_model.configurations import CONFIGURATIONS

    sys.path.remove(str(EXAMPLES))
    options = {**CONFIGURATIONS["llama"], "num_hidden_layers": 1, "initializer_range": 0.2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**options)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "llama")
    sizes = {"prefill": {"batch": [2], "seq": [16]}, "decode": {"batch": [2]}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAUSAL_LM", str(folder / "llama"))
        patch.setenv("CAUSAL_LM_TURNS", "0")
        every = {entry: {**each, "blocks": [4]} for entry, each in sizes.items()}
        cgcompile.build(str(EXAMPLES / "causal_lm.py"), sizes=every, out=folder / "llama.cgb", target="cpu")
