"""A small language model from a bundle, over HTTP, without torch; and the same tokens by transformers: `make llm`.

    python examples/demo_llm.py --write FOLDER     # a Llama of random weights and a tokenizer of bytes, in the Hub's layout
    python examples/demo_llm.py FOLDER BUNDLE      # serves the bundle of causal_lm.py that was built of it

The weights are random, for no package carries a small real model: the tokens mean nothing, but they are the model's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROMPTS = ("The cat sat on", "Once upon a time")
TOKENS = 24
SERVER = Path(__file__).with_name("serve_llm.py")


SHAPE = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip


def write(folder: Path, shape: Mapping[str, Any] = SHAPE) -> None:
    """config.json, model.safetensors, tokenizer.json; `shape`: what transformers' LlamaConfig takes."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = transformers.AutoConfig.for_model("llama", vocab_size=len(letters), bos_token_id=None, eos_token_id=None, **shape)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def serve(folder: Path, bundle: Path) -> dict[str, Any]:
    """What a server of its own answers, and how soon the first token came."""
    began = time.perf_counter()
    command = [sys.executable, str(SERVER), str(bundle), "--tokenizer", str(folder), "--port", "0", "--name", "random-llama"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        if not line.startswith("serving "):
            raise SystemExit(line.strip() + process.stderr.read())
        try:
            address = line.split()[-1]
            texts, first = [], 0.0
            for prompt in PROMPTS:
                body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
                request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode())
                text = ""
                with urllib.request.urlopen(request, timeout=60) as answer:
                    for event in answer:
                        if event.startswith(b"data: {"):
                            first = first or time.perf_counter() - began
                            text += json.loads(event[6:])["choices"][0]["text"]
                texts.append(text)
            with urllib.request.urlopen(f"{address}/health", timeout=60) as answer:
                health = json.loads(answer.read())
        finally:
            process.terminate()
    return {"texts": texts, "first": first, "torch": health["torch"], "pages": health["pages_used"]}


def reference(folder: str) -> None:
    """The same by transformers, in a process of its own; as JSON on stdout."""
    import torch
    import transformers
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts: list[str] = []
    first = 0.0
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        if not texts:
            model.generate(ids, max_new_tokens=1, **options)
            first = time.clock_gettime(time.CLOCK_MONOTONIC) - float(os.environ["DEMO_BEGAN"])
        made = model.generate(ids, max_new_tokens=TOKENS, **options)
        texts.append(tokenizer.decode(made[0, ids.shape[1] :].tolist()))
    print(json.dumps({"texts": texts, "first": first}))


def main(arguments: list[str]) -> int:
    """0 where the texts are those of transformers, torch stayed out of the server, and no page is taken at the end."""
    if len(arguments) != 2:
        print("usage: python examples/demo_llm.py FOLDER BUNDLE, or --write FOLDER", file=sys.stderr)
        return 2
    if arguments[0] == "--write":
        write(Path(arguments[1]))
        return 0
    if arguments[0] == "--reference":
        reference(arguments[1])
        return 0
    folder, bundle = [Path(each) for each in arguments]
    served = serve(folder, bundle)
    environment = os.environ | {"DEMO_BEGAN": repr(time.clock_gettime(time.CLOCK_MONOTONIC)), "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, __file__, "--reference", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.strip())
    expected = json.loads(done.stdout)
    print("\nA Llama of two layers with random weights: what it says means nothing.\n")
    for prompt, text in zip(PROMPTS, served["texts"], strict=True):
        print(f"  {prompt!r} -> {text!r}")
    print(f"\n{'':28}  bundle, served  transformers")
    print(f"{'torch imported':28}  {'yes' if served['torch'] else 'no':>14}  {'yes':>12}")
    print(f"{'process start to first token':28}  {served['first']:>12.2f} s  {expected['first']:>10.2f} s")
    same = served["texts"] == expected["texts"]
    print(f"\n{TOKENS} tokens behind each prompt: {'the same' if same else 'NOT the same'}; pages still taken: {served['pages']}\n")
    return 0 if same and not served["torch"] and not served["pages"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
