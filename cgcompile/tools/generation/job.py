"""The jobs of the measured processes (JSON), and their prompts.  Imports nothing.

- `bundle` its folder, `model` a folder in the Hub's layout, `dtype` of the weights, `target` "cpu" or "cuda", `threads` or null;
- `prompt` tokens of every prompt, `tokens` that are then timed, `batches` numbers of prompts at once, `rounds`;
- `prefill`, `several`, `decode`, `sampling`, `vocabulary` as in `layout.Layout`, `each` pages of a lane.

The answer: `laps` seconds by phase, `first` from process start to the first token, `second` from there to the second; `rates`
tokens per second by batch; `made` the tokens of the first prompt; `torch` whether it is imported.
"""

from __future__ import annotations


def prompt_of(lane: int, length: int, vocabulary: int) -> list[int]:
    """Returns the prompt of a lane, the same in every process."""
    return [(lane * 7919 + place * 104_729 + 3) % vocabulary for place in range(length)]
