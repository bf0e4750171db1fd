"""Runs Inductor's Python wrapper with objects that replace tensors and kernels, and records its operations.  The tensors of one
buffer share a handle.  When the last of them is deleted, Python deletes the handle, which releases the buffer.  Therefore reuse,
views and in-place kernels need no special rules.  The wrapper may use the names in `_namespace` (torch 2.11, 2.13)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from cgbundle.format.schema import IntKey

from ...errors import BuildError, ModelError
from ...targets.collectives.exchange_nodes import MULTIPLE, output_shape, transfer
from ..collectives import NAME
from ..lowered import (
    INPUT,
    TEMPORARY,
    Allocate,
    Buffer,
    BufferView,
    Copy,
    Event,
    Exchange,
    Fill,
    KernelVariant,
    Launch,
    Lowered,
    Pointer,
    Release,
)  # fmt: skip
from .fake_device import KernelSource
from .variants import WrapperKernel

Load = Callable[[KernelSource], WrapperKernel]


def record_calls(
    key: IntKey, wrapper: str, tensors: Sequence[torch.Tensor], names: Sequence[tuple[str, str]], load: Load
) -> tuple[Lowered, tuple[str, ...]]:
    """Runs the wrapper's `call` for `tensors`, whose kinds and names are `names`.  Returns its operations, and the names of called
    functions that are no Triton kernels.  Raises constant-unknown, lowering-broken."""
    log = _Log(load=load)
    wrapper_tensors = [log.argument_tensor(kind, name, tensor) for (kind, name), tensor in zip(names, tensors, strict=True)]
    inputs = {int(name): value.tensor() for (kind, name), value in zip(names, wrapper_tensors, strict=True) if kind == INPUT}
    results = _namespace(wrapper, log)["call"](list(wrapper_tensors))
    outputs = tuple([value.tensor() for value in results if isinstance(value, WrapperTensor)])
    if len(outputs) != len(results) and not log.unknown:
        raise BuildError("lowering-broken", f"the wrapper returned {[type(value).__name__ for value in results]}, expected tensors")
    lowered = Lowered(
        key=key,
        buffers=tuple(log.buffers),
        variants=tuple(log.variants),
        events=tuple(log.events),  # before `results` are deleted, so that outputs live to the end
        inputs=tuple([inputs[number] for number in range(len(inputs))]),
        outputs=outputs,
    )
    return lowered, tuple(dict.fromkeys(log.unknown))


# --- tensors ------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Handle:
    """A buffer in use.  `dropped` is called with its position when nothing refers to the handle."""

    buffer: int
    dropped: Callable[[int], None]

    def __del__(self) -> None:
        self.dropped(self.buffer)


@dataclass(eq=False, slots=True)
class WrapperTensor:
    """A tensor of the wrapper: `offset` in bytes, `strides` in elements."""

    log: _Log
    handle: _Handle
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> BufferView:
        name = str(self.dtype).removeprefix("torch.")
        return BufferView(pointer=self.pointer(), dtype=name, shape=self.shape, strides=self.strides)

    def pointer(self) -> Pointer:
        return Pointer(buffer=self.handle.buffer, offset=self.offset)

    def view(self, shape: Sequence[int], strides: Sequence[int], offset: int) -> WrapperTensor:
        """A tensor in the same memory with another layout, `offset` elements after this one."""
        return WrapperTensor(
            self.log, self.handle, self.offset + offset * self.dtype.itemsize, tuple(shape), tuple(strides), self.dtype
        )

    def span(self) -> int:
        """Number of bytes from the first to the last element."""
        return span(self.shape, self.strides) * self.dtype.itemsize

    def zero_(self) -> WrapperTensor:
        """Sets all bytes to zero.  Inductor calls it for workspaces."""
        self._dense("clears")
        self.log.events.append(Fill(target=self.pointer(), value=0, element=1, count=self.span()))
        return self

    def copy_(self, source: Any, non_blocking: bool = False) -> WrapperTensor:
        """Copies from a tensor of equal layout and dtype."""
        layout = self.shape, self.strides, self.dtype
        if not isinstance(source, WrapperTensor) or (source.shape, source.strides, source.dtype) != layout:
            text = f"the wrapper copies between different layouts: {source} to {self.shape}, {self.strides}"
            raise BuildError("lowering-broken", text)
        self._dense("copies")
        self.log.events.append(Copy(source=source.pointer(), target=self.pointer(), nbytes=self.span()))
        return self

    def _dense(self, verb: str) -> None:
        if span(self.shape, self.strides) != math.prod(self.shape):
            raise BuildError("lowering-broken", f"the wrapper {verb} a tensor with gaps: {self.shape}, strides {self.strides}")

    def __getattr__(self, name: str) -> Any:
        raise BuildError("lowering-broken", f"the wrapper uses a tensor's {name!r}")


class UnknownCall:
    """A function that is no Triton kernel, or its result.  It can be used as a tensor, so that the run finds all such calls."""

    def __init__(self, log: _Log, name: str) -> None:
        self._log = log
        self._name = name

    def __getattr__(self, name: str) -> UnknownCall:
        if name.startswith("__"):
            raise AttributeError(name)
        return UnknownCall(self._log, f"{self._name}.{name}")

    def __getitem__(self, index: Any) -> UnknownCall:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> UnknownCall:
        self._log.unknown.append(self._name)
        return UnknownCall(self._log, self._name)


@dataclass(kw_only=True, slots=True)
class _Log:
    """The operations recorded so far."""

    load: Load
    buffers: list[Buffer] = field(default_factory=list)
    variants: list[KernelVariant] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    kernels: dict[tuple[str, str], WrapperKernel] = field(default_factory=dict)

    def argument_tensor(self, kind: str, name: str, tensor: torch.Tensor) -> WrapperTensor:
        """An input or a weight, which is never released."""
        nbytes = span(tensor.shape, tensor.stride()) * tensor.dtype.itemsize
        self.buffers.append(Buffer(kind=kind, name=name, nbytes=nbytes))
        handle = _Handle(len(self.buffers) - 1, lambda buffer: None)
        return WrapperTensor(self, handle, 0, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, multiple: int = 1) -> WrapperTensor:
        """A tensor in a new temporary, whose size is rounded up to a multiple of `multiple` bytes."""
        buffer = len(self.buffers)
        nbytes = -(-span(shape, strides) * dtype.itemsize // multiple) * multiple
        self.buffers.append(Buffer(kind=TEMPORARY, name=f"t{buffer}", nbytes=nbytes))
        self.events.append(Allocate(buffer=buffer))
        handle = _Handle(buffer, lambda index: self.events.append(Release(buffer=index)))
        return WrapperTensor(self, handle, 0, tuple(shape), tuple(strides), dtype)

    def exchange(self, operand: Any, kind: Any, world: int, sender: int, after: Any = None) -> Any:
        """Records a call of `collectives.COLLECTIVE`.  `after` is ignored, because calls are recorded in order.  The kernels send
        multiples of 16 bytes from aligned addresses.  Other tensors are copied to a padded buffer."""
        if isinstance(operand, UnknownCall):
            return operand
        dtype, nbytes = operand.dtype, operand.span()
        if span(operand.shape, operand.strides) != math.prod(operand.shape):
            raise BuildError("lowering-broken", f"{kind} of a tensor with gaps: {operand.shape}, strides {operand.strides}")
        try:
            sent = transfer(kind, operand.tensor().dtype, nbytes, world or 1, sender)
        except ValueError as error:
            raise ModelError("collective-refused", str(error)) from None
        parts = world if kind == "all_gather" else 1
        shape = output_shape(kind, operand.shape, world)
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        target = output = self.empty(shape, strides, dtype, MULTIPLE)
        padded = nbytes % MULTIPLE
        if padded or operand.offset % MULTIPLE:
            aligned = self.empty(operand.shape, operand.strides, dtype, MULTIPLE)
            self.events.append(Copy(source=operand.pointer(), target=aligned.pointer(), nbytes=nbytes))
            operand = aligned
        if padded and parts > 1:
            target = self.empty((sent.size * parts,), (1,), torch.uint8)
        if nbytes:
            self.events.append(
                Exchange(
                    kind=kind,
                    dtype=operand.tensor().dtype,
                    nbytes=nbytes,
                    sender=sender,
                    source=operand.pointer(),
                    target=target.pointer(),
                )
            )
        for part in range(parts if target is not output else 0):
            source, place = [replace(view.pointer(), offset=part * size) for view, size in ((target, sent.size), (output, nbytes))]
            self.events.append(Copy(source=source, target=place, nbytes=nbytes))
        return output

    def launch(self, source: KernelSource, *arguments: Any, stream: Any = 0, **others: Any) -> None:
        if others:
            raise BuildError("lowering-broken", f"kernel {source.name}: called with {sorted(others)}")
        if any(isinstance(value, UnknownCall) for value in arguments):
            return  # the build refuses a program with unknown calls
        key = (source.name, source.text)
        if key not in self.kernels:
            self.kernels[key] = self.load(source)
        kernel = self.kernels[key]
        if len(arguments) != len(kernel.parameters):
            text = f"called with {len(arguments)} arguments, takes {kernel.parameters}"
            raise BuildError("lowering-broken", f"kernel {source.name}: {text}")
        values = dict(zip(kernel.parameters, arguments, strict=True))
        _check_strides(kernel.variant, values)
        grid = kernel.grid({name: value for name, value in values.items() if not isinstance(value, WrapperTensor)})
        passed = [
            _argument(source.name, name, kind, values[name]) for name, kind in kernel.variant.signature if kind != "constexpr"
        ]
        if kernel.variant not in self.variants:
            self.variants.append(kernel.variant)
        variant = self.variants.index(kernel.variant)
        if min(grid) > 0:
            self.events.append(Launch(variant=variant, grid=(int(grid[0]), int(grid[1]), int(grid[2])), arguments=tuple(passed)))


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Number of elements from the first to the last element of a tensor in memory."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 if math.prod(shape) else 0


def _argument(kernel: str, name: str, kind: str, value: Any) -> Pointer | int | float:
    what = f"kernel {kernel}: argument {name}"
    if kind.startswith("*"):
        if not isinstance(value, WrapperTensor):
            raise ModelError("constant-unknown", f"{what} is {type(value).__name__}, a constant tensor that Inductor added")
        return value.pointer()
    if not isinstance(value, int | float):
        raise BuildError("lowering-broken", f"{what} of type {kind} is {type(value).__name__}")
    return value


def _check_strides(variant: KernelVariant, values: Mapping[str, Any]) -> None:
    """Checks that Inductor did not change strides that are constants TENSOR_stride_AXIS of a kernel of cgcompile."""
    for name, stride in variant.constants:
        tensor, infix, axis = name.rpartition("_stride_")
        value = values.get(tensor)
        if infix and isinstance(value, WrapperTensor) and value.shape[int(axis)] > 1 and value.strides[int(axis)] != stride:
            text = f"{tensor} has strides {value.strides}, {stride} was expected for axis {axis}"
            raise BuildError("lowering-broken", f"kernel {variant.name}: {text}")


# --- the wrapper's names --------------------------------------------------------------------------------------


def _namespace(wrapper: str, log: _Log) -> dict[str, Any]:
    """Executes the wrapper's module; returns its names, with replaced imports."""
    scope: dict[str, Any] = {"__name__": "wrapper"}
    exec(compile(wrapper, "<wrapper>", "exec"), scope)
    for name, value in list(scope.items()):
        if isinstance(value, KernelSource):
            scope[name] = SimpleNamespace(run=partial(log.launch, value))
    cuda = SimpleNamespace(_DeviceGuard=lambda index: contextlib.nullcontext(), set_device=lambda index: None)
    scope |= {
        "empty_strided_cuda": log.empty,
        "empty_strided_cpu": UnknownCall(log, "tensors on the CPU"),
        "reinterpret_tensor": lambda tensor, shape, strides, offset=0: (
            tensor if isinstance(tensor, UnknownCall) else tensor.view(shape, strides, offset)
        ),
        "assert_size_stride": lambda *_: None,
        "assert_alignment": lambda *_: None,
        "copy_if_misaligned": lambda tensor: tensor,
        "get_raw_stream": lambda index: 0,
        "extern_kernels": UnknownCall(log, "extern_kernels"),
        "aten": UnknownCall(log, "aten"),
        "inductor_ops": UnknownCall(log, "inductor_ops"),
        "torch": _Torch(log, cuda),
    }
    return scope


class _Torch:
    """`torch` for the wrapper.  dtypes and devices are real, the device guard does nothing, other calls are recorded as unknown."""

    def __init__(self, log: _Log, cuda: Any) -> None:
        self._log = log
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        if name == "ops":
            return _Operators(self._log)
        real = getattr(torch, name)
        return real if isinstance(real, torch.dtype) or name == "device" else UnknownCall(self._log, f"torch.{name}")


class _Operators:
    """`torch.ops` for the wrapper.  Calls of `collectives.COLLECTIVE` are recorded; all other operators are unknown."""

    def __init__(self, log: _Log) -> None:
        self._log = log
        self.cgcompile = SimpleNamespace(**{NAME: SimpleNamespace(default=log.exchange)})

    def __getattr__(self, name: str) -> Any:
        return UnknownCall(self._log, f"torch.ops.{name}")
