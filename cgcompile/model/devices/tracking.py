"""Tracks the devices of tensors in the user's code.  A mode gives each tensor a virtual device, while the model runs on one real
device.

A model is exported on one device, the CPU or the GPU of the build.  An explicit move (`.cpu()`, `.cuda()`, `.to(device)`,
`device=`) would disappear from the graph, or break it.  `DeviceTracking` returns `tensor.device` as if the tensors were on the
devices of the bundle, and follows the moves.  It adds a marker operator to the graph for each move (markers.py).

Private interfaces (torch 2.11, 2.13): `FakeTensor.device`, `torch.overrides._get_current_function_mode_stack`, `get_proxy_mode`
(None while torch runs an operation that it traces), `torch.autocast.__init__`.  While the model runs, `FakeTensor.device` is
replaced, because this Python property calls no mode.  If the CPU runs in place of a GPU, these are replaced too: autocast (for cuda
it has no effect on the CPU), `torch.cuda.get_device_capability` (returns the bundle's GPU),
`torch.cuda.is_current_stream_capturing` (missing in torch for the CPU), and `torch.backends.cudnn.is_acceptable`
(`flatten_parameters()` of recurrent layers would start CUDA).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..side_effects import NOTHING, Asserted, SideEffects
from ..tracing.conversion_calls import conversion_calls
from ..tracing.one_hot import OpenOneHots
from ..tracing.way import ForcedWay, TracedWay
from . import moves
from .data_reads import BRANCHES, NUMBERS, SIZES, DataReads
from .known_values import KnownValues, is_known
from .masks import MASKED, with_masks
from .operations import chunk, data, deepcopied, histogram, lstm, operate, pack_sequence, pad_sequence, recurrent
from .packed_sequences import PackedSequences, layers_of_packed_sequences
from .path_reads import ForcedReads, TracedReads, min_and_max_as_traced, numbers_asked
from .tensor_places import CPU, CUDA, TensorPlaces

_Handler = Callable[[TensorPlaces, Any, list[Any], dict[str, Any]], Any]

_SPECIAL: Mapping[Any, _Handler] = {
    torch.Tensor.to: moves.to,
    torch.Tensor.type_as: moves.to,
    torch.Tensor.cpu: moves.cpu,
    torch.Tensor.cuda: moves.cuda,
    torch.Tensor.pin_memory: moves.pin_memory,
    torch.Tensor.is_pinned: lambda places, func, args, kwargs: False,
    torch.Tensor.device.__get__: lambda places, func, args, kwargs: places.device(args[0], func(*args)),
    torch.Tensor.is_cuda.__get__: lambda places, func, args, kwargs: places.device(args[0], CPU) == CUDA,
    torch.Tensor.is_cpu.__get__: lambda places, func, args, kwargs: places.device(args[0], CPU) == CPU,
    torch.Tensor.get_device: lambda places, func, args, kwargs: 0 if places.device(args[0], CPU) == CUDA else -1,
    torch.get_device: lambda places, func, args, kwargs: 0 if places.device(args[0], CPU) == CUDA else -1,
    torch._VF._pack_padded_sequence: pack_sequence,
    torch._VF._pad_packed_sequence: pad_sequence,
    torch._VF.lstm: lstm,
    torch._VF.gru: recurrent,
    torch._VF.rnn_tanh: recurrent,
    torch._VF.rnn_relu: recurrent,
    torch.Tensor.data.__get__: data,
    torch.Tensor.__deepcopy__: deepcopied,
    torch.chunk: chunk,
    torch.Tensor.chunk: chunk,
    torch.histc: histogram,
    torch.Tensor.histc: histogram,
}
"""Functions with special handling: moves, queries of devices, packed sequences and LSTMs."""


_BRANCHING = frozenset({F.gaussian_nll_loss})
"""Python functions of PyTorch that branch on data.  Any other function is one operation for the mode."""


def _opened(func: Any) -> Any:
    """Copies a function of `torch.nn.functional` without its own dispatch, so that the mode sees the operations inside."""
    names = {**func.__globals__, "has_torch_function_variadic": lambda *values: False}
    function = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    function.__kwdefaults__ = func.__kwdefaults__
    return function


class DeviceTracking(TorchFunctionMode):
    """The mode, which is active during one call of the user's model."""

    def __init__(self, places: TensorPlaces, reads: DataReads, known: KnownValues, packed: PackedSequences) -> None:
        super().__init__()
        self._places, self._reads, self._known, self.packed = places, reads, known, packed
        self._traced = get_proxy_mode() is not None
        self._one_hots = OpenOneHots()

    def knows(self, tensor: torch.Tensor) -> bool:
        """Returns whether the value of a tensor is known."""
        return self._known.has(tensor)

    def within_torch(self) -> bool:
        """Returns whether torch runs an operation that it traces.  torch.Tensor([...]) and torch.FloatTensor([...]) call no mode
        themselves, but the operations inside would."""
        return self._traced and get_proxy_mode() is None

    def _truth(self, tensor: torch.Tensor) -> Any:
        return self.__torch_function__(torch.Tensor.bool, (), [tensor])

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))  # branches of torch.cond are traced without the mode
        if self.within_torch():
            return func(*args, **(kwargs or {}))
        operands, named = list(args), dict(kwargs or {})
        if func in _BRANCHING:
            with self:
                return _opened(func)(*operands, **named)
        if self.packed.concern(func, operands, named):
            with self.packed.paused(), self:
                results = self.packed.operate(func, operands, named)
            if results is not NotImplemented:
                return results
        if func in BRANCHES:
            return self._reads.truth(func, operands, named)
        if func in NUMBERS:
            return self._reads.read(func, operands, named)
        if is_known(answer := self._known.answer(func, operands, named)):
            return answer
        if func is torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.Tensor.unbind, types, operands, named))
        if func in MASKED:
            func, operands, named = with_masks(func, operands, named, self._known.positions, self._truth)
        if self._traced and (opened := self._one_hots.opened(func, operands, named)) is not None:
            return opened
        operands, named = self._known.with_numbers(func, operands, named)
        if (constant := self._known.counted(func, operands, named)) is not None:
            return constant
        with self._known.noting(func, operands, named) as results:
            results.append(_SPECIAL.get(func, operate)(self._places, func, list(operands), dict(named)))
        self._one_hots.clamped(func, operands, named, results[0])
        return self._reads.read_sizes(results[0]) if func in SIZES else results[0]


