"""Wraps the user's model so that inputs and outputs are flat tensors.  A build exports the wrapper, and calls it in eager
PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.export import ExportedProgram

from cgbundle.format.file_names import FORWARD
from cgbundle.format.schema import Sizes, Tree

from ..errors import ModelError
from ..util.raw_bytes import copied, put_back, same_bits
from .devices.tracking import track_devices
from .dynamic_axes import BoundedAxis, bounded_outputs, names_of_counts, sizes_of
from .pytree import NamedTensor, describe, located, rebuild
from .side_effects import NOTHING, SideEffects
from .source import CPU, CUDA, Sample, entry_method, written_method
from .tracing.attribute_reads import early_reads
from .tracing.attributes import assignment_place, changed, marks
from .tracing.conversions import needless_conversions_left_out
from .tracing.held_tensors import current_buffers, held_buffers, held_tensors
from .tracing.questions import tracing_hidden
from .tracing.way import ForcedWay, TracedWay, noting_errors
from .user_code import definition, plain_errors

PREFIX = "model."
"""The prefix of weight names: the wrapper's attribute `model` holds the user's module."""

SHAPE_FIX = (
    "register the buffer with the dtype and shape that forward() assigns; if these depend on the size of an input, declare only "
    "that size; a buffer cannot grow: register its largest size"
)


def unwatched(effects: SideEffects) -> None:
    """Does nothing: the default of `FlatModule.watch`."""


class FlatModule(torch.nn.Module):
    """The user's module with a tuple of tensors as input and output.

    `device` is the device of the module and its inputs.  `target_device` is the device of the bundle, and `capability` its compute
    capability if it is a GPU.  `entry` is the method to call.  After a call, `result` is the tree of its outputs and `names` are
    their names.

    Before each call, `watch` gets its SideEffects.  `earlier` has the SideEffects of a call with real tensors.  A traced call takes
    the same branches, and reads the same numbers at the positions in `known`.  It asserts the values in `asserted`.  `as_eager`
    says which queries of tracing/questions.py return False.  `padded`: the inputs are padded, so sequences may have length 0.
    `uncalled`: nothing has called the module yet; its first call may give a buffer another shape.  `reshaped`: the user's
    file:line where the build's first call gave a buffer another shape or dtype, and a description, or None.  `way` forces the
    branches of a call (see tracing/way.py).  Python may read the values of `weights` during a trace.  The SideEffects list the
    attributes in `assigned` that the call reads before it assigns them.  The outputs in `bounded` are padded, for inputs with the
    symbolic `shapes`.
    """

    __module__, __qualname__ = "cgcompile.flat", "Flat"  # stored programs contain this name, so it does not depend on the file

    def __init__(
        self,
        model: torch.nn.Module,
        like: Sample,
        device: torch.device = CPU,
        target_device: torch.device = CUDA,
        entry: str = FORWARD,
        capability: tuple[int, int] = (8, 0),
    ) -> None:
        super().__init__()
        self.model = model
        self.entry = entry
        self.like = like
        self.device = device
        self.target_device = target_device
        self.capability = capability
        self.result: Tree | None = None
        self.names: list[str] = []
        self.earlier = SideEffects()
        self.known: frozenset[int] = frozenset()
        self.asserted = NOTHING
        self.weights: tuple[HeldWeight, ...] = ()
        self.as_eager = ""
        self.padded = False
        self.uncalled = False
        self.reshaped: tuple[str, str] | None = None
        self.assigned: tuple[str, ...] = ()
        self.bounded: tuple[BoundedAxis, ...] = ()
        self.shapes: tuple[Sizes, ...] = ()
        self.way: TracedWay | ForcedWay | None = None
        self.watch: Callable[[SideEffects], None] = unwatched
        self.follow_buffers()

    def follow_buffers(self) -> None:
        """Finds the buffers of the module, and the other places in the module that hold them."""
        self.snapshot = BufferSnapshot(self.model, held=[slot.tensor for slot in held_tensors(self.model)])
        self.shared = held_buffers(self.model)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        trees = dict(self.like.call["call"])
        names = iter(trees)
        args = [rebuild(trees[next(names)], list(tensors), value) for value in self.like.args]
        kwargs = {name: rebuild(trees[name], list(tensors), value) for name, value in self.like.kwargs.items()}
        leaves: list[NamedTensor] = []
        before = [(owner, leaf, owner._buffers[leaf]) for owner, leaf in self.snapshot.owners()]
        weights = [(weight.name, weight.now, weight.tensor) for weight in self.weights]
        with (
            tracing_hidden(self.as_eager),
            needless_conversions_left_out(),
            current_buffers(self.model, self.shared, self.target_device),
            track_devices(
                tensors,
                self.earlier,
                self.known,
                self.device,
                self.target_device,
                self.capability,
                self.asserted,
                weights,
                self.way,
                self.model,
                self.padded,
            ) as effects,  # fmt: skip
        ):
            self.watch(effects)
            marks_before = marks(self.model) if isinstance(self.way, TracedWay) else {}
            with (
                noting_errors(self.way),
                early_reads(self.model, self.assigned, effects.early),
                noting_replaced(self.weights, effects.written),
                plain_errors(),
            ):
                output = entry_method(self.model, self.entry)(*args, **kwargs)
            if isinstance(self.way, TracedWay):
                self.way.changed = tuple(changed(marks_before, marks(self.model)))
        for owner, leaf, tensor in before:
            if not (self.uncalled and _other_shape(owner._buffers[leaf], tensor)):
                _write_back(owner, leaf, tensor)
        method_name = definition(written_method(self.model, self.entry)) or type(self.model).__qualname__
        with located(f"{method_name}: {self.entry}() gives "):
            self.result = describe(output, "", leaves)
        if isinstance(self.way, TracedWay):
            self.way.result = self.result
        self.names = [name or "output" for name, _ in leaves]
        outputs = tuple([_waited(tensor) for _, tensor in leaves])
        if self.bounded:
            self.names += names_of_counts(self.names, self.bounded)
            outputs = bounded_outputs(outputs, self.bounded, sizes_of(tensors, self.shapes))
        return outputs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldWeight:
    """A parameter or buffer: its name in the model, the dict that holds it, its key there, and the real tensor."""

    name: str
    owner: Any
    leaf: str
    tensor: torch.Tensor

    @property
    def now(self) -> Any:
        """The current tensor of the module: the traced tensor during a trace, None if it was removed."""
        # a scripted module's dict has no `get`
        return self.owner[self.leaf] if self.leaf in self.owner else None  # noqa: SIM401


@contextmanager
def noting_replaced(weights: Sequence[HeldWeight], names: set[str]) -> Iterator[None]:
    """Adds to `names` the weights that the code inside this context replaces in their modules."""
    before = [weight.now for weight in weights]
    try:
        yield
    finally:
        names.update([weight.name for weight, old in zip(weights, before, strict=True) if weight.now is not old])


def held_weights(model: torch.nn.Module, excluded: Collection[str] = ()) -> tuple[HeldWeight, ...]:
    """Returns the parameters and buffers of a model under all of their names, except the `excluded` ones."""
    return tuple(
        [
            HeldWeight(name=name, owner=owner, leaf=leaf, tensor=tensor)
            for path, module in model.named_modules(remove_duplicate=False)
            for owner in (module._parameters, module._buffers)
            for leaf, tensor in owner.items()
            if tensor is not None and (name := f"{path}.{leaf}" if path else leaf) not in excluded
        ]
    )


def _waited(tensor: torch.Tensor) -> torch.Tensor:
    """Waits for the result of a collective.  Outside of a trace, the result has a private class of torch with `trigger_wait` (2.11,
    2.13)."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def _other_shape(now: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    return now is not None and (now.shape != tensor.shape or now.dtype != tensor.dtype)


