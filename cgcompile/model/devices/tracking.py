"""Where the user's code puts its tensors: a mode that keeps a virtual device per tensor while the model runs on one device.

A model is exported on one device, the CPU or the GPU that it is built for.  An explicit move (`.cpu()`, `.cuda()`, `.to(device)`,
`device=`) would vanish from the graph, or break it.  `DeviceTracking` answers `tensor.device` as if everything were on a GPU and
follows the moves.  It leaves a marker operator in the graph for each (markers.py).  A model that names no device gets no marker.

Where eager PyTorch runs the model on a GPU, moves are moves, and what is on the host runs on the CPU.

Places.  An input of the model is on the device; what an operation makes is where its tensors are.  A tensor that no operation made
(a parameter, a buffer, a constant) is free: it goes with the others, and is on the device by itself.  A tensor of no dimensions on
the host may be combined with tensors on the device, as in PyTorch.  Any other mixture is PyTorch's error, and an obstacle here.

Private interfaces (torch 2.11, 2.13): `FakeTensor.device` and `FakeTensor.constant`, `get_proxy_mode` and its `tracer`,
`torch._C._nn._parse_to`, `torch.overrides._get_current_function_mode_stack`, `torch.autocast.__init__`.  Two are replaced while the
model runs: `FakeTensor.device`, a property of Python that no mode is asked about, and autocast where tensors are on the CPU, since
autocast for cuda would do nothing to them.  Of a fake tensor, `fake_device` is the device that it stands for.  Also private:
`torch.utils._device._device_constructors`, the functions that make a tensor out of none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors
from torch.utils.weak import WeakTensorKeyDictionary

from ..side_effects import BRANCH, UNFINISHED, Obstacle, SideEffects
from ..user_code import here, user_frame
from .markers import TO_DEVICE, TO_HOST

HOST, DEVICE, FREE = "host", "device", "free"
"""Places of a tensor."""

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
"""What the user's code is told."""


