"""The state of Python where a model tests a tensor.  Two paths with equal state, except for tensors, continue in the same way.

The state has the positions of all frames of the model, local variables that are read later, and attributes of the modules.  An
object that cannot be compared (a generator, a C object) is never equal.  The value stack of a frame, and the state of a C function
that tests tensors (`max`, `sorted`), are not visible.  Such states are never equal.
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Hashable
from functools import cache, partial
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ..user_code import is_ours
from .attributes import own_attributes
from .bytecode import kept
from .way import Spot

TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
LAYERS = os.path.join(TORCH, "nn", "modules") + os.sep
"""Folder of torch whose frames have state of the model: `Sequential.forward` and similar methods."""

MOST, DEEPEST = 20_000, 12
"""Maximum number of values, and of nested containers, that are compared."""

PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, slice, range)
ITERATORS = tuple(
    [*map(type, map(iter, ([], (), "", range(0), {}, {}.items(), {}.values(), set()))), enumerate, zip, reversed, map]
)
"""Iterators whose `__reduce__` returns their position without side effects."""


def model_frames(entry: CodeType) -> list[FrameType]:
    """Returns the running frames of the model, the outermost first.  `entry` is the code of the frame that called the model."""
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
    return not is_ours(full) and not full.startswith(TORCH) and os.path.basename(full) != "contextlib.py"


def spot_of(frames: list[FrameType]) -> Spot:
    """Returns the position of these frames."""
    return tuple([(frame.f_code, frame.f_lasti) for frame in frames])


class PythonState:
    """The state of the frames and the model.  `value` is the state without tensors.  `tensors` are by their place in the state;
    `memory` says which of them share memory.  `sizes` are the symbolic integers in the state and in shapes."""

    def __init__(self, frames: list[FrameType], model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], by_itself: bool) -> None:
        """`by_itself`: the test is an instruction of Python, not a function call."""
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.sizes: list[torch.SymInt] = []
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []
        parts: list[Any] = []
        for number, frame in enumerate(frames):
            frame_state = kept(frame.f_code, frame.f_lasti)
            if frame_state is None or frame_state.hidden or (number == len(frames) - 1 and by_itself and not frame_state.tests):
                parts.append(object())
            for name, value in sorted(frame.f_locals.items()):
                if frame_state is None or name in frame_state.live:
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
            self.sizes += [size for size in value.shape if isinstance(size, torch.SymInt)]
            return path, type(value).__name__, value.dtype, str(tuple(value.shape)), str(value.stride()) if _strided(value) else ""
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            self.sizes += [value] if isinstance(value, torch.SymInt) else []
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
            return kind, tuple([self._part(item, f"{path}[{at}]", depth) for at, item in enumerate(value)])
        if isinstance(value, dict):
            items = [(self._part(key, path, depth), self._part(item, f"{path}[{key!r}]", depth)) for key, item in value.items()]
            return kind, tuple(items)
        if isinstance(value, set | frozenset):
            return kind, frozenset([self._part(item, path, depth) for item in value])
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
            attributes = [(name, self._part(item, f"{path}.{name}", depth)) for name, item in vars(value).items()]
            return id(type(value)), tuple(attributes)
        return object()

    def _cell(self, cell: Any, path: str, depth: int) -> Hashable:
        try:
            return self._part(cell.cell_contents, path, depth)
        except ValueError:
            return "empty"


def _strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided
