"""What Python keeps where a model asks a question: two ways that keep the same, but for tensors, go on in the same way.

Compared are the positions of all frames of the model, the local variables that are still read afterwards, and the attributes of
the modules.  What cannot be compared (a generator, an object of C) is equal to nothing.  Values on a frame's stack cannot be seen:
`export/paths` checks what the rest of a way uses.

Private interface: `dis._parse_exception_table` (Python 3.11 to 3.14).  Without it all local variables count as read.
"""

from __future__ import annotations

import dis
import enum
import os
import sys
from collections.abc import Callable, Hashable, Iterator
from functools import cache, partial
from itertools import pairwise
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ..tracing.attributes import own_attributes
from ..user_code import OURS
from .way import Spot

TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
LAYERS = os.path.join(TORCH, "nn", "modules") + os.sep
"""Folder of torch whose frames have a state of the model: `Sequential.forward` and its like."""

MOST, DEEPEST = 20_000, 12
"""Values, and levels of containers, that are compared."""

PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, slice, range)
ITERATORS = tuple(
    [*map(type, map(iter, ([], (), "", range(0), {}, {}.items(), {}.values(), set()))), enumerate, zip, reversed, map]
)
"""Iterators whose `__reduce__` says where they are and changes nothing."""


def model_frames(entry: CodeType) -> list[FrameType]:
    """The frames of the model that run now, the outermost first; `entry` is the code of the frame that called it."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not entry:
        if _of_model(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


@cache
def _of_model(file: str) -> bool:
    full = os.path.abspath(file)
    if full.startswith(LAYERS):
        return not full.endswith("module.py")
    return not full.startswith((OURS, TORCH)) and os.path.basename(full) != "contextlib.py"


def spot_of(frames: list[FrameType]) -> Spot:
    """The position of these frames."""
    return tuple([(frame.f_code, frame.f_lasti) for frame in frames])


class PythonState:
    """What the frames and the model keep: `value` without tensors, `tensors` by where Python keeps them, and which of these share
    memory."""

    def __init__(self, frames: list[FrameType], model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []
        parts: list[Any] = []
        for number, frame in enumerate(frames):
            read = live_after(frame.f_code, frame.f_lasti)
            for name, value in sorted(frame.f_locals.items()):
                if read is None or name in read:
                    parts.append((number, name, self._part(value, f"{number}.{name}", 0)))
        for name, value in own_attributes(model).items():
            parts.append((name, self._part(value, f"self.{name}", 0)))
        self.tensors += [(f"buffer.{name}", buffer) for name, buffer in model.named_buffers()]
        self.tensors += [(f"input.{number}", tensor) for number, tensor in enumerate(inputs)]
        self.value: Hashable = (spot_of(frames), tuple(parts))
        numbers: dict[int, int] = {}
        self.memory: Hashable = tuple(
            [numbers.setdefault(tensor.untyped_storage()._cdata, len(numbers)) for _, tensor in self.tensors]
        )

    def _part(self, value: Any, path: str, depth: int) -> Hashable:
        if isinstance(value, torch.Tensor):
            self.tensors.append((path, value))
            return path, type(value).__name__, value.dtype, str(tuple(value.shape)), str(value.stride()) if _strided(value) else ""
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return "symbol", str(value)
        if isinstance(value, PLAIN):
            return type(value).__name__, repr(value)
        if isinstance(value, torch.nn.Module | type | ModuleType | BuiltinFunctionType | CodeType | enum.Enum):
            return "object", id(value)
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        if depth > DEEPEST or len(self._seen) > MOST:
            return object()
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return self._inside(value, path, depth + 1)

    def _inside(self, value: Any, path: str, depth: int) -> Hashable:
        kind = type(value).__qualname__
        if isinstance(value, list | tuple):
            return kind, tuple([self._part(each, f"{path}[{at}]", depth) for at, each in enumerate(value)])
        if isinstance(value, dict):
            items = [(self._part(key, path, depth), self._part(each, f"{path}[{key!r}]", depth)) for key, each in value.items()]
            return kind, tuple(items)
        if isinstance(value, set | frozenset):
            return kind, frozenset([self._part(each, path, depth) for each in value])
        if isinstance(value, FunctionType):
            cells = [self._cell(cell, f"{path}.{at}", depth) for at, cell in enumerate(value.__closure__ or ())]
            return kind, value.__code__, tuple(cells), self._part(value.__defaults__, f"{path}.defaults", depth)
        if isinstance(value, MethodType):
            return kind, id(value.__func__), self._part(value.__self__, f"{path}.self", depth)
        if isinstance(value, partial):
            return kind, self._part((value.func, value.args, value.keywords), path, depth)
        if isinstance(value, ITERATORS):
            return kind, self._part(value.__reduce__()[1:], path, depth)
        if hasattr(value, "__dict__") and not hasattr(type(value), "__slots__"):
            own = [(name, self._part(each, f"{path}.{name}", depth)) for name, each in vars(value).items()]
            return id(type(value)), tuple(own)
        return object()

    def _cell(self, cell: Any, path: str, depth: int) -> Hashable:
        try:
            return self._part(cell.cell_contents, path, depth)
        except ValueError:
            return "empty"


def _strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


@cache
def _live(code: CodeType) -> dict[int, frozenset[str]] | None:
    """Of every instruction the local variables that may be read after it; None where that cannot be told."""
    parse: Callable[[CodeType], list[Any]] | None = getattr(dis, "_parse_exception_table", None)
    if parse is None:
        return None
    instructions = list(dis.get_instructions(code))
    at = {each.offset: index for index, each in enumerate(instructions)}
    always = frozenset(code.co_cellvars + code.co_freevars)
    handlers = [(entry.start, entry.end, entry.target) for entry in parse(code)]
    following: list[list[int]] = []
    for index, each in enumerate(instructions):
        after = [index + 1] if index + 1 < len(instructions) and not _ends(each.opname) else []
        if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            after.append(at[each.argval])
        after += [at[target] for start, end, target in handlers if start <= each.offset < end]
        following.append(after)
    before: list[frozenset[str]] = [frozenset()] * len(instructions)
    result: list[frozenset[str]] = [always] * len(instructions)
    changed = True
    while changed:
        changed = False
        for index in reversed(range(len(instructions))):
            out = always.union(*[before[each] for each in following[index]])
            reads, writes = _locals(instructions[index])
            new = (out - writes) | reads
            changed = changed or new != before[index] or out != result[index]
            before[index], result[index] = new, out
    return {each.offset: result[index] for index, each in enumerate(instructions)}


def _ends(name: str) -> bool:
    """Whether an instruction never goes on to the next one."""
    return name.startswith(("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE"))


def _locals(instruction: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """The local variables that an instruction reads, and those that it writes."""
    kinds = list(_kinds(instruction.opname))
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    if not kinds:
        return frozenset(), frozenset()
    pairs = list(zip(kinds, names, strict=False))
    written = {name for kind, name in pairs if kind == "STORE"}
    if kinds[:1] == ["STORE"] and kinds[1:] == ["LOAD"]:
        return frozenset([name for kind, name in pairs if kind == "LOAD"]) - written, frozenset(written)
    return frozenset([name for kind, name in pairs if kind in ("LOAD", "DELETE")]), frozenset(written)


def _kinds(name: str) -> Iterator[str]:
    """ "LOAD", "STORE" or "DELETE" for each local variable of an instruction: LOAD_FAST, STORE_FAST_LOAD_FAST, ..."""
    parts = name.split("_")
    for first, second in pairwise(parts):
        if second == "FAST" and first in ("LOAD", "STORE", "DELETE"):
            yield first


def live_after(code: CodeType, offset: int) -> frozenset[str] | None:
    """The local variables that may be read after an instruction; None: any."""
    found = _live(code)
    return None if found is None else found.get(offset)
