"""Folders of language models are read without torch. Every defect gives an error of one sentence, and omitted settings have
defaults."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cgcompile.errors import BuildError, ModelError
from cgcompile.language_models import settings
from cgcompile.language_models.folder import ModelFolder, read_folder
from cgcompile.language_models.settings import check_settings, settings_for
from cgcompile.targets.choice import Options
from cgcompile.targets.memory_layout import RECORDED_STATES
from tests.helpers.places import ROOT

CONFIG = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "dtype": "bfloat16",
}  # fmt: skip

CROSS = Options(record="cross-compile")


def safetensors(path: Path, dtype: str = "BF16", missing: int = 0) -> None:
    """Writes a file with one tensor of 64 bytes, without its last `missing` bytes."""
    header = json.dumps({"w": {"dtype": dtype, "shape": [32], "data_offsets": [0, 64]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64 - missing))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder that is valid as far as this can be decided without transformers."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    safetensors(tmp_path / "model.safetensors")
    return tmp_path


def test_a_sound_folder(folder: Path) -> None:
    read = read_folder(str(folder))
    assert (read.name, read.weights, dict(read.weight_bytes)) == (folder.name, 32, {"BF16": 64})


def index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


BROKEN = {
    "no tokenizer": (lambda at: (at / "tokenizer.json").unlink(), "no tokenizer in it (tokenizer.json)"),
    "no weights": (lambda at: (at / "model.safetensors").unlink(), "no weights in it (model.safetensors)"),
    "pickled": (
        lambda at: (at / "model.safetensors").rename(at / "pytorch_model.bin"),
        "its weights are pickled (pytorch_model.bin), expected model.safetensors",
    ),
    "shard": (index, "model-00002-of-00002.safetensors is missing, which model.safetensors.index.json names"),
    "cut": (lambda at: safetensors(at / "model.safetensors", missing=9), "model.safetensors: it is cut short: "),
    "other": (lambda at: (at / "model.safetensors").write_bytes(b"PK"), "model.safetensors: its 2 bytes are no safetensors"),
    "fp8": (lambda at: safetensors(at / "model.safetensors", "F8_E4M3"), "model.safetensors: w is quantized (F8_E4M3)"),
    "fp8 by name": (
        lambda at: config(at, quantization_config={"quant_method": "fp8"}),
        "config.json: the weights are quantized (fp8), and none of these are read",
    ),
    "no model type": (lambda at: (at / "config.json").write_text("{}"), "config.json: it names no model_type"),
    "no JSON": (lambda at: (at / "config.json").write_text("{"), "config.json: it is not JSON: "),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder(folder: Path, what: str) -> None:
    spoil, message = BROKEN[what]
    spoil(folder)
    with pytest.raises(ModelError) as caught:
        read_folder(str(folder))
    assert caught.value.code == "folder-invalid" and message in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_is_told_how_to_get_one(folder: Path) -> None:
    """A model that was saved by save_pretrained() was never downloaded."""
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError) as caught:
        read_folder(str(folder))
    assert caught.value.hint.endswith(f"or write it: tokenizer.save_pretrained({str(folder)!r})")


def read(**changes: Any) -> ModelFolder:
    text = CONFIG | changes
    return ModelFolder(label="llama", name="llama", config=text, text=text, weight_bytes={"BF16": 2_500_000_000})


def test_defaults_of_a_gpu() -> None:
    setup = settings_for(read(), CROSS, 80 << 30)
    assert (setup.context, setup.lanes, setup.dtype, setup.turns, setup.pages) == (8192, (1, 8, 32), "bfloat16", 32, 512 + 1)
    slots = {name: ("slots", 33) for name in ("seen", "deferred", "biases")}
    assert setup.state == {name: ("pages", 32 * 512 + 1) for name in ("keys_*", "values_*")} | slots
    assert setup.sizes == {
        "prefill": {"batch": [1], "seq": [128, 512], "blocks": [512]}, "decode": {"batch": [1, 8, 32], "blocks": [512]},
        "choose": {"batch": [1, 8, 32]}, "generate": {"batch": [1, 8, 32], "blocks": [512]},
    }  # fmt: skip
    assert settings_for(read(), CROSS, 8 << 30) == setup, "memory decides when a bundle is loaded"
    recorded = settings_for(read(), Options(), 24 << 30)
    assert RECORDED_STATES * recorded.pages * recorded.page_bytes < 22 << 30, "a process that records holds a cache several times"


def test_defaults_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "cache_room", lambda gpu, weights, recorded: 64 << 30)
    setup = settings_for(read(max_position_embeddings=1024), CROSS, None)
    assert (setup.context, setup.lanes, setup.dtype, setup.turns, setup.slots) == (1024, (1, 4), "float32", 0, 5)
    assert list(setup.sizes) == ["prefill", "decode", "choose"]


def test_what_the_user_says() -> None:
    setup = settings_for(read(), replace(CROSS, context=100, lanes="8,1", dtype="float16"), 0)
    assert (setup.context, setup.lanes, setup.dtype, setup.chunks) == (96, (1, 8), "float16", (96,))
    wide = settings_for(read(), replace(CROSS, lanes="64,256", chunk="512,2048"), 0)
    assert (wide.lanes, wide.chunks, wide.turns) == ((64, 256), (512, 2048), 0)
    assert list(settings_for(read(), replace(CROSS, lanes="8,256"), 0).sizes["generate"]["batch"]) == [8]


def test_pieces_of_several_prompts_share_a_call() -> None:
    setup = settings_for(read(), replace(CROSS, chunk=[2048, 128]), 80 << 30, pieces=True)
    assert setup.sizes["prefill"] == {"batch": [2, 32], "seq": [64], "blocks": [512]}
    short = settings_for(read(), replace(CROSS, context=48), 80 << 30, pieces=True)
    assert short.sizes["prefill"] == {"batch": [1], "seq": [48], "blocks": [3]}, "of less than a piece there is one lane"


def test_a_bank_of_adapters() -> None:
    setup = settings_for(read(), replace(CROSS, adapters=4), 0)
    assert (setup.adapters, setup.rank) == (4, 16) and setup.sizes["load_adapter"] == {}
    assert settings_for(read(), replace(CROSS, adapters=4, adapter_rank=64), 0).rank == 64
    assert settings_for(read(), CROSS, 0).adapters == 0
    for adapters, rank, message in (
        (0, 8, "adapter_rank is the largest rank of adapters, and the bundle is to have none"),
        (2, 1024, "adapter_rank 1024: expected 1 to 512"), (-1, None, "adapters -1: expected 1 or more, or 0 for none"),
    ):  # fmt: skip
        with pytest.raises(BuildError, match=message):
            check_settings(read(), Options(adapters=adapters, adapter_rank=rank))
    with pytest.raises(BuildError, match=r"context 8192: the cache takes about 256 MiB at least, and there is room for"):
        settings_for(read(), replace(CROSS, adapters=64, adapter_rank=128), 6 << 30)


@pytest.mark.parametrize(
    ("context", "lanes", "dtype", "message"),
    [
        (8, (), None, "context 8: expected 16 to 131072 tokens, the longest text of llama"),
        (200_000, (), None, "context 200000: expected 16 to 131072"),
        (None, "1,x", None, "lanes '1,x': expected distinct positive whole numbers"),
        (None, [4, 4], None, r"lanes \[4, 4\]: expected distinct"),
        (None, (), "int8", "dtype 'int8': expected one of bfloat16, float16, float32"),
    ],
)
def test_what_does_not_fit(context: int | None, lanes: Any, dtype: str | None, message: str) -> None:
    with pytest.raises(BuildError, match=message) as caught:
        check_settings(read(), Options(context=context, lanes=lanes, dtype=dtype))
    assert caught.value.code == "option-invalid"


@pytest.mark.parametrize("chunk", ["100", "0", [128, 128], "64,x"])
def test_chunks_that_are_none(chunk: Any) -> None:
    with pytest.raises(BuildError, match=r"expected distinct multiples of 64 tokens") as caught:
        check_settings(read(), Options(chunk=chunk))
    assert caught.value.code == "option-invalid"


def test_a_cache_that_does_not_fit() -> None:
    with pytest.raises(BuildError, match=r"context 8192: the cache takes about 256 MiB at least, and there is room for 0"):
        settings_for(read(), CROSS, 2 << 30)


def test_a_plain_build_imports_nothing_of_it() -> None:
    code = """
import sys
import cgcompile
try:
    cgcompile.build("m.py", target="cpu")
except cgcompile.BuildError as error:
    assert error.code == "source-missing", error
print(*[name for name in sys.modules if "language_models" in name])
"""
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'bundles'}"}
    done = subprocess.run([sys.executable, "-c", code], env=paths, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
