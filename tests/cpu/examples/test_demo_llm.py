"""examples/demo_llm.py: `make llm` over the bundle that tests share."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.helpers.bundles.llama_bundle import llama_bundle  # noqa: E402
from tests.helpers.models.tokenizers import write_tokenizer  # noqa: E402
from tests.helpers.places import ROOT  # noqa: E402


def test_its_server_says_what_transformers_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "bundles"))
    demo = importlib.import_module("demo_llm")
    folder = tmp_path / "llama"
    shutil.copytree(llama_bundle() / "llama", folder)
    write_tokenizer(folder, letters=120)
    assert demo.main([str(folder), str(llama_bundle() / "llama.cgb")]) == 0
    told = capfd.readouterr().out
    assert "random weights" in told and "behind each prompt: the same; pages still taken: 0" in told


def test_what_it_writes_is_a_model_with_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    importlib.import_module("demo_llm").write(tmp_path)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("Once upon é").ids) == "Once upon é"
    assert transformers.AutoConfig.from_pretrained(tmp_path).vocab_size == tokenizer.get_vocab_size()
    assert (tmp_path / "model.safetensors").stat().st_size > 100_000
