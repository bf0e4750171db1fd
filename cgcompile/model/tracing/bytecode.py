"""The state of a Python frame at an instruction: live local variables, and values on its stack.

Private interface: `dis._parse_exception_table` (Python 3.11 to 3.14).  Without it the state is unknown.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import CodeType
from typing import Any

TESTS = ("POP_JUMP", "JUMP_IF", "UNARY_NOT", "TO_BOOL")
"""Prefixes of instructions that test the truth value of an object."""

LOADS = ("LOAD_", "PUSH_NULL", "KW_NAMES", "NOP", "CACHE", "EXTENDED_ARG", "RESUME")
"""Prefixes of instructions that compute nothing."""

APPENDS = ("LIST_APPEND", "SET_ADD", "MAP_ADD")
"""Instructions of comprehensions, which keep their partial result on the stack."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """`live`: the local variables that may be read after the instruction.  `hidden`: the stack has other values than the
    instruction's operands, iterators of enclosing loops, and loaded local variables.  `tests`: the instruction tests a truth
    value."""

    live: frozenset[str]
    hidden: bool
    tests: bool


def kept(code: CodeType, offset: int) -> Kept | None:
    """Returns the state of a frame at an instruction, or None if unknown."""
    table = _table(code)
    return None if table is None else table.get(offset)


@cache
def _table(code: CodeType) -> dict[int, Kept] | None:
    parse: Callable[[CodeType], list[Any]] | None = getattr(dis, "_parse_exception_table", None)
    if parse is None:
        return None
    instructions = list(dis.get_instructions(code))
    at = {instruction.offset: index for index, instruction in enumerate(instructions)}
    handlers = [(entry.start, entry.end, at[entry.target], entry.depth + 1 + entry.lasti) for entry in parse(code)]
    following = [_following(index, instructions, at) for index in range(len(instructions))]
    live = _live(code, instructions, following, handlers)
    depths = _depths(instructions, following, handlers)
    table = {}
    for index, instruction in enumerate(instructions):
        loaded = _loaded(index, instructions, depths, _iterators(index, instructions, handlers))
        table[instruction.offset] = Kept(
            live=live[index] | (loaded or frozenset()), hidden=loaded is None, tests=instruction.opname.startswith(TESTS)
        )
    return table


def _following(index: int, instructions: Sequence[dis.Instruction], at: dict[int, int]) -> list[int]:
    """Returns the indices of the instructions that may run next, the target of a jump last."""
    instruction = instructions[index]
    after = [index + 1] if index + 1 < len(instructions) and not _ends(instruction.opname) else []
    return [*after, at[instruction.argval]] if _jumps(instruction) else after


def _jumps(instruction: dis.Instruction) -> bool:
    return instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs


def _ends(name: str) -> bool:
    """Returns whether an instruction never continues with the next one."""
    return name.startswith(("RETURN_VALUE", "RETURN_CONST", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE"))


Handlers = Sequence[tuple[int, int, int, int]]
"""Exception handlers: first and last offset, the handler's instruction, and the stack depth there."""


def _live(
    code: CodeType, instructions: Sequence[dis.Instruction], following: Sequence[Sequence[int]], handlers: Handlers
) -> list[frozenset[str]]:
    always = frozenset(code.co_cellvars + code.co_freevars)
    before: list[frozenset[str]] = [frozenset()] * len(instructions)
    result: list[frozenset[str]] = [always] * len(instructions)
    changed = True
    while changed:
        changed = False
        for index in reversed(range(len(instructions))):
            offset = instructions[index].offset
            after = [*following[index], *[target for start, end, target, _ in handlers if start <= offset < end]]
            out = always.union(*[before[place] for place in after])
            reads, writes = _locals(instructions[index])
            new = (out - writes) | reads
            changed = changed or new != before[index] or out != result[index]
            before[index], result[index] = new, out
    return result


def _depths(instructions: Sequence[dis.Instruction], following: Sequence[Sequence[int]], handlers: Handlers) -> list[int | None]:
    """Returns the stack depth after each instruction if it does not jump; None for unreachable instructions."""
    before: dict[int, int] = {0: 0} | {target: depth for _, _, target, depth in handlers}
    after: list[int | None] = [None] * len(instructions)
    pending = list(before)
    while pending:
        index = pending.pop()
        instruction = instructions[index]
        argument = instruction.arg if instruction.opcode >= dis.HAVE_ARGUMENT else None
        after[index] = before[index] + dis.stack_effect(instruction.opcode, argument, jump=False)
        for target in following[index]:
            jump = target != index + 1
            depth = before[index] + dis.stack_effect(instruction.opcode, argument, jump=jump)
            if target not in before:
                before[target] = depth
                pending.append(target)
    return after


def _iterators(index: int, instructions: Sequence[dis.Instruction], handlers: Handlers) -> int | None:
    """Returns the number of iterators of enclosing loops, and of context managers, on the stack.  Returns None in a comprehension,
    which keeps its partial result there."""
    offset = instructions[index].offset
    loops = [loop for loop in instructions if loop.opname == "FOR_ITER" and loop.offset < offset < loop.argval]
    inside = [other.opname for loop in loops for other in instructions if loop.offset < other.offset < loop.argval]
    managers = {
        target
        for start, end, target, _ in handlers
        if start <= offset < end and any(other.opname == "WITH_EXCEPT_START" for other in instructions[target : target + 3])
    }
    return None if any(name in APPENDS for name in inside) else len(loops) + len(managers)


def _loaded(
    index: int, instructions: Sequence[dis.Instruction], depths: Sequence[int | None], bottom: int | None
) -> frozenset[str] | None:
    """Returns the local variables on the stack below the operands of an instruction, such as the function of an enclosing call.
    Returns None if a computed value is there."""
    depth = depths[index]
    if depth is None or bottom is None:
        return None
    top = depth - (0 if instructions[index].opname.startswith(("POP_JUMP", "JUMP_IF")) else 1)
    names: set[str] = set()
    for level in range(bottom, top):
        at = index - 1
        while at >= 0 and depths[at] is not None and (depths[at - 1] or 0 if at else 0) > level:
            if depths[at] == level + 1 and not instructions[at].opname.startswith(LOADS):
                return None
            at -= 1
        if at < 0 or depths[at] is None or not instructions[at].opname.startswith(LOADS):
            return None
        names |= _locals(instructions[at])[0]
    return frozenset(names)


def _locals(instruction: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the local variables that an instruction reads, and those that it writes."""
    kinds = list(_kinds(instruction.opname))
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    pairs = list(zip(kinds, names, strict=False))
    written = frozenset([name for kind, name in pairs if kind == "STORE"])
    read = frozenset([name for kind, name in pairs if kind in ("LOAD", "DELETE")])
    return (read - written if kinds[:1] == ["STORE"] else read), written


def _kinds(name: str) -> Iterator[str]:
    """Yields "LOAD", "STORE" or "DELETE" for each local variable of an instruction: LOAD_FAST, STORE_FAST_LOAD_FAST, ..."""
    for first, second in pairwise(name.split("_")):
        if second == "FAST" and first in ("LOAD", "STORE", "DELETE"):
            yield first
