"""Compares every causal language model of transformers with its `generate`, small and in eager PyTorch: nothing is built.

python -m tests.families                 # all of them: equal, refused (and why), WRONG, traceback
python -m tests.families llama4_text "llama, dynamic rope"
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter

from .cases import FEATURES, NEEDED

warnings.filterwarnings("ignore")


def main() -> int:
    """0 where every family is equal or refused by name."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.families", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="model types, and features of tests/families/cases.py")
    wanted = parser.parse_args().names
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    counts: Counter[str] = Counter()
    for name in wanted or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *FEATURES]:
        start = time.perf_counter()
        verdict = judged(name)
        counts[verdict.partition(":")[0]] += 1
        print(f"{name:32} {time.perf_counter() - start:5.1f} s  {verdict}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    return 1 if counts["WRONG"] or counts["traceback"] else 0


def judged(name: str) -> str:
    """`equal`, `refused: why`, `WRONG: where` or `traceback: what` of a model type or feature; `no configuration: why` where
    transformers cannot make the default one.

    WRONG is a text that only the comparison knows to be another: no rule names what the model does.
    """
    from transformers import AutoConfig

    from cgcompile.errors import ModelError
    from cgcompile.language_models.comparison.refusal import told
    from cgcompile.language_models.comparison.texts import compare_small
    from cgcompile.language_models.recipe import small

    options = FEATURES.get(name) or {"model_type": name, **NEEDED.get(name, {})}
    try:
        config = AutoConfig.for_model(**options)
    except Exception as error:  # noqa: BLE001 transformers' own
        return f"no configuration: {told(error)}"
    try:
        compare_small(config, small)
    except ModelError as error:
        kind = "WRONG" if "text differs" in str(error) else "refused"
        return f"{kind}: {error}"
    except Exception as error:  # noqa: BLE001 what it is about
        return f"traceback: {told(error)}"
    return "equal"


if __name__ == "__main__":
    sys.exit(main())
