"""Short error messages for bodies of `torch.cond` and `torch.while_loop` that torch refuses, some also in eager PyTorch.

torch's messages (2.11, 2.13) have about thirty lines.  Either the first line does not name the cause, or the message lacks the line
of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from ...model.user_code import place, text_of
from .conditionals import bodies, higher_order, is_conditional

OPERATOR = re.compile(r"Higher Order Operator: (torch\.\w+)")

INTRODUCTION = "This higher order operator doesn't work"
"""Start of a line of torch's message that does not name the cause."""

ALIASING, MUTATION = "Encountered aliasing", "Input mutation detected"
"""Texts of torch 2.11; later versions accept such bodies."""

WRITES, WRITES_FIX = "a body writes to an operand", "make a new tensor in it: `x + 1` in place of `x.add_(1)`"

UNLIKE = re.compile(r"differ in '(\w+): (.+?) vs (.+?)'")
"""Matches torch's error for a loop body that returns another dtype or shape than it takes."""


def refused_body(error: BaseException | None) -> tuple[str, str]:
    """Returns (message, hint) for an error about a body of a higher-order operator, else ("", "")."""
    text = text_of(error) if error is not None else ""
    operator = OPERATOR.search(text)
    if operator is None:
        return "", ""
    if ALIASING in text:
        cause = "a body gives an operand itself, or one tensor twice"
        return f"{operator[1]}: {cause}, which torch refuses", "give a copy: `x.clone()` in place of `x`"
    if MUTATION in text:
        return f"{operator[1]}: {WRITES}, which torch refuses", WRITES_FIX
    if unlike := UNLIKE.search(text):
        kind, actual, wanted = [re.sub(r"torch\.(?:Size\((.*)\))?", r"\1", group) for group in unlike.groups()]
        text = f"{operator[1]}: a body gives a tensor of {kind} {actual} for one of {wanted}"
        return text, f"return the same {kind} in every iteration"
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(INTRODUCTION)]
    why = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), lines[0])
    return f"{operator[1]}: torch refuses a body: {why}", "write bodies in tensors alone, as functions of their operands"


def written_operand(module: GraphModule) -> tuple[str, str]:
    """Returns (user's line, operator) of a body that writes to an operand, which torch cannot make functional, else ("", "")."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            for inner in _writes(node, part) if is_conditional(node) else ():
                return place(inner)[0] or place(node)[0], f"torch.{higher_order(node)}"
    return "", ""


def _writes(node: Node, module: GraphModule) -> Iterator[Node]:
    """Yields the operations in a node's bodies that write to an operand, or to a view of one."""
    for body in bodies(node, module):
        for inner in body.graph.nodes:
            if getattr(getattr(inner.target, "_schema", None), "is_mutable", False):
                written = inner
                while written.op == "call_function" and written.args and isinstance(written.args[0], Node) and _shares(written):
                    written = written.args[0]
                if written.op == "placeholder":
                    yield inner


def _shares(node: Node) -> bool:
    """Whether an operator's result may share memory with its first argument, as a view or as the mutated argument itself."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)