def _write_back(owner: Any, leaf: str, tensor: torch.Tensor) -> None:
    """Copies a tensor that forward() assigned to a buffer (`self.steps = self.steps + 1`) to the original buffer.  torch.export
    drops assignments in modules below the outermost one (seen with 2.11 and 2.13).  Raises state-changed for a tensor of another
    shape or dtype."""
    now = owner._buffers[leaf]
    if now is tensor:
        return
    if now is None or _other_shape(now, tensor):
        new_text = "None" if now is None else f"{now.dtype} {list(now.shape)}"
        where, _ = assignment_place(owner, leaf)
        text = f"forward() assigns {new_text} to the buffer {leaf!r}, which is {tensor.dtype} {list(tensor.shape)}"
        raise ModelError("state-changed", f"{where}: {text}" if where else text, SHAPE_FIX)
    tensor.copy_(now)
    owner._buffers[leaf] = tensor


class ProgramModule(torch.nn.Module):
    """Exported programs as a module that replaces the FlatModule, for example if they draw random numbers."""

    def __init__(self, programs: Sequence[ExportedProgram]) -> None:
        """`programs` is one program for all sizes, or several that share their weights, each for the input shapes of its export."""
        super().__init__()
        self.programs = torch.nn.ModuleList([program.module(check_guards=False) for program in programs])
        self.shapes = [_input_shapes(program) for program in programs]
        self.snapshot = BufferSnapshot(*self.programs, prefix=PREFIX)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        return tuple(self.programs[self.shapes.index(shapes) if len(self.shapes) > 1 else 0](*tensors))


def _input_shapes(program: ExportedProgram) -> list[tuple[Any, ...]]:
    user = set(program.graph_signature.user_inputs)
    nodes = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in user]
    return [tuple(node.meta["val"].shape) for node in nodes]


class Reference(Protocol):
    """A module that gives the expected results in eager PyTorch: a FlatModule or a ProgramModule."""

    snapshot: BufferSnapshot

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]: ...