def has_value(tensor: torch.Tensor) -> bool:
    """Returns whether the current call of the user's code knows the value of a traced tensor."""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(isinstance(mode, DeviceTracking) and mode.knows(tensor) for mode in modes)


def _packed() -> PackedSequences | None:
    """Returns the packed sequences of the current call of the user's code."""
    modes = torch.overrides._get_current_function_mode_stack()
    return next((mode.packed for mode in reversed(modes) if isinstance(mode, DeviceTracking)), None)


@contextmanager
def track_devices(
    inputs: Sequence[torch.Tensor],
    earlier: SideEffects,
    known: Set[int] = frozenset(),
    real: torch.device = CPU,
    target_device: torch.device = CUDA,
    capability: tuple[int, int] = (8, 0),
    asserted: Asserted = NOTHING,
    weights: Sequence[tuple[str, torch.Tensor, torch.Tensor]] = (),
    way: TracedWay | ForcedWay | None = None,
    model: torch.nn.Module | None = None,
    padded: bool = False,
) -> Iterator[SideEffects]:
    """Activates a DeviceTracking inside this context, for a call with `inputs` of a model on `real`.  Gives the call's effects.

    See `TensorPlaces` for `target_device`, whose compute capability is `capability` if it is a GPU.  See `DataReads` for `earlier`,
    `known` and `asserted`, and `PackedSequences` for `padded`.  `weights` are the names, traced tensors and values of parameters
    and buffers that no call is known to write to.  `way` has forced answers for the call of `model`.

    The replaced `FakeTensor.device` returns the user's device while the mode is on the stack, which is not so inside operations.
    """
    places = TensorPlaces(inputs, real, target_device)
    values = KnownValues(real, places.effects.baked)
    for name, tensor, value in weights:
        values.hold(tensor, value, name)
    reads = DataReads(places, values, earlier, known, asserted)
    number_tests: AbstractContextManager[None] = nullcontext()
    conversions: AbstractContextManager[None] = nullcontext()
    if isinstance(way, TracedWay):
        assert model is not None
        way.begin()
        reads = traced_reads = TracedReads(places, values, way, model, tuple(inputs), sys._getframe(2).f_code)
        number_tests = numbers_asked(traced_reads.number_truth)
        conversions = conversion_calls(model, traced_reads.converted, traced_reads.asked_of, traced_reads.length)
    elif way is not None:
        assert model is not None
        reads = forced_reads = ForcedReads(places, values, way)
        number_tests = min_and_max_as_traced()
        conversions = conversion_calls(model, forced_reads.converted, forced_reads.asked_of, forced_reads.length)
    mode = DeviceTracking(places, reads, values, PackedSequences(padded))
    fake_device, autocast = FakeTensor.__dict__["device"], torch.autocast.__init__
    capability_of, capturing = torch.cuda.get_device_capability, torch.cuda.is_current_stream_capturing
    acceptable = torch.backends.cudnn.is_acceptable

    def device(tensor: FakeTensor) -> torch.device:
        real: torch.device = fake_device.fget(tensor)
        asks_mode = mode in torch.overrides._get_current_function_mode_stack() and not mode.within_torch()
        return places.device(tensor, real) if asks_mode else real

    def on_the_cpu(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        autocast(self, device_type, dtype, *args, **kwargs)

    FakeTensor.device = property(device, fake_device.fset)
    if real == CPU != target_device:
        torch.autocast.__init__ = on_the_cpu
        torch.cuda.get_device_capability = lambda device=None: capability
        torch.cuda.is_current_stream_capturing = lambda: False
        torch.backends.cudnn.is_acceptable = lambda tensor: False
    try:
        with layers_of_packed_sequences(_packed), mode, number_tests, conversions:
            yield places.effects
    finally:
        places.effects.written |= values.written()
        FakeTensor.device = fake_device
        torch.autocast.__init__ = autocast
        torch.cuda.get_device_capability, torch.cuda.is_current_stream_capturing = capability_of, capturing
        torch.backends.cudnn.is_acceptable = acceptable
