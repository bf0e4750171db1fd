"""Rewrites assertions of an exported program, and numbers that Python read from tensors.  Then torch can load, trace and compile
the program again.  An assertion's message has the model's source line.

Private interface (torch 2.11, 2.13): `cast_symbool_to_symint_guardless`."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import cast_symbool_to_symint_guardless
from torch.fx.node import map_arg

from cgbundle.cpu.host_region import ASSERTS

from ..model.user_code import place

torch.fx.node.has_side_effect(torch.ops.aten._assert_async.default)
"""torch (2.11, 2.13) marks only the overload with a message, and removes this overload as dead code from branches that it
traces."""

NUMBER_CHECKS = (torch.ops.aten._assert_scalar.default, torch.ops.aten.sym_constrain_range.default)
"""Assertions about numbers.  `sym_constrain_range_for_size` is missing because its numbers never have a single value."""


def settle_assertions(program: ExportedProgram) -> None:
    """Applies all rewrites of this module to a program, in place."""
    _drop_ranges_of_floats(program)
    _name_assertions(program)
    spell_conditions(program.graph_module)
    _use_asserted_numbers(program)
    _drop_unread_numbers(program)


def _use_asserted_numbers(program: ExportedProgram) -> None:
    """Replaces a number, and numbers computed from it, by constants if an assertion allows only one value, as in
    `torch._check(2 * n == 40)`.  Assertions still use the number itself, so only they and its read run on the host."""
    constants: dict[torch.fx.Node, int | float] = {}
    for node in list(program.graph.nodes):
        value, follows = node.meta.get("val"), not constants.keys().isdisjoint(node.all_input_nodes)
        read = node.target is torch.ops.aten.item.default or follows
        if node.op == "call_function" and isinstance(value, int | float) and read:
            constants[node] = value
        elif node.op == "call_function" and follows and node.target not in NUMBER_CHECKS:
            node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda arg: constants.get(arg, arg))
    for node in reversed(constants):
        if not node.users:
            program.graph.erase_node(node)
    program.graph_module.recompile()


def _drop_unread_numbers(program: ExportedProgram) -> None:
    """Removes `aten.item` nodes without users: the trace has their numbers as constants.  torch (2.11, 2.13) cannot load a saved
    program that still has such a node."""
    for node in list(program.graph.nodes):
        if node.target is torch.ops.aten.item.default and not node.users:
            program.graph.erase_node(node)


def _drop_ranges_of_floats(program: ExportedProgram) -> None:
    """Removes range constraints of float symbols, as from `torch._check(loss.item() == 0.5)`: torch (2.11, 2.13) cannot save them.
    The program's assertions still check the values."""
    for symbol in [symbol for symbol in program.range_constraints if not symbol.is_integer]:
        del program.range_constraints[symbol]


def _name_assertions(program: ExportedProgram) -> None:
    """Gives every assertion about a tensor a message with its line.  Inductor (2.11, 2.13) drops assertions without a message."""
    aten = torch.ops.aten
    for module in [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]:
        for target in (aten._assert_async.default, aten._assert_async.msg):
            for node in module.graph.find_nodes(op="call_function", target=target):
                message = str(node.args[1]) if len(node.args) > 1 else ""
                node.args = (node.args[0], spelled(message) if ASSERTS in message else asserted([node], message))
                node.target = aten._assert_async.msg
        module.recompile()


def asserted(nodes: Sequence[Node], message: str = "") -> str:
    """Returns the message of these assertions: `model.py:12: an assertion of the model failed: torch._check(n > 3)`."""
    places = dict([place(node) for node in nodes])
    where = " or ".join(places) or "model"
    reason = message or next((line for line in places.values() if line), "") or "torch._assert_async"
    return spelled(f"{where}: {ASSERTS}: {reason}")


def spelled(text: str) -> str:
    """Replaces characters that a message may not contain, and cuts the message to SAID characters.  Inductor writes it into a C++
    string literal without escaping quotes, backslashes or line breaks.  torch's CUDA kernel fails for 255 bytes or more
    (MAX_MSG_LENGTH in ATen/native/cuda/TensorCompare.cu)."""
    return re.sub("[^ -~]", "?", re.sub(r"\s+", " ", text.replace('"', "'").replace("\\", "/")))[:SAID]


SAID = 240
"""Maximum number of characters in an assertion's message."""


def spell_conditions(module: torch.fx.GraphModule) -> None:
    """Replaces `int(condition) == 1`, `>= 1` and (in assertions) `<= 1` by `condition`, in place.  torch 2.11 writes assertions of
    torch._check_tensor_all in this form, and cannot trace the form again.  Call this function after every new trace."""
    for node in list(module.graph.nodes):
        if node.target is cast_symbool_to_symint_guardless:
            (condition,) = node.args
            for user in list(node.users):
                asserts = all(consumer.target is torch.ops.aten._assert_scalar.default for consumer in user.users)
                if user.args == (node, 1) and (
                    user.target in (operator.eq, operator.ge) or (user.target is operator.le and asserts)
                ):
                    user.replace_all_uses_with(condition)
                    module.graph.erase_node(user)
            if not node.users:
                module.graph.erase_node(node)
    module.recompile()
