"""examples/causal_lm.py on a GPU: the tokens of transformers, family by family, over decode's kernel; and a bundle of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from tests.helpers.models.causal_lm import (  # noqa: E402
    EXAMPLES,
    FAMILIES,
    Engine,
    check_family,
    check_requests,
    made,
    model_file,
    nobodys_page_is_zero,
)  # fmt: skip


@pytest.fixture(scope="module")
def lm() -> Iterator[ModuleType]:
    with model_file() as imported:
        yield imported


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_transformers(lm: ModuleType, family: str) -> None:
    with torch.device("cuda"):
        check_family(lm, family)


def test_pages_are_used_again_by_requests_that_come_and_go(lm: ModuleType) -> None:
    with torch.device("cuda"):
        llama = made(lm, "llama")
        check_requests(lm, Engine(lm, llama), llama)
        assert nobodys_page_is_zero(llama)


@pytest.mark.parametrize(("family", "lower"), [("llama", "inductor"), ("gemma2", "eager")])
def test_a_bundle_of_which_pages_are_used_again(lm: ModuleType, family: str, lower: str, tmp_path: Path) -> None:
    model = made(lm, family)
    model.network.save_pretrained(tmp_path / "hub")
    sizes = {"prefill": {"batch": [4], "seq": [16], "blocks": [12]}, "decode": {"batch": [4], "blocks": [12]}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAUSAL_LM", str(tmp_path / "hub"))
        patch.setenv("CAUSAL_LM_TURNS", "0")
        cgcompile.build(str(EXAMPLES / "causal_lm.py"), sizes=sizes, out=tmp_path / "lm.cgb", target="cuda", lower=lower)
    with cgbundle.load(tmp_path / "lm.cgb") as program:
        check_requests(lm, Engine(lm, program), model)
        assert not any(torch.from_dlpack(program.state[name])[0].any() for name in ("keys_0", "values_0", "seen"))
