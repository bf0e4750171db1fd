"""`cgcompile build FOLDER`: a folder in the Hub's layout becomes a bundle; anything else gives an error in one sentence."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import cgbundle  # noqa: E402
import cgcompile  # noqa: E402
from cgcompile.errors import BuildError, ModelError  # noqa: E402
from cgcompile.language_models.comparison.texts import by_generate, small_reference  # noqa: E402
from cgcompile.language_models.networks import folder_network  # noqa: E402
from tests.helpers.models.causal_lm import Engine, causal_model, prompt, reference  # noqa: E402
from tests.helpers.models.language_models import configuration, network  # noqa: E402
from tests.helpers.models.tokenizers import write_tokenizer  # noqa: E402
from tests.helpers.places import ROOT  # noqa: E402


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a Llama of two layers in the Hub's layout: 512 tokens, float32."""
    folder = tmp_path_factory.mktemp("hub") / "Tiny-0.1B"
    network("llama", torch.float32).save_pretrained(folder)
    write_tokenizer(folder, letters=120)
    return folder


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def test_a_folder_becomes_a_bundle(llama: Path, tmp_path: Path) -> None:
    """The command needs no model file: the bundle has the folder's name, and its tokens equal transformers'."""
    command = [sys.executable, "-m", "cgcompile_cli", "build", str(llama), "--context", "64", "--lanes", "2", "--target", "cpu"]
    tree = os.pathsep.join([str(ROOT), str(ROOT / "cli"), str(ROOT / "bundles")])
    environment = {**os.environ, "PYTHONPATH": tree}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Tiny-0.1B.cgb\n" and "Loading weights" not in done.stderr
    text = " ".join(done.stderr.split())
    assert f"serve cgcompile serve Tiny-0.1B.cgb --tokenizer {llama}" in text
    assert "other sizes are refused" not in text and "mutated-buffer" not in text
    model = causal_model(str(llama))
    with cgbundle.load(tmp_path / "Tiny-0.1B.cgb") as program:
        assert set(program.entries) == {"prefill", "decode", "choose"} and program.manifest.name == "Tiny-0.1B"
        engine = Engine(program, lanes=1, blocks=4, chunk=64)
        engine.free, engine.slots = list(range(1, 9)), [1, 2]
        engine.add("text", prompt(20), 20)
        engine.prefill(["text"])
        engine.lanes = 2
        for _ in range(12):
            engine.decode(["text"])
        assert engine.remove("text")[20:] == reference(model, prompt(20), 13)


def test_a_folder_of_a_model_with_states_becomes_a_bundle(tmp_path: Path) -> None:
    """Jamba has Mamba states, attention in transformers' own code, and experts. The second text reuses the pages and the slot of
    the first one."""
    folder = tmp_path / "jamba"
    network = small_reference(transformers.AutoConfig.for_model("jamba"), transformers.AutoModelForCausalLM)
    network.save_pretrained(folder)
    write_tokenizer(folder, letters=120)
    cgcompile.build(str(folder), out=tmp_path / "jamba.cgb", target="cpu", context=32, lanes=[1])
    with cgbundle.load(tmp_path / "jamba.cgb") as program:
        engine = Engine(program, lanes=1, blocks=2, chunk=32)
        engine.free, engine.slots = [1, 2], [1]
        for text in (prompt(19), prompt(7, 1)):
            engine.add("text", text, 12)
            engine.run("text", 12)
            tokens = engine.remove("text")[len(text) :]
            assert tokens == [written.token for written in by_generate(network, text, len(tokens))]


def test_check_reads_a_folder(llama: Path) -> None:
    report = cgcompile.check(str(llama), target="cpu", context=64, lanes=[1])
    assert not report.refused and [entry_report.entry for entry_report in report.reports] == ["prefill", "decode", "choose"]
    assert dict(report.sizes) == {"batch": (1,), "seq": (64,), "blocks": (4,)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": [1]}, "--sizes is for model files"), ({"train": True}, "--train is for model files"),
        ({"world": 2}, "--world is for model files"), ({"donations": [("a", "b")]}, "donations is for model files"),
        ({"context": 1024}, "context 1024: expected 16 to 512 tokens"), ({"lanes": "0"}, "lanes '0': expected distinct"),
        ({"dtype": "int8"}, "dtype 'int8': expected one of"),
    ],
)  # fmt: skip
def test_options_that_a_folder_does_not_take(llama: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message) as caught:
        cgcompile.build(str(llama), out=tmp_path / "x.cgb", target="cpu", **options)
    assert caught.value.code == "option-invalid"


def test_options_of_folders_for_a_model_file(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text("def model(): ...\ndef inputs(batch): ...\n")
    with pytest.raises(BuildError, match="--lanes is for the folder of a language model, and this model is none"):
        cgcompile.build(str(file), sizes=[1], lanes="1,2", target="cpu")


def config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
            "rope type 'spiral' in config.json: expected",
        ),
        ({"model_type": "nobodys"}, "this version of transformers does not know the model_type in config.json"),
        ({"intermediate_size": 112}, r"tensor model.layers.0.mlp.down_proj.weight has the shape \(48, 96\), and the configuration"),
        ({"num_hidden_layers": 3}, "the weights lack model.layers.2.input_layernorm.weight and 8 more"),
        ({"num_attention_heads": 5, "head_dim": None}, "transformers cannot"),
    ],
)
def test_a_configuration_that_does_not_fit(copy: Path, changes: dict[str, Any], message: str) -> None:
    config(copy, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        folder_network(copy, torch.float32)
    assert caught.value.code == "folder-invalid" and "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "why"), [("bart", "it counts positions itself"), ("bert", "")])
def test_a_family_that_is_refused(copy: Path, kind: str, why: str, tmp_path: Path) -> None:
    transformers.AutoConfig.for_model(kind).save_pretrained(copy)
    with pytest.raises(ModelError, match=f"model_type {kind}: .*{why}") as caught:
        cgcompile.build(str(copy), out=tmp_path / "x.cgb", target="cpu", context=64)
    assert caught.value.code == "language-model-refused" and "\n" not in str(caught.value)


def test_a_missing_package_names_the_extra(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cgcompile.pipeline import folders

    monkeypatch.setattr(folders, "NEEDED", ("no_such_package",))
    with pytest.raises(BuildError, match="building a folder needs no_such_package, of the extra llm"):
        cgcompile.build(str(llama), target="cpu")


def test_a_model_by_hand_has_the_same_configuration(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is that of examples/causal_lm.py with int8 weights."""
    from cgcompile.model.load import load_sources

    monkeypatch.setenv("CAUSAL_LM", str(llama))
    sources = load_sources(str(ROOT / "examples/causal_lm.py"))
    assert [source.entry for source in sources] == ["prefill", "decode", "choose", "generate"]
    assert sources[0].model.vocabulary == configuration("llama").vocab_size
