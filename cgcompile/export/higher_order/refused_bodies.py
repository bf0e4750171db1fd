"""Bodies of `torch.cond` and `torch.while_loop` that torch itself refuses, some in eager PyTorch too: why, in a line of ours.

torch (2.11, 2.13) says it in some thirty lines, of which the first one names no cause, or without a line of the model's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from ...model.user_code import place, text_of
from .conditionals import bodies, higher_order, is_conditional

OPERATOR = re.compile(r"Higher Order Operator: (torch\.\w+)")

INTRODUCTION = "This higher order operator doesn't work"
"""How the lines begin that come before the cause."""

ALIASING, MUTATION = "Encountered aliasing", "Input mutation detected"
"""How torch 2.11 says what a body does; later ones take it."""

WRITES, WRITES_FIX = "a body writes to an operand", "make a new tensor in it: `x + 1` in place of `x.add_(1)`"

UNLIKE = re.compile(r"differ in '(\w+): (.+?) vs (.+?)'")
"""How torch says that a loop's body gives another dtype or shape than it is given."""


def refused_body(error: BaseException | None) -> tuple[str, str]:
    """What torch refuses and what to do, where it is a body of a higher-order operator; else ("", "")."""
    text = text_of(error) if error is not None else ""
    operator = OPERATOR.search(text)
    if operator is None:
        return "", ""
    if ALIASING in text:
        what = "a body gives an operand itself, or one tensor twice"
        return f"{operator[1]}: {what}, which torch refuses", "give a copy: `x.clone()` in place of `x`"
    if MUTATION in text:
        return f"{operator[1]}: {WRITES}, which torch refuses", WRITES_FIX
    if unlike := UNLIKE.search(text):
        what, actual, taken = [re.sub(r"torch\.(?:Size\((.*)\))?", r"\1", group) for group in unlike.groups()]
        return f"{operator[1]}: a body gives a tensor of {what} {actual} for one of {taken}", f"keep the {what} from turn to turn"
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(INTRODUCTION)]
    why = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), lines[0])
    return f"{operator[1]}: torch refuses a body: {why}", "write bodies in tensors alone, as functions of their operands"


def written_operand(module: GraphModule) -> tuple[str, str]:
    """The user's line and the operator, where a body writes to an operand: torch makes no functional form of it.  Else ("", "")."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            for inner in _writes(node, part) if is_conditional(node) else ():
                return place(inner)[0] or place(node)[0], f"torch.{higher_order(node)}"
    return "", ""


def _writes(node: Node, module: GraphModule) -> Iterator[Node]:
    """The operations in a node's bodies that write to what these are given, or to a view of it."""
    for body in bodies(node, module):
        for inner in body.graph.nodes:
            if getattr(getattr(inner.target, "_schema", None), "is_mutable", False):
                written = inner
                while written.op == "call_function" and written.args and isinstance(written.args[0], Node) and _shares(written):
                    written = written.args[0]
                if written.op == "placeholder":
                    yield inner


def _shares(node: Node) -> bool:
    """Whether what an operator gives may lie in the memory of its first argument: it is a view, or that argument written to."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)
