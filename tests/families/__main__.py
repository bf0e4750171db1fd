"""Compares the texts of a small copy of every causal language model of transformers with those of its `generate`, in eager PyTorch.

python -m tests.families                 # all models: prints equal, refused (and why), WRONG or traceback
python -m tests.families llama4_text "llama, dynamic rope" "qwen2_5_vl, text half"
python -m tests.families --build 10      # builds the first ten equal ones and compares their bundles for the CPU
python -m tests.families --build 1 --target cuda llama    # captured on this GPU; sm_90: cross-compiled and replayed on it
python -m tests.families --tokens 18     # fewer tokens after each prompt

Prompts of 3, 17 and 30 tokens share every call.  Prompt and answer together are longer than every window, chunk and original
context of the small copy.  When the first text has ended, a new text takes its pages and its slot.  All texts must equal
`generate`.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .cases import FEATURES, NEEDED

HALF = ", text half"

TOKENS = 18
"""Number of tokens after each prompt that `judged` compares by default; the default of `--tokens` is 64."""

warnings.filterwarnings("ignore")


def main() -> int:
    """Returns 1 if the text of a model is wrong or its comparison fails, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.families", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="model types, and features of tests/families/cases.py")
    parser.add_argument("--build", type=int, default=0, metavar="N", help="build the first N equal models, one or two minutes each")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="number of tokens after each prompt (default: 64)")
    parser.add_argument("--target", default="cpu", metavar="TARGET", help="target of the builds: cpu, cuda or sm_90 (default: cpu)")
    options = parser.parse_args()
    wanted, builds, tokens = options.names, options.build, options.tokens
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # more threads are slower for such small work
    counts: Counter[str] = Counter()
    for name in wanted or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *FEATURES, *halves()]:
        start = time.perf_counter()
        verdict = judged_half(name.removesuffix(HALF), tokens) if name.endswith(HALF) else judged(name, tokens)
        if verdict == "equal" and builds:
            builds, verdict = builds - 1, built(name, tokens, options.target)
        counts[verdict.partition(":")[0]] += 1
        print(f"{name:32} {time.perf_counter() - start:5.1f} s  {verdict}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    return 1 if counts["WRONG"] or counts["traceback"] else 0


def halves() -> list[str]:
    """Returns multimodal models that contain a language model."""
    from cgcompile.language_models.architectures.text_half import WHOLE

    configs = {config.model_type: config for kind in WHOLE for config in kind._model_mapping}
    return [name + HALF for name, config in sorted(configs.items()) if "text_config" in config.sub_configs]


def judged_half(name: str, tokens: int) -> str:
    """Does what `judged` does, for the text part of a multimodal model: takes it from a folder with the complete model, as `build`
    does."""
    from cgcompile.errors import ModelError
    from cgcompile.language_models.comparison.refusal import error_text
    from cgcompile.language_models.comparison.texts import compare_texts
    from cgcompile.language_models.recipe import small

    try:
        reference = small_multimodal(name)
    except Exception as error:  # noqa: BLE001 an error of transformers
        return f"no small copy: {error_text(error)}"
    try:
        compare_texts(text_half(reference), reference, small, tokens, tokens)
    except ModelError as error:
        return f"{'WRONG' if 'text differs' in str(error) else 'refused'}: {error}"
    except Exception as error:  # noqa: BLE001 any error is a result
        return f"traceback: {error_text(error)}"
    return "equal"


def small_multimodal(name: str) -> Any:
    """Makes a small multimodal model with random weights.  Raises the errors of transformers."""
    from transformers import AutoConfig

    from cgcompile.language_models.architectures.text_half import WHOLE
    from cgcompile.language_models.comparison.texts import small_reference

    config = AutoConfig.for_model(name, **NEEDED.get(name, {}))
    return small_reference(config, next(kind for kind in WHOLE if type(config) in kind._model_mapping))


def text_half(reference: Any) -> Any:
    """Saves a multimodal model to a folder and loads its text part from there, over pages.  Raises ModelError."""
    import torch

    from cgcompile.language_models.comparison.probe import check_kind
    from cgcompile.language_models.networks import folder_configuration, folder_network

    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        check_kind(folder_configuration(folder))
        return folder_network(folder, torch.float32)


def built(name: str, tokens: int, target: str) -> str:
    """Builds a model type, feature or text part that is equal in eager PyTorch. Returns `equal, built`, `WRONG: where` or
    `not built: why`.

    The bundle generates `tokens` tokens after each prompt. `target` is that of `cgcompile build`.
    """
    from transformers import AutoConfig

    import cgbundle
    import cgcompile
    from cgcompile.errors import BuildError
    from cgcompile.language_models.causal_lm import CausalLM
    from cgcompile.language_models.comparison import texts
    from cgcompile.language_models.example_inputs import ExampleInputs

    if name.endswith(HALF):
        reference = small_multimodal(name.removesuffix(HALF))
        network = text_half(reference)
    else:
        config = AutoConfig.for_model(**FEATURES.get(name) or {"model_type": name, **NEEDED.get(name, {})})
        network, reference = texts.small_networks(config)
    model = CausalLM(network, texts.PAGES, texts.SLOTS, 0).eval()
    inputs = ExampleInputs(config=network.config, pages=texts.PAGES, slots=texts.SLOTS, turns=0).entries()
    del inputs["choose"]  # no family changes this entry
    step = {"batch": [len(texts.PROMPTS)], "blocks": [texts.BLOCKS]}
    prompts = [[4 + (31 * place + length) % 150 for place in range(length)] for length in texts.PROMPTS]
    with tempfile.TemporaryDirectory() as scratch:
        try:
            out = Path(scratch, "model.cgb")
            cgcompile.build(model, inputs, sizes={"prefill": {**step, "seq": [texts.READ]}, "decode": step}, out=out, target=target)
        except BuildError as error:
            return f"not built: {error}"
        with cgbundle.load(out) as program:
            served = SimpleNamespace(
                prefill=program.entries["prefill"], decode=program.entries["decode"], by_length=model.by_length,
                reread_at=model.reread_at,
            )  # fmt: skip
            desk = texts.Desk(served, prompts)
            desk.take_chunks()
            for _ in range(tokens):
                desk.take_step()
    for prompt, text in zip(prompts, desk.written, strict=True):
        right = texts.by_generate(copy.deepcopy(reference), prompt, len(text))
        different = [place for place, pair in enumerate(zip(text, right, strict=True)) if not texts.same(*pair)]
        if different:
            return f"WRONG: built, text differs at token {different[0]} of a prompt of length {len(prompt)}"
    return "equal, built"


def judged(name: str, tokens: int = TOKENS) -> str:
    """Returns `equal`, `refused: why`, `WRONG: where` or `traceback: what` of a model type or feature. Returns `no configuration:
    why` if transformers cannot make the default one.

    WRONG means that the texts differ although no check refused the model.
    """
    from transformers import AutoConfig

    from cgcompile.errors import ModelError
    from cgcompile.language_models.comparison.refusal import error_text
    from cgcompile.language_models.comparison.texts import compare_small
    from cgcompile.language_models.recipe import small

    options = FEATURES.get(name) or {"model_type": name, **NEEDED.get(name, {})}
    try:
        config = AutoConfig.for_model(**options)
    except Exception as error:  # noqa: BLE001 an error of transformers
        return f"no configuration: {error_text(error)}"
    try:
        compare_small(config, small, tokens, tokens)
    except ModelError as error:
        kind = "WRONG" if "text differs" in str(error) else "refused"
        return f"{kind}: {error}"
    except Exception as error:  # noqa: BLE001 any error is a result
        return f"traceback: {error_text(error)}"
    return "equal"


if __name__ == "__main__":
    sys.exit(main())