class BufferSnapshot:
    """The initial contents of the buffers of modules, to restore them.  `prefix` is removed from names.  If several modules have a
    buffer of one name, it must be the same tensor.  `held` has more tensors to restore."""

    def __init__(self, *modules: torch.nn.Module, prefix: str = "", held: Sequence[torch.Tensor] = ()) -> None:
        self._held = [(tensor, copied(tensor)) for tensor in held]
        self._rows: list[tuple[str, Any, str, torch.Tensor, torch.Tensor]] = []
        for path, owner in [named for module in modules for named in module.named_modules()]:
            for leaf, tensor in owner._buffers.items():
                if tensor is not None:
                    name = (f"{path}.{leaf}" if path else leaf).removeprefix(prefix)
                    self._rows.append((name, owner, leaf, tensor, copied(tensor)))

    def owners(self) -> list[tuple[Any, str]]:
        """Returns (module, key) of every buffer."""
        return [(owner, leaf) for _, owner, leaf, _, _ in self._rows]

    def storages(self) -> set[int]:
        """Returns the addresses of the storages of all buffers."""
        return {owner._buffers[leaf].untyped_storage().data_ptr() for _, owner, leaf, _, _ in self._rows}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the current buffers, by their names in the module."""
        return {name: owner._buffers[leaf] for name, owner, leaf, _, _ in self._rows}

    def current(self) -> dict[str, torch.Tensor]:
        """Returns copies of the current buffers, by their names in the module."""
        return {name: copied(tensor) for name, tensor in self.buffers().items()}

    def changed(self) -> list[str]:
        """Returns the names of buffers whose contents, shape or dtype have changed."""
        return [name for name, owner, leaf, _, first in self._rows if not _same(owner._buffers[leaf], first)]

    def restore(self, but: Collection[str] = ()) -> None:
        """Restores the initial contents of the buffers, except those in `but`."""
        with torch.no_grad():
            for name, owner, leaf, tensor, first in self._rows:
                if name not in but:
                    owner._buffers[leaf] = tensor
                    put_back(tensor, first)
            for tensor, first in self._held:
                put_back(tensor, first)


def _same(now: torch.Tensor | None, first: torch.Tensor) -> bool:
    return now is not None and (now.shape, now.dtype) == (first.shape, first.dtype) and same_bits(now, first)


@dataclass(frozen=True, kw_only=True, slots=True)
class EagerResult:
    """The results of the last call in eager PyTorch.  `inputs` are the copies of the inputs that it ran on; an output may be one of
    these.  `state` has the buffers, by their names in the user's module."""

    outputs: tuple[torch.Tensor, ...]
    inputs: tuple[torch.Tensor, ...]
    state: Mapping[str, torch.Tensor]


def call_eager(reference: Reference, inputs: Sequence[torch.Tensor], seed: int) -> tuple[torch.Tensor, ...]:
    """Runs one call with a seed for torch's random numbers.  It may write to `inputs` and to buffers.  TF32 is off, because cuDNN
    may use it in one process and not in another."""
    with torch.random.fork_rng(devices=sorted({tensor.device.index or 0 for tensor in inputs if tensor.is_cuda})), without_tf32():
        torch.manual_seed(seed)
        with torch.no_grad(), traced_per_size():
            return reference(*inputs)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Disables TF32 inside this context: a GPU computes matrix products and convolutions in float32."""
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = False
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value


def run_eager(reference: Reference, tensors: Sequence[torch.Tensor], calls: int = 1, *, keep: bool = False) -> EagerResult:
    """Runs eager PyTorch `calls` times on copies of the inputs.  Restores the buffers at the end, unless `keep`."""
    outputs: tuple[torch.Tensor, ...] = ()
    try:
        for _ in range(calls):
            inputs = tuple([tensor.clone() for tensor in tensors])
            with torch.no_grad(), traced_per_size():
                outputs = reference(*inputs)
        state = reference.snapshot.current()
        buffers = reference.snapshot.storages()
        results = tuple([(value.clone() if value.untyped_storage().data_ptr() in buffers else value).detach() for value in outputs])
    finally:
        if not keep:
            reference.snapshot.restore()
    return EagerResult(outputs=results, inputs=inputs, state=state)


@contextmanager
def padded_calls(reference: Reference) -> Iterator[None]:
    """Marks the calls of a FlatModule inside this context as padded."""
    flat = reference if isinstance(reference, FlatModule) else None
    if flat is not None:
        flat.padded = True
    try:
        yield
    finally:
        if flat is not None:
            flat.padded = False


def traced_per_size() -> AbstractContextManager[Any]:
    """Makes torch trace while_loop, scan, flex_attention and similar operators for each size.  torch traces these even in eager
    mode.  With symbolic sizes it refuses some of them.  From the ninth trace on it refuses all (torch._dynamo.config, 2.11 and
    2.13)."""
    from torch._dynamo import config  # late import: reading a model does not need Dynamo

    context: AbstractContextManager[Any] = config.patch(automatic_dynamic_shapes=False, recompile_limit=1 << 20)
    return context
