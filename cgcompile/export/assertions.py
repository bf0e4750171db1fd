"""What an exported program asserts, and the numbers that Python read: said with the model's line, and in a form that torch can
load, trace and compile again.  Private interface (torch 2.11, 2.13): `cast_symbool_to_symint_guardless`."""

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
"""torch (2.11, 2.13) says so of the one with a message alone, and drops this one from branches that it traces."""

NUMBER_CHECKS = (torch.ops.aten._assert_scalar.default, torch.ops.aten.sym_constrain_range.default)
"""Assertions about numbers; `sym_constrain_range_for_size` is of numbers that have no one value."""


def settle_assertions(program: ExportedProgram) -> None:
    """Changes the program in place."""
    _drop_ranges_of_floats(program)
    _name_assertions(program)
    spell_conditions(program.graph_module)
    _use_asserted_numbers(program)
    _drop_unread_numbers(program)


def _use_asserted_numbers(program: ExportedProgram) -> None:
    """A number that Python read and that an assertion gives one value, and what follows from it, are constants to all but numbers
    and assertions: `torch._check(2 * n == 40)`.  So these go to the host with the reading, and the rest stays where it is."""
    known: dict[torch.fx.Node, int | float] = {}
    for node in list(program.graph.nodes):
        value, follows = node.meta.get("val"), not known.keys().isdisjoint(node.all_input_nodes)
        read = node.target is torch.ops.aten.item.default or follows
        if node.op == "call_function" and isinstance(value, int | float) and read:
            known[node] = value
        elif node.op == "call_function" and follows and node.target not in NUMBER_CHECKS:
            node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda arg: known.get(arg, arg))
    for node in reversed(known):
        if not node.users:
            program.graph.erase_node(node)
    program.graph_module.recompile()


def _drop_unread_numbers(program: ExportedProgram) -> None:
    """Numbers that Python read out of tensors of known value are constants of the trace; torch (2.11, 2.13) cannot load a program
    again that still has the reading, which nothing uses."""
    for node in list(program.graph.nodes):
        if node.target is torch.ops.aten.item.default and not node.users:
            program.graph.erase_node(node)


def _drop_ranges_of_floats(program: ExportedProgram) -> None:
    """torch (2.11, 2.13) cannot write a program that knows the one value of a float: `torch._check(loss.item() == 0.5)`.  The
    program's own assertions say the same."""
    for symbol in [symbol for symbol in program.range_constraints if not symbol.is_integer]:
        del program.range_constraints[symbol]


def _name_assertions(program: ExportedProgram) -> None:
    """What an assertion about a tensor says begins with its line.  Without a message Inductor (2.11, 2.13) makes nothing of it."""
    aten = torch.ops.aten
    for module in [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]:
        for target in (aten._assert_async.default, aten._assert_async.msg):
            for node in module.graph.find_nodes(op="call_function", target=target):
                message = str(node.args[1]) if len(node.args) > 1 else ""
                node.args = (node.args[0], spelled(message) if ASSERTS in message else asserted([node], message))
                node.target = aten._assert_async.msg
        module.recompile()


def asserted(nodes: Sequence[Node], message: str = "") -> str:
    """What the failure of one of these assertions says: `model.py:12: an assertion of the model failed: torch._check(n > 3)`."""
    places = dict([place(node) for node in nodes])
    where = " or ".join(places) or "model"
    what = message or next((line for line in places.values() if line), "") or "torch._assert_async"
    return spelled(f"{where}: {ASSERTS}: {what}")


def spelled(text: str) -> str:
    """The text of an assertion as a program may hold it.  Inductor writes it into C++ between quotes: it has no quotes, backslashes
    or line breaks.  A kernel of torch's takes fewer than 255 bytes (MAX_MSG_LENGTH in ATen/native/cuda/TensorCompare.cu), else the
    model fails."""
    return re.sub("[^ -~]", "?", re.sub(r"\s+", " ", text.replace('"', "'").replace("\\", "/")))[:SAID]


SAID = 240
"""Characters of what a failed assertion says."""


def spell_conditions(module: torch.fx.GraphModule) -> None:
    """Changes a graph in place, after every new trace.  torch 2.11 writes an assertion about a condition
    (torch._check_tensor_all) as comparisons of a number made of it, which it cannot trace again: those with 1 become the condition
    itself."""
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
