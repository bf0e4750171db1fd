"""Bodies of `torch.cond` and `torch.while_loop` that torch itself refuses, in eager PyTorch too: what it says, in a line of ours.

torch (2.11, 2.13) says it in some thirty lines, of which the first one names no cause.
"""

from __future__ import annotations

import re

OPERATOR = re.compile(r"Higher Order Operator: (torch\.\w+)")

INTRODUCTION = "This higher order operator doesn't work"
"""How the lines begin that come before the cause."""

ALIASING = "Encountered aliasing"

UNLIKE = re.compile(r"differ in '(\w+): (.+?) vs (.+?)'")
"""How torch says that a loop's body gives another dtype or shape than it is given."""


def refused_body(error: BaseException | None) -> tuple[str, str]:
    """What torch refuses and what to do, where it is a body of a higher-order operator; else ("", "")."""
    text = str(error or "")
    operator = OPERATOR.search(text)
    if operator is None:
        return "", ""
    if ALIASING in text:
        what = "a body gives an operand itself, or one tensor twice"
        return f"{operator[1]}: {what}, which torch refuses", "give a copy: `x.clone()` in place of `x`"
    if unlike := UNLIKE.search(text):
        what, given, taken = [re.sub(r"torch\.(?:Size\((.*)\))?", r"\1", each) for each in unlike.groups()]
        return f"{operator[1]}: a body gives a tensor of {what} {given} for one of {taken}", f"keep the {what} from turn to turn"
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(INTRODUCTION)]
    why = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), lines[0])
    return f"{operator[1]}: torch refuses a body: {why}", "write bodies in tensors alone, as functions of their operands"
