"""Checks that outside attention a token's result depends only on its id and position.

Requests share calls: one row holds the tokens of all lanes.  A convolution or a recurrence would mix the lanes.  A model that
ignores `position_ids` would use a token's index in this row as its position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ModelError
from ..sampling import GREEDY, Sampling
from .probe import ANOTHER, Probe
from .refusal import error_text, refusal

FAR = 90
"""A position beyond the windows, chunks and `original_max_position_embeddings` of the small copies."""

COUNTS_POSITIONS = "it counts positions itself and ignores position_ids"
"""The reason in the refusal of a model that ignores `position_ids`."""


def check_independence(model: Any) -> None:
    """Raises language-model-refused if a token's result depends on other tokens.  `model`: a CausalLM, a small copy
    of the user's model."""
    config = model.network.config
    if model.kept.by_lane:
        check_padding(model)
        return
    try:
        model.network.set_attn_implementation("paged_probe")
        base, base_outputs = run(model, [4, 5, 6], [5, 6, 7])
        changed, changed_outputs = run(model, [8, 9, 6], [1, FAR, 7])  # other tokens beside the last one
        reordered, _ = run(model, [6, 4, 5], [7, 5, 6])  # the same tokens and positions in another order
    except ModelError:
        raise
    except (RuntimeError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise refusal(config, f"its code does not work with a paged cache: {error_text(error)}", ANOTHER) from error
    finally:
        model.network.set_attn_implementation("paged")
    if not torch.allclose(base[2], changed[2], rtol=1e-3, atol=1e-4):
        name = next(name for name, rows in base_outputs if not same_last_token(rows, changed_outputs, name))
        part = model.network.get_submodule(name if "rope" in name or "rotary" in name else name.rpartition(".")[0])
        problem = f"outside attention, a token's result depends on the other tokens of the call, in {type(part).__name__}"
        raise refusal(config, problem, "serve it with transformers; a paged cache holds only keys and values of earlier tokens")
    if not torch.allclose(base[2], reordered[0], rtol=1e-3, atol=1e-4):
        raise refusal(config, COUNTS_POSITIONS, ANOTHER)


def check_padding(model: Any) -> None:
    """Raises language-model-refused if a wider block table changes the result.  `model`: its calls have one row for each lane."""
    ids, count, start = torch.arange(4, 9)[None], torch.tensor([5]), torch.tensor([0])
    greedy = Sampling(*[torch.tensor([value]) for value in GREEDY])
    length = [count] if model.by_length else []
    try:
        with torch.no_grad():
            narrow, wide = [
                model.prefill(ids, count, start, torch.arange(1, blocks + 1)[None], torch.tensor([slot]), greedy, *length)[
                    "logprob"
                ]
                for slot, blocks in ((1, 2), (2, 4))
            ]
    except Exception as error:
        problem = f"its code does not work with a paged cache: {error_text(error)}"
        raise refusal(model.network.config, problem, ANOTHER) from error
    if not torch.allclose(narrow, wide, rtol=1e-3, atol=1e-3):
        raise refusal(model.network.config, COUNTS_POSITIONS, ANOTHER)


class AnyMask(Probe):
    """A probe that ignores the masks.  `run` passes positions in any order, for which transformers makes wrong masks."""

    def seen(self, layer: int, mask: object) -> tuple[int, int]:
        return 0, 0


def run(model: Any, ids: list[int], positions: list[int]) -> tuple[Tensor, list[tuple[str, Tensor]]]:
    """Returns the logits of every token, and the name and output of each module in order."""
    outputs: list[tuple[str, Tensor]] = []

    def recorder(name: str) -> Callable[..., None]:
        def record(_: nn.Module, __: object, output: Any) -> None:
            rows = output[0] if isinstance(output, tuple) and output else output
            if isinstance(rows, Tensor) and rows.dim() == 3 and rows.shape[:2] == (1, len(ids)):
                outputs.append((name, rows.detach().clone()))

        return record

    hooks = [module.register_forward_hook(recorder(name)) for name, module in model.network.named_modules()]
    try:
        with torch.no_grad():
            row = torch.arange(len(ids))
            logits = model.logits(torch.tensor([ids]), torch.tensor([positions]), AnyMask(model.network.config), row)
    finally:
        for hook in hooks:
            hook.remove()
    return logits, outputs


def same_last_token(rows: Tensor, others: list[tuple[str, Tensor]], name: str) -> bool:
    """Returns whether a module gave the last token the same result in both runs."""
    return any(name == other and torch.allclose(rows[0, -1], value[0, -1], rtol=1e-3, atol=1e-4) for other, value in others)
