"""A cross-compiled language model with so many layers that each is lowered separately, and a number of pages that a load
chooses."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import cgcompile  # noqa: E402
from cgbundle.format.archive import Archive  # noqa: E402
from cgcompile.language_models.causal_lm import CausalLM  # noqa: E402
from cgcompile.language_models.example_inputs import ExampleInputs  # noqa: E402
from cgcompile.language_models.networks import over_pages  # noqa: E402
from cgcompile.partition.layers import MANY  # noqa: E402
from tests.helpers.models.causal_lm import PAGES, SLOTS  # noqa: E402
from tests.helpers.models.language_models import CONFIGURATIONS  # noqa: E402


def test_decode_of_many_layers_is_cross_compiled(tmp_path: Path) -> None:
    """The attention operator returns a tuple, and all layers write to their caches at the same index tensors."""
    config = transformers.AutoConfig.for_model(**{**CONFIGURATIONS["llama"], "num_hidden_layers": MANY + 1, "head_dim": 16})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = over_pages(config, torch.bfloat16)
    inputs = {"decode": ExampleInputs(config=config, pages=PAGES, slots=SLOTS, turns=0).entries()["decode"]}
    out = tmp_path / "deep.cgb"
    cgcompile.build(
        CausalLM(network, PAGES, SLOTS, 0).eval(),
        inputs,
        sizes={"decode": {"batch": [1], "blocks": [4]}},
        state={"keys_*": "pages", "values_*": "pages"},
        out=out,
        target="sm_90",
    )
    (pages,) = Archive(str(out)).manifest.state_dimensions
    assert pages.name == "pages"
