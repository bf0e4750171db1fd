"""The jobs of the measured processes (JSON), and their prompts.  Imports nothing.

- `bundle` its folder, `model` a folder in the Hub's layout, `dtype` of the weights, `target` "cpu" or "cuda", `threads` or null;
- `prompt` the number of tokens in every prompt, `tokens` the number of timed tokens after it, `batches` numbers of prompts that run
  together, `rounds` the number of timed runs;
- `prefill`, `several`, `decode`, `sampling`, `vocabulary`, `adapters` as in `layout.Layout`, `each` the number of pages of a lane.

The answer: `laps` seconds by phase, `first` from process start to the first token, `second` from there to the second; `rates`
tokens per second by batch; `made` the tokens generated for the first prompt; `torch` whether it is imported.
"""

from __future__ import annotations


def prompt_of(lane: int, length: int, vocabulary: int) -> list[int]:
    """Returns the prompt of a lane, the same in every process."""
    return [(lane * 7919 + place * 104_729 + 3) % vocabulary for place in range(length)]
