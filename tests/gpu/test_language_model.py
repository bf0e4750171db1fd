"""Language models on a GPU: with the Triton kernel of `decode`, every family generates the tokens of transformers, also from a
bundle."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgcompile.language_models.example_inputs import ExampleInputs  # noqa: E402
from tests.helpers.models.causal_lm import (  # noqa: E402
    FAMILIES,
    PAGES,
    SLOTS,
    Engine,
    causal_model,
    check_family,
    check_requests,
    nobodys_page_is_zero,
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_transformers(family: str) -> None:
    with torch.device("cuda"):
        check_family(family)


def test_pages_are_used_again_by_requests_that_come_and_go() -> None:
    with torch.device("cuda"):
        llama = causal_model("llama")
        check_requests(Engine(llama), llama)
        assert nobodys_page_is_zero(llama)


@pytest.mark.parametrize(("family", "lower"), [("llama", "inductor"), ("gemma2", "eager")])
def test_a_bundle_of_which_pages_are_used_again(family: str, lower: str, tmp_path: Path) -> None:
    model = causal_model(family, turns=0)
    sizes = {"prefill": {"batch": [4], "seq": [16], "blocks": [12]}, "decode": {"batch": [4], "blocks": [12]}}
    sizes["choose"] = {"batch": [4]}
    inputs = ExampleInputs(config=model.network.config, pages=PAGES, slots=SLOTS, turns=0).entries()
    cgcompile.build(model.eval(), inputs, sizes=sizes, out=tmp_path / "lm.cgb", target="cuda", lower=lower)
    with cgbundle.load(tmp_path / "lm.cgb") as program:
        check_requests(Engine(program), model)
        assert not any(torch.from_dlpack(program.state[name])[0].any() for name in ("keys_0", "values_0", "seen"))


def test_a_folder(tmp_path: Path) -> None:
    """Builds with the defaults of a GPU: a loop of 32 tokens, two chunk lengths, and a cache that fills the memory."""
    model = causal_model("llama")
    model.network.save_pretrained(tmp_path / "hub")
    (tmp_path / "hub/tokenizer.json").write_text("{}")
    cgcompile.build(str(tmp_path / "hub"), lanes=[1, 4], out=tmp_path / "lm.cgb", target="cuda", dtype="float32")
    with cgbundle.load(tmp_path / "lm.cgb") as program:
        assert set(program.entries) == {"prefill", "decode", "choose", "generate"}
        engine = Engine(program, lanes=1, blocks=512 // 16, chunk=128)
        engine.slots = [1, 2, 3, 4]
        check_requests(engine, model)
