"""Checks that a token's result, except for attention, depends only on its id and position.

Requests share calls, with their lanes concatenated in one row of tokens.  A convolution or recurrence would mix them, and a model
that counts positions itself would count those of the row.
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
"""A position beyond every window, chunk and original context of a small copy."""


def check_independence(model: Any) -> None:
    """Raises language-model-refused if a token's result depends on other tokens.  `model`: a CausalLM of a small copy."""
    config = model.network.config
    if model.kept.by_lane:
        check_places(model)
        return
    try:
        model.network.set_attn_implementation("paged_probe")
        plain, seen = run(model, [4, 5, 6], [5, 6, 7])
        other, moved = run(model, [8, 9, 6], [1, FAR, 7])
        first, _ = run(model, [6, 4, 5], [7, 5, 6])
    except ModelError:
        raise
    except (RuntimeError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise refusal(config, f"its code does not run over pages: {error_text(error)}", ANOTHER) from error
    finally:
        model.network.set_attn_implementation("paged")
    if not torch.allclose(plain[2], other[2], rtol=1e-3, atol=1e-4):
        name = next(name for name, rows in seen if not same_last(rows, moved, name))
        part = model.network.get_submodule(name if "rope" in name or "rotary" in name else name.rpartition(".")[0])
        problem = f"a token's result depends on the other tokens of a call beside attention, in {type(part).__name__}"
        raise refusal(config, problem, "serve it with transformers; what a layer carries from token to token has no pages")
    if not torch.allclose(plain[2], first[0], rtol=1e-3, atol=1e-4):
        raise refusal(config, "it counts positions itself, instead of taking position_ids", ANOTHER)


def check_places(model: Any) -> None:
    """Raises language-model-refused if more padding changes the result.  `model`: called with a row for every lane."""
    ids, count, start = torch.arange(4, 9)[None], torch.tensor([5]), torch.tensor([0])
    greedy = Sampling(*[torch.tensor([value]) for value in GREEDY])
    length = [count] if model.by_length else []
    try:
        with torch.no_grad():
            near, far = [
                model.prefill(ids, count, start, torch.arange(1, blocks + 1)[None], torch.tensor([slot]), greedy, *length)[
                    "logprob"
                ]
                for slot, blocks in ((1, 2), (2, 4))
            ]
    except Exception as error:
        raise refusal(model.network.config, f"its code does not run over pages: {error_text(error)}", ANOTHER) from error
    if not torch.allclose(near, far, rtol=1e-3, atol=1e-3):
        problem = "it counts positions itself, instead of taking position_ids"
        raise refusal(model.network.config, problem, ANOTHER)


class AnyMask(Probe):
    """A probe for calls with positions in any order, which do not match the masks."""

    def seen(self, layer: int, mask: object) -> tuple[int, int]:
        return 0, 0


def run(model: Any, ids: list[int], places: list[int]) -> tuple[Tensor, list[tuple[str, Tensor]]]:
    """Returns the logits of every token, and the name and output of each module in order."""
    outputs: list[tuple[str, Tensor]] = []

    def noting(name: str) -> Callable[..., None]:
        def note(_: nn.Module, __: object, output: Any) -> None:
            rows = output[0] if isinstance(output, tuple) and output else output
            if isinstance(rows, Tensor) and rows.dim() == 3 and rows.shape[:2] == (1, len(ids)):
                outputs.append((name, rows.detach().clone()))

        return note

    hooks = [module.register_forward_hook(noting(name)) for name, module in model.network.named_modules()]
    try:
        with torch.no_grad():
            row = torch.arange(len(ids))
            logits = model.logits(torch.tensor([ids]), torch.tensor([places]), AnyMask(model.network.config), row)
    finally:
        for hook in hooks:
            hook.remove()
    return logits, outputs


def same_last(rows: Tensor, others: list[tuple[str, Tensor]], name: str) -> bool:
    """Returns whether a module gave the last token the same result in both runs."""
    return any(name == other and torch.allclose(rows[0, -1], value[0, -1], rtol=1e-3, atol=1e-4) for other, value in others)
