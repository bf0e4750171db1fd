"""Where the user's code puts its tensors: a mode that keeps a virtual device per tensor while the model runs on one device.

A model is exported on one device, the CPU or the GPU that it is built for.  An explicit move (`.cpu()`, `.cuda()`, `.to(device)`,
`device=`) would vanish from the graph, or break it.  `DeviceTracking` answers `tensor.device` as if everything were where the
bundle will run, and follows the moves.  It leaves a marker operator in the graph for each (markers.py).  A model that names no
device gets no marker.

Private interfaces (torch 2.11, 2.13): `FakeTensor.device`, `torch.overrides._get_current_function_mode_stack`,
`get_proxy_mode`, which is None while torch carries out an operation that it traces, `torch.autocast.__init__`.  Replaced while
the model runs are `FakeTensor.device`, a property of Python that no mode is asked about, and, where tensors are on the CPU and
told to be on a GPU, autocast, since autocast for cuda would do nothing to them, `torch.cuda.get_device_capability`, which
answers for the GPU that the bundle is for, `torch.cuda.is_current_stream_capturing`, which torch for the CPU does not have, and
`torch.backends.cudnn.is_acceptable`, by which `flatten_parameters()` of recurrent layers would start CUDA.
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
from .operations import chunk, data, histogram, lstm, operate, pack_sequence, pad_sequence, recurrent
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
    torch.chunk: chunk,
    torch.Tensor.chunk: chunk,
    torch.histc: histogram,
    torch.Tensor.histc: histogram,
}
"""What is no operation like others: moves, questions about devices, packed sequences and LSTMs."""


_ASKING = frozenset({F.gaussian_nll_loss})
"""Functions of PyTorch's in Python that branch on data.  Others run as one operation, which no mode looks into."""


def _opened(func: Any) -> Any:
    """A function of `torch.nn.functional` that asks no mode for itself, so that one sees what it does."""
    names = {**func.__globals__, "has_torch_function_variadic": lambda *values: False}
    function = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    function.__kwdefaults__ = func.__kwdefaults__
    return function


class DeviceTracking(TorchFunctionMode):
    """Active around one call of the user's model."""

    def __init__(self, places: TensorPlaces, reads: DataReads, known: KnownValues, packed: PackedSequences) -> None:
        super().__init__()
        self._places, self._reads, self._known, self.packed = places, reads, known, packed
        self._traced = get_proxy_mode() is not None
        self._one_hots = OpenOneHots()

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the value of a tensor is known."""
        return self._known.has(tensor)

    def within_torch(self) -> bool:
        """Whether torch traces an operation that asks no mode, as torch.Tensor([...]) and torch.FloatTensor([...]): what is called
        meanwhile is its own."""
        return self._traced and get_proxy_mode() is None

    def _truth(self, tensor: torch.Tensor) -> Any:
        """Bytes as truth values."""
        return self.__torch_function__(torch.Tensor.bool, (), [tensor])

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))  # branches of torch.cond: they are traced without the mode
        if self.within_torch():
            return func(*args, **(kwargs or {}))
        operands, named = list(args), dict(kwargs or {})
        if func in _ASKING:
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
        return self._reads.sized(results[0]) if func in SIZES else results[0]


def has_value(tensor: torch.Tensor) -> bool:
    """Whether the call that the user's code runs in knows what a traced tensor holds."""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(isinstance(mode, DeviceTracking) and mode.knows(tensor) for mode in modes)


def _packed() -> PackedSequences | None:
    """The packed sequences of the call that the user's code runs in."""
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
    """A DeviceTracking that is active inside, for a call with `inputs` of a model on `real`; what the call did, filled meanwhile.

    `target_device` is that of `TensorPlaces`, a GPU of this compute `capability`: torch cannot say so where it is not here.
    `earlier`, `known` and `asserted` are those of `DataReads`, `padded` that of `PackedSequences`.  `weights` are parameters and
    buffers that no call writes to, as far as is known: names, traced tensors, values.  `way`: the answers that the call of `model`
    gets are forced.  Fake tensors answer `.device` by a property that asks no mode.  While the user's own code runs, the property
    asks this one; in what that code calls, the mode is off the stack.
    """
    places = TensorPlaces(inputs, real, target_device)
    values = KnownValues(real, places.effects.baked)
    for name, tensor, value in weights:
        values.hold(tensor, value, name)
    reads = DataReads(places, values, earlier, known, asserted)
    asked_by: AbstractContextManager[None] = nullcontext()
    conversions: AbstractContextManager[None] = nullcontext()
    if isinstance(way, TracedWay):
        assert model is not None
        way.begin()
        reads = traced = TracedReads(places, values, way, model, tuple(inputs), sys._getframe(2).f_code)
        asked_by = numbers_asked(traced.number_truth)
        conversions = conversion_calls(model, traced.converted, traced.asked_of, traced.length)
    elif way is not None:
        assert model is not None
        reads = forced = ForcedReads(places, values, way)
        asked_by = min_and_max_as_traced()
        conversions = conversion_calls(model, forced.converted, forced.asked_of, forced.length)
    mode = DeviceTracking(places, reads, values, PackedSequences(padded))
    fake, autocast = FakeTensor.__dict__["device"], torch.autocast.__init__
    asked, capturing = torch.cuda.get_device_capability, torch.cuda.is_current_stream_capturing
    acceptable = torch.backends.cudnn.is_acceptable

    def device(tensor: FakeTensor) -> torch.device:
        real: torch.device = fake.fget(tensor)
        asked = mode in torch.overrides._get_current_function_mode_stack() and not mode.within_torch()
        return places.device(tensor, real) if asked else real

    def on_the_cpu(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        autocast(self, device_type, dtype, *args, **kwargs)

    FakeTensor.device = property(device, fake.fset)
    if real == CPU != target_device:
        torch.autocast.__init__ = on_the_cpu
        torch.cuda.get_device_capability = lambda device=None: capability
        torch.cuda.is_current_stream_capturing = lambda: False
        torch.backends.cudnn.is_acceptable = lambda tensor: False
    try:
        with layers_of_packed_sequences(_packed), mode, asked_by, conversions:
            yield places.effects
    finally:
        places.effects.written |= values.written()
        FakeTensor.device = fake
        torch.autocast.__init__ = autocast
        torch.cuda.get_device_capability, torch.cuda.is_current_stream_capturing = asked, capturing
        torch.backends.cudnn.is_acceptable = acceptable