class DeviceTracking(TorchFunctionMode):
    """Active around one call of the user's model.

    `real` is the device of the model's tensors.  `inputs`: those of the call.  `earlier`: what a call with real tensors did.  A
    traced call, whose tensors hold no data, branches as that one did, and gets the numbers from it that `known` names by position.
    `effects` is filled.
    """

    def __init__(
        self, inputs: Sequence[torch.Tensor], earlier: SideEffects, known: Set[int] = frozenset(), real: torch.device = CPU
    ) -> None:
        super().__init__()
        self.real = real
        self.effects = SideEffects()
        self._answers = iter(earlier.answers)
        self._reads, self._known = earlier.reads, known
        self._guess = False
        self._places: Any = WeakTensorKeyDictionary()
        for tensor in inputs:
            self._places[tensor] = DEVICE

    def place(self, tensor: torch.Tensor) -> str:
        """HOST, DEVICE, or FREE for what no operation made."""
        found: str = self._places.get(tensor, FREE)
        return found

    def device(self, tensor: torch.Tensor, real: torch.device) -> torch.device:
        """What the user's code is told.  Tensors without memory keep their device."""
        if real.type == "meta":
            return real
        return CPU if self.place(tensor) == HOST else CUDA

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))  # branches of torch.cond: they are traced without the mode
        given = dict(kwargs or {})
        special = _SPECIAL.get(func)
        return special(self, func, list(args), given) if special else self._call(func, list(args), given)

    # --- any operation ------------------------------------------------------------------------------------------------

    def _call(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        wanted = None
        if isinstance(func, torch._ops.OpOverload):  # of a saved program, whose devices are those where it was exported
            args, kwargs = pytree.tree_map_only(torch.device, self._here, (args, kwargs))
        else:
            wanted = self._wanted(kwargs)
            if kwargs.get("device") is None and self.real != CPU and func in _constructors():
                kwargs["device"] = self.real
        tensors = _tensors((args, kwargs))
        side = self._side(func, args, tensors)
        elsewhere = [tensor for tensor in tensors if self.place(tensor) == _OTHER.get(side) and (tensor.dim() or side == HOST)]
        if elsewhere:
            if func not in _CROSSING:
                self._mixed(func)
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: self._moved(t, side), (args, kwargs))
        return self._noted_at(self._run(func, args, kwargs, side), side, wanted)

    def _run(self, func: Any, args: list[Any], kwargs: dict[str, Any], side: str) -> Any:
        """The operation, with its tensors on the real device of `side`.  What it writes to a copy is written back."""
        if self.real == CPU:
            return _noted(func, args, kwargs)
        where = CPU if side == HOST and not self._traced(args, kwargs) else self.real
        copies: list[tuple[torch.Tensor, torch.Tensor, int]] = []

        def there(tensor: torch.Tensor) -> torch.Tensor:
            if _real_device(tensor).type in (where.type, "meta"):
                return tensor
            made = tensor.to(where)
            copies.append((tensor, made, made._version))
            return made

        args, kwargs = pytree.tree_map_only(torch.Tensor, there, (args, kwargs))
        result = _noted(func, args, kwargs)
        own = {id(made): tensor for tensor, made, _ in copies}
        for tensor, made, version in copies:
            if made._version != version:
                tensor.copy_(made)
        return pytree.tree_map_only(torch.Tensor, lambda tensor: own[id(tensor)] if id(tensor) in own else there(tensor), result)

    def _traced(self, args: Any, kwargs: Any) -> bool:
        """Whether an operation becomes a part of a graph, or runs on tensors without data."""
        return get_proxy_mode() is not None or any(isinstance(tensor, FakeTensor) for tensor in _tensors((args, kwargs)))

    def _here(self, device: torch.device) -> torch.device:
        return device if device.type == "meta" else self.real

    def _side(self, func: Any, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> str:
        """Where the operation runs."""
        places = [self.place(tensor) for tensor in tensors]
        if func in _AT_FIRST and isinstance(args[0], torch.Tensor) and self.place(args[0]) != FREE:
            return self.place(args[0])
        if HOST not in places:
            return FREE if places and DEVICE not in places else DEVICE
        return DEVICE if DEVICE in places else HOST

    def _wanted(self, kwargs: dict[str, Any]) -> str | None:
        """The place that `device=` names.  The operation itself runs where everything is."""
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
            self._saw("pinned-memory", "pin_memory=True: pinned memory of the user's is not used")
        if kwargs.get("device") is None:
            return None
        place = self._named(kwargs["device"])
        if place is not None:
            kwargs["device"] = self.real
        return place

    def _named(self, device: Any) -> str | None:
        """The place of a device as the user writes it, None for one without memory (meta)."""
        found = torch.device(_device(device))
        if found.type == "meta":
            return None
        if found.type == "cpu":
            return HOST
        if found.type != "cuda" or found.index:
            self._saw("several-devices", f"a tensor on {found}: a bundle runs on one GPU and the host")
        return DEVICE

    def _moved(self, tensor: torch.Tensor, place: str) -> torch.Tensor:
        """`tensor` at `place`, with a marker where it was elsewhere."""
        there = self.place(tensor)
        if there == place or (there == FREE and place == DEVICE):
            return tensor
        made: torch.Tensor
        if self.real == CPU or self._traced([tensor], {}):
            made = _noted(TO_HOST if place == HOST else TO_DEVICE, [tensor], {})
        else:
            made = tensor.to(CPU if place == HOST else self.real, copy=True)
        self._places[made] = place
        return made

    def _noted_at(self, result: Any, side: str, wanted: str | None = None) -> Any:
        """The result of an operation that ran at `side`, with its tensors noted there, and moved where `wanted` says so."""
        for tensor in _tensors(result):
            self._places[tensor] = side
        if wanted is None or wanted == side or (side == FREE and wanted == DEVICE):
            return result
        return pytree.tree_map_only(torch.Tensor, lambda tensor: self._moved(tensor, wanted), result)

    # --- moves --------------------------------------------------------------------------------------------------------

    def _to(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """`x.to(...)` in all its forms, and `x.type_as(other)`."""
        tensor, *rest = args
        other = rest[0] if rest and isinstance(rest[0], torch.Tensor) else kwargs.pop("other", None)
        copy = bool(kwargs.pop("copy", rest[3] if len(rest) > 3 else False))
        if other is not None:
            place: str | None = HOST if self.place(other) == HOST else DEVICE
            dtype, layout = other.dtype, kwargs.get("memory_format")
        else:
            plain = [_device(value) for value in rest[:3]]
            device, dtype, _, layout = torch._C._nn._parse_to(*plain, **{name: _device(value) for name, value in kwargs.items()})
            place = self._named(device) if device is not None else None
            if place is None:
                return self._call(func, args, kwargs | ({"copy": True} if copy and len(rest) < 4 else {}))
        return self._move(tensor, str(place), dtype, layout, copy)

    def _cpu(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return self._move(args[0], HOST, None, kwargs.get("memory_format"), False)

    def _cuda(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device", args[1] if len(args) > 1 else None)
        place = self._named(device) if device is not None else DEVICE
        return self._move(args[0], place or DEVICE, None, kwargs.get("memory_format"), False)

    def _move(
        self, tensor: torch.Tensor, place: str, dtype: torch.dtype | None, layout: torch.memory_format | None, copy: bool
    ) -> torch.Tensor:
        """The device converts: what goes there is copied first, what comes from there is copied last."""
        crosses = place == HOST and self.place(tensor) != HOST
        if not crosses:
            there = self._moved(tensor, place)
            tensor, copy = there, copy and there is tensor
        side = self.place(tensor)
        form = {} if layout is None else {"memory_format": layout}
        if dtype is not None and dtype != tensor.dtype:
            tensor = self._noted_at(_noted(torch.Tensor.to, [tensor, dtype], form), side)
        elif copy and not crosses:
            tensor = self._noted_at(_noted(torch.Tensor.clone, [tensor], form), side)
        elif layout not in (None, torch.preserve_format):
            tensor = self._noted_at(_noted(torch.Tensor.contiguous, [tensor], form), side)
        return self._moved(tensor, place)

    def _pin(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        self._saw("pinned-memory", "pin_memory(): pinned memory of the user's is not used")
        return args[0]

    # --- answers ------------------------------------------------------------------------------------------------------

    def _lstm(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """`torch.lstm` with states of the initial states' shapes.  On a GPU torch before 2.13 traces them with an extra axis
        (pytorch issue 151200), and what follows would be traced wrongly."""
        output, *states = self._call(func, args, kwargs)
        first = args[1] if isinstance(args[1], tuple | list) else args[2]  # packed sequences come with their lengths
        return output, *[
            made if made.dim() == like.dim() else made.view(like.shape) for made, like in zip(states, first, strict=True)
        ]

    def _pack(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """A packed sequence holds its data where the input is, and the sizes of its batches on the host."""
        if self.real == CPU or self._traced(args, kwargs):
            data, sizes = self._call(func, args, kwargs)
        else:
            data, sizes = func(args[0], args[1].to(CPU), *args[2:], **kwargs)
            self._places[data] = self.place(args[0])
        self._places[sizes] = HOST
        return data, sizes

    def _truth(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
        """`if tensor:` and its kind.  A traced call has no data to decide by: it goes where the example inputs went."""
        earlier = next(self._answers, None)
        if not any(_unknown(tensor) for tensor in _tensors((args, kwargs))):
            answer = bool(self._run(func, args, kwargs, DEVICE))
        else:
            self._saw("data-dependent-branch", BRANCH)
            self._guess = not self._guess  # beyond the answers: no loop may wait for one of the two for ever
            answer = self._guess if earlier is None else earlier
        self.effects.answers.append(answer)
        return answer

    def _read(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """`.item()` and its kind."""
        position = len(self.effects.reads)
        self.effects.reads.append(UNFINISHED)
        replayed = position in self._known and position < len(self._reads)
        self.effects.reads[position] = self._reads[position] if replayed else _noted(func, args, kwargs)
        return self.effects.reads[position]

    # --- obstacles ----------------------------------------------------------------------------------------------------

    def _mixed(self, func: Any) -> None:
        self._saw(
            "several-devices",
            f"{getattr(func, '__name__', func)}: expected all tensors to be on the same device, found the GPU and the CPU",
        )

    def _saw(self, rule: str, message: str) -> None:
        where, source = here()
        seen = Obstacle(rule=rule, message=message, where=where, source=source)
        if seen not in self.effects.obstacles:
            self.effects.obstacles.append(seen)


_OTHER = {HOST: DEVICE, DEVICE: HOST}

_AT_FIRST = frozenset({
    torch.Tensor.copy_, torch.Tensor.__getitem__, torch.Tensor.__setitem__, torch.Tensor.index_put_, torch.Tensor.index_put,
    torch._VF._pack_padded_sequence,
})  # fmt: skip
"""What runs where its first tensor is."""

_CROSSING = _AT_FIRST | {torch.tensor_split, torch.Tensor.tensor_split}
"""What takes tensors of both places in PyTorch, too: copies, and indices and lengths on the host."""

_Handler = Callable[[DeviceTracking, Any, list[Any], dict[str, Any]], Any]

_SPECIAL: dict[Any, _Handler] = {
    torch.Tensor.to: DeviceTracking._to,
    torch.Tensor.type_as: DeviceTracking._to,
    torch.Tensor.cpu: DeviceTracking._cpu,
    torch.Tensor.cuda: DeviceTracking._cuda,
    torch.Tensor.pin_memory: DeviceTracking._pin,
    torch.Tensor.is_pinned: lambda mode, func, args, kwargs: False,
    torch.Tensor.device.__get__: lambda mode, func, args, kwargs: mode.device(args[0], func(*args)),
    torch.Tensor.is_cuda.__get__: lambda mode, func, args, kwargs: mode.device(args[0], CPU) == CUDA,
    torch.Tensor.is_cpu.__get__: lambda mode, func, args, kwargs: mode.device(args[0], CPU) == CPU,
    torch.Tensor.get_device: lambda mode, func, args, kwargs: 0 if mode.device(args[0], CPU) == CUDA else -1,
    torch.get_device: lambda mode, func, args, kwargs: 0 if mode.device(args[0], CPU) == CUDA else -1,
    torch._VF._pack_padded_sequence: DeviceTracking._pack,
    torch._VF.lstm: DeviceTracking._lstm,
    **dict.fromkeys(
        (
            torch.Tensor.__bool__, torch.Tensor.is_nonzero, torch.is_nonzero, torch.equal, torch.Tensor.equal, torch.allclose,
            torch.Tensor.allclose,
        ),
        DeviceTracking._truth,
    ),
    **dict.fromkeys(
        (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__),
        DeviceTracking._read,
    ),
}  # fmt: skip


@contextmanager
def track_devices(
    inputs: Sequence[torch.Tensor], earlier: SideEffects, known: Set[int] = frozenset(), real: torch.device = CPU
) -> Iterator[SideEffects]:
    """A DeviceTracking that is active inside.  Fake tensors answer `.device` by a property that asks no mode.  While the user's own
    code runs, the property asks this one; in what that code calls, the mode is off the stack."""
    mode = DeviceTracking(inputs, earlier, known, real)
    fake, autocast = FakeTensor.__dict__["device"], torch.autocast.__init__

    def device(tensor: FakeTensor) -> torch.device:
        real: torch.device = fake.fget(tensor)
        return mode.device(tensor, real) if mode in torch.overrides._get_current_function_mode_stack() else real

    def on_the_cpu(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        autocast(self, device_type, dtype, *args, **kwargs)

    FakeTensor.device = property(device, fake.fset)
    if real == CPU:
        torch.autocast.__init__ = on_the_cpu
    try:
        with mode:
            yield mode.effects
    finally:
        FakeTensor.device = fake
        torch.autocast.__init__ = autocast


def _noted(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Calls an operation.  What it adds to a traced graph gets the user's innermost line: torch notes lines of forward() alone."""
    mode = get_proxy_mode()
    if mode is None:
        return func(*args, **kwargs)
    nodes = mode.tracer.graph.nodes
    before = next(iter(reversed(nodes)), None)
    made = func(*args, **kwargs)
    line = user_frame()
    for node in reversed(nodes):
        if node is before:
            break
        trace = node.meta.get("stack_trace") or ""
        if line not in trace:
            node.meta["stack_trace"] = f"{trace}\n{line}"
    return made


def _device(value: Any) -> Any:
    """A number names a GPU; torch looks for one when it is asked about it."""
    return torch.device("cuda", value) if type(value) is int else value


@cache
def _constructors() -> frozenset[Any]:
    """The functions that make a tensor out of none, on the device of their argument `device`."""
    return frozenset(_device_constructors())


def _real_device(tensor: torch.Tensor) -> torch.device:
    """Where a tensor is, whatever the user's code is told.  Called while no mode of this module is asked."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _unknown(tensor: torch.Tensor) -> bool:
    """Whether a traced tensor has no data."""
    return isinstance(tensor, FakeTensor) and tensor.constant is None
