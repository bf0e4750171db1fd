"""Runs in a recorder process: captures a program with branches and loops.  Each straight part is lowered and captured separately,
in program order, into one private pool, so that torch's allocator plans their common arena.  A live tensor keeps its memory.

Results need fixed addresses.  A branch's results are the tensors of its first body; the other bodies copy their results into these
tensors.  A loop keeps its carried values in separate tensors, filled before the loop and written in place at the end of its body.
All iterations use the same memory, so the values from outside that the body reads stay alive until the loop is captured.

A capture runs no kernel, but the warm-up of the next part does, and may use results as indices.  So after each part its results get
the values that eager PyTorch computes.  Integer arguments of bodies that the example does not run are 0: they may be indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from ...errors import ModelError
from ...partition.blocks import Block, Branch, Loop, Operand, Straight, Switch, blocks, needed_after, straight_module, taken
from ...partition.node_kinds import writes_to
from ...partition.straight_parts import end_with_copies, held_tensors, keep_outputs, written_tensors
from ...targets.cuda.lowering import repair
from ...targets.cuda.tensors import tensor_place
from .steps import Conditional, SetCondition, Step, Steps

Values = dict[str, Any]
"""Tensors on the GPU, and numbers, by name."""

Lower = Callable[[GraphModule], Callable[..., Any]]
"""Lowers a module to a function that launches its kernels and returns its results in order."""

Warm = Callable[[Callable[[], Any], str, Callable[[], None]], None]
"""Warms up a call before its capture.  Arguments: the call, its name in messages, and a function to call after every run."""

Keep = Callable[[Callable[[], Any], str], tuple[torch.cuda.CUDAGraph | None, Sequence[Tensor]]]
"""Captures a call that ran before, given its name in messages.  Returns the graph (None if it only ran) and the results."""


def capture_blocks(
    module: GraphModule, leaves: Sequence[Any], lower: Lower, warm: Warm, keep: Keep, constant: Callable[[Tensor], bool], where: str
) -> tuple[Steps, list[Any]]:
    """Captures `module`, which has branches or loops, for flat arguments with placed tensors.  Returns the steps and the results.
    `constant`: whether a tensor is a weight that no program writes to.  Afterwards mutated tensors hold the values that eager
    PyTorch computes.  Raises what `warm` and `keep` do, and not-capturable."""
    block = blocks(module)
    capturer = _BlockCapture(lower=lower, warm=warm, keep=keep, constant=constant, where=where)
    steps: list[Step] = []
    with torch.no_grad():
        results = capturer.block(block, dict(zip(block.inputs, leaves, strict=True)), steps, _BlockEnd(), True)
    return tuple(steps), results


@dataclass(frozen=True, kw_only=True, slots=True)
class _BlockEnd:
    """What a block does at its end.  `copies`: (name of a tensor, value to copy into it).  `owned`: no result shares memory with
    another tensor.  `changing`: storages that copies of this block, or of a block around it, write to."""

    copies: tuple[tuple[str, Operand], ...] = ()
    owned: bool = False
    changing: frozenset[int] = frozenset()


@dataclass(kw_only=True, slots=True)
class _BlockCapture:
    """Captures blocks recursively.  `conditionals` and `parts` count the branches and loops, and the straight parts, so far."""

    lower: Lower
    warm: Warm
    keep: Keep
    constant: Callable[[Tensor], bool]
    where: str
    conditionals: int = 0
    parts: int = 0

    def block(self, block: Block, values: Values, steps: list[Step], last: _BlockEnd, runs: bool) -> list[Any]:
        """Captures a block, appends its steps to `steps`, and returns its results.  `runs`: whether the example call runs it.
        Deletes values that no later part needs, and all values at the end, so that later parts can use their memory."""
        values.update(held_tensors(block.module))
        needed = needed_after(block, [leaf for pair in last.copies for leaf in pair])
        for part, later in zip(block.parts, needed, strict=True):
            match part:
                case Branch() | Switch():
                    self._branch(part, values, steps, last, runs)
                case Loop():
                    self._loop(part, values, steps, last, runs)
                case Straight() if part is block.parts[-1]:
                    results = self._straight(block, part, values, block.outputs, steps, last)
                    values.clear()
                    return results
                case Straight(outputs=outputs) if outputs or any(map(writes_to, part.nodes)):
                    inner = _BlockEnd(changing=last.changing)
                    values.update(zip(outputs, self._straight(block, part, values, outputs, steps, inner), strict=True))
            for name in [name for name in values if name not in later]:
                del values[name]
        raise AssertionError("a block ends with a straight part")

    def _straight(
        self, block: Block, part: Straight, values: Values, outputs: Sequence[Operand], steps: list[Step], last: _BlockEnd
    ) -> list[Any]:
        names = [name for name, _ in last.copies]
        module = straight_module(block, part, [*outputs, *[value for _, value in last.copies]], names)
        operands = [values[name] for name in taken(module)]
        end_with_copies(repair(module), [taken(module).index(name) for name in names])
        written = written_tensors(module, operands)
        before = _clones(written)
        result_values = [_clone(result) for result in module(*operands)]
        after = _clones(written)

        def restore() -> None:
            _fill(written, before)

        restore()
        positions = [position for position, result in enumerate(result_values) if isinstance(result, Tensor)]
        self.parts += 1
        if positions or written:
            keep_outputs(module, positions)
            call = self._call(module, operands, last)
            where = f"{self.where}, straight part {self.parts}"
            self.warm(call, where, restore)
            graph, results = self.keep(call, where)
            steps += [] if graph is None else [graph]
            shared = {_storage(tensor) for tensor in [*operands, *written] if isinstance(tensor, Tensor)}
            for position, result in zip(positions, results, strict=True):
                if _storage(result) not in shared:
                    result.copy_(result_values[position])
                result_values[position] = result
        _fill(written, after)
        return result_values

    def _call(self, module: GraphModule, operands: Sequence[Any], last: _BlockEnd) -> Callable[[], list[Tensor]]:
        lowered = self.lower(module)
        arg_storages = {_storage(tensor) for tensor in [*operands, *held_tensors(module).values()] if isinstance(tensor, Tensor)}

        def call() -> list[Tensor]:
            shared = set(arg_storages) if last.owned else set(last.changing)
            tensors = []
            for result in tree_leaves(lowered(*operands)):
                unshared = _dense_copy(result) if _storage(result) in shared or _overlaps(result) else result
                shared |= {_storage(unshared)} if last.owned else set()
                tensors.append(unshared)
            return tensors

        return call

    def _branch(self, part: Branch | Switch, values: Values, steps: list[Step], last: _BlockEnd, runs: bool) -> None:
        if isinstance(part, Switch):
            byte, bodies, operands = values[part.choice], part.bodies, part.operands
            chosen = int(byte)
        else:
            byte, bodies, operands = values[part.predicate], part.bodies, (part.operands, part.operands)
            chosen = 0 if bool(byte) else 1
        number = self._set_condition(byte, steps)
        results: list[Any] = []
        example_results: list[Any] = []
        inner: list[Steps] = []
        for position, (body, names) in enumerate(zip(bodies, operands, strict=True)):
            body_runs, body_steps, arguments = runs and chosen == position, list[Step](), _operands(names, values)
            inputs = dict(zip(body.inputs, arguments, strict=True))
            with self._harmless(arguments, body_runs):
                if not position:
                    results = self.block(body, inputs, body_steps, _BlockEnd(owned=True, changing=last.changing), body_runs)
                else:
                    targets = {f"{part.name}.result.{number}": result for number, result in enumerate(results)}
                    ending = _BlockEnd(copies=tuple(zip(targets, body.outputs, strict=True)), changing=last.changing)
                    self.block(replace(body, outputs=()), {**targets, **inputs}, body_steps, ending, body_runs)
            if chosen == position:
                example_results = _clones(results)
            inner.append(tuple(body_steps))
        _fill(results, example_results)
        kind = "switch" if isinstance(part, Switch) else "if"
        steps.append(Conditional(conditional=number, type=kind, bodies=tuple(inner)))
        values.update(zip(part.outputs, results, strict=True))

    def _loop(self, part: Loop, values: Values, steps: list[Step], last: _BlockEnd, runs: bool) -> None:
        initial = _operands(part.carried, values)

        def begin() -> list[Tensor]:
            return [_dense_copy(tensor) for tensor in initial]

        where = f"{self.where}, carried values of {part.name}"
        self.warm(begin, where, lambda: None)
        graph, carried = self.keep(begin, where)
        steps += [] if graph is None else [graph]
        _fill(carried, initial)
        arguments = [*carried, *_operands(part.operands, values)]
        bindings = dict(zip(part.condition.inputs, arguments, strict=True))
        (condition,) = self.block(part.condition, bindings, steps, _BlockEnd(changing=last.changing), runs)
        number = self._set_condition(condition, steps)
        runs = runs and bool(condition)
        *new, continues = part.body.outputs
        pairs = [(place, value) for place, value in zip(part.body.inputs, new, strict=False) if place != value]
        iteration: list[Step] = []
        with self._harmless(arguments, runs, restored=carried):
            bindings = dict(zip(part.body.inputs, arguments, strict=True))
            changing = last.changing | {_storage(tensor) for tensor in carried}
            body = replace(part.body, outputs=(continues,))
            (condition,) = self.block(body, bindings, iteration, _BlockEnd(copies=tuple(pairs), changing=changing), runs)
            self._set_condition(condition, iteration, number)
        if runs:
            _fill(carried, _final_values(part, carried, arguments[len(carried) :]))
        steps.append(Conditional(conditional=number, type="while", bodies=(tuple(iteration),)))
        values.update(zip(part.outputs, carried, strict=True))

    def _set_condition(self, value: Any, steps: list[Step], number: int | None = None) -> int:
        if not isinstance(value, Tensor):
            raise ModelError("not-capturable", f"{self.where}: the branch depends on a number of Python, not on a tensor")
        if number is None:
            number, self.conditionals = self.conditionals, self.conditionals + 1
        steps.append(SetCondition(conditional=number, byte=tensor_place(value)))
        return number

    @contextmanager
    def _harmless(self, arguments: Sequence[Any], runs: bool, restored: Sequence[Tensor] = ()) -> Iterator[None]:
        """Sets integer arguments to 0 while a body that the example does not run is captured: they may be indices that are valid
        only if the condition holds.  Afterwards restores them, and always the tensors `restored`."""
        zeroed = [arg for arg in arguments if not runs and isinstance(arg, Tensor) and _may_index(arg) and not self.constant(arg)]
        saved = [*zeroed, *restored]
        before = _clones(saved)
        for tensor in zeroed:
            tensor.zero_()
        yield
        _fill(saved, before)


def _final_values(part: Loop, carried: Sequence[Tensor], operands: Sequence[Any]) -> list[Tensor]:
    """Runs the rest of the loop in eager PyTorch from its current carried values, and returns the final ones."""
    current: Sequence[Any] = [tensor.clone() for tensor in carried]
    while bool(tree_leaves(part.condition.source(*current, *operands))[0]):
        current = tree_leaves(part.body.source(*current, *operands))
    return list(current)


def _operands(names: Sequence[Operand], values: Mapping[str, Any]) -> list[Any]:
    return [values[name] if isinstance(name, str) else name for name in names]


def _storage(tensor: Any) -> int:
    """Returns the address of the tensor's storage, or 0 for a number or an empty tensor, which share no memory."""
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, Tensor) and tensor.numel() else 0


def _overlaps(tensor: Tensor) -> bool:
    """Whether some elements share memory, as in an expanded tensor."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _dense_copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.preserve_format)


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _clones(values: Sequence[Any]) -> list[Any]:
    return [_clone(value) for value in values]


def _fill(targets: Sequence[Any], values: Sequence[Any]) -> None:
    for target, value in zip(targets, values, strict=True):
        if isinstance(target, Tensor):
            target.copy_(value)


def _may_index(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.int32, torch.int64)
