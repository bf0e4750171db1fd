"""A Llama with one layer and its bundle, for tests of language models and of their server."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.bundles.shared_builds import shared_build


def llama_bundle() -> Path:
    """Returns a folder with `llama` (Hub layout, 128 tokens, float32) and `llama.cgb`. The bundle has 2 lanes of 4 pages, chunks of
    16 tokens, 64 usable pages and 8 slots. It has no `generate`, whose build takes two minutes."""
    return shared_build("causal_lm", build)


def build(folder: Path, seed: int = 0) -> None:
    """Builds `llama` and `llama.cgb` in `folder`, with random weights; needs torch and transformers."""
    import torch
    import transformers

    import cgcompile
    from cgcompile.language_models.example_inputs import ExampleInputs
    from tests.helpers.models.causal_lm import PAGES, SLOTS, causal_model
    from tests.helpers.models.language_models import CONFIGURATIONS

    options = {**CONFIGURATIONS["llama"], "num_hidden_layers": 1, "initializer_range": 0.2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = transformers.AutoConfig.for_model(**options)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "llama")
    sizes = {"decode": {"batch": [2], "blocks": [4]}, "choose": {"batch": [2]}}
    sizes["prefill"] = sizes["decode"] | {"seq": [16]}
    inputs = ExampleInputs(config=config, pages=PAGES, slots=SLOTS, turns=0).entries()
    model = causal_model(str(folder / "llama"), turns=0).eval()
    cgcompile.build(model, inputs, sizes=sizes, out=folder / "llama.cgb", target="cpu")
