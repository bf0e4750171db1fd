"""The process of one case: `python -m tests.corpus.worker NAME TARGET BUNDLE PROVE PARENT [replay] [bare]`. It prints its row as
JSON on the last line. It ends when the process PARENT, which started it, ends."""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from cgcompile.util.workers import end_with_parent

from .results import BUILT, CRASHED, MISSING, Row


def main(arguments: Sequence[str]) -> None:
    """Judges the case; with `replay`, only compares an existing bundle. Output before the row is a log. With `bare`, the bundle
    loses the weights that the case can make again."""
    name, target, bundle, prove, parent, *rest = arguments
    end_with_parent(int(parent))
    begun = time.perf_counter()
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    from .carried import draw_alike_everywhere, leave_out_weights, with_weights
    from .case import as_for
    from .judge import judge, replayed
    from .models import find

    draw_alike_everywhere()
    case = find(name)
    if "transformers" in case.needs:
        import transformers

        transformers.logging.set_verbosity_error()
    try:
        with as_for(target):
            broken = case.broken()
        if broken:
            row = Row(name=name, target=target, verdict=MISSING, message=broken)
        elif "replay" in rest:
            with tempfile.TemporaryDirectory() as folder:
                with as_for(target):
                    module = case.build()[0]
                row = replayed(case, target, with_weights(Path(bundle), module, Path(folder)), {})
        else:
            row = judge(case, target, Path(bundle), prove)
            if "bare" in rest and row.verdict == BUILT:
                leave_out_weights(Path(bundle), case.build()[0])
    except Exception as error:  # noqa: BLE001 (any error is a result of the case)
        traceback.print_exc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        row = Row(
            name=name, target=target, verdict=CRASHED, message=f"{type(error).__name__}: {error}", code=type(error).__name__,
            place=f"{frame.filename}:{frame.lineno}",
        )  # fmt: skip
    plain = {**row.plain(), "seconds": time.perf_counter() - begun}
    print("\n" + json.dumps(plain), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
