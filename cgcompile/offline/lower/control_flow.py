"""Lowers programs with branches and loops: lowers every straight part (one without them) separately, and joins the events in order.
Of equal layers, only one is lowered; its launches are repeated with the weights of the other layers.

All bodies of a branch write to the same buffers, whose layouts the first body determines.  Loop-carried values have separate
buffers.  They start with the initial values, and are written in place at the end of the body.  The body also computes the condition
for the next iteration.  Values that pass from one part to another are dense.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from cgbundle.format.schema import IntKey

from ...errors import BuildError
from ...partition.blocks import Block, Branch, Loop, Operand, Straight, Switch, blocks, needed_after, straight_module, taken
from ...partition.layers import form
from ..assemble.merge import LoweredRegion, MergedProgram, dense_bytes
from ..decompose.arguments import DEVICE, argument_rows, changed_outputs, check_apart, fake_tensor
from ..decompose.device_program import on_device
from ..decompose.retrace import DENSE, Layout, Retraced, retrace_straight
from ..lowered import (
    INPUT,
    TEMPORARY,
    WEIGHT,
    Begin,
    Buffer,
    BufferView,
    Copy,
    End,
    Lowered,
    NextBody,
    Pointer,
    SetCondition,
)

LowerStraight = Callable[[Retraced, Sequence[tuple[int, ...] | None]], Lowered]
"""Lowers a straight part.  Takes the strides that each output must have, or None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Value:
    """The value of a node: a `number`, or a tensor like `fake`.  `name`: the weight's name, or the name in the merged program."""

    fake: torch.Tensor | None = None
    number: Any = None
    kind: str = TEMPORARY
    name: str = ""


Values = dict[str, _Value]

Pair = tuple[str, Operand]
"""(name of a tensor that the program writes to, its new value)."""


def lower_blocks(
    program: ExportedProgram,
    key: IntKey,
    tensors: Sequence[torch.Tensor],
    layouts: Sequence[tuple[int, ...] | None],
    lower: LowerStraight,
    live: Collection[str] = (),
) -> Lowered:
    """Lowers `program`, which has branches or loops, at the sizes of `tensors`.  `layouts`, `live` and errors: see `lower_key`."""
    source = program.graph_module
    program = program.run_decompositions({})
    rows, changed = argument_rows(program, tensors), changed_outputs(program)
    block = blocks(on_device(program.graph_module), layers=True)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values: Values = {}
    for placeholder, (kind, name, tensor) in zip(block.inputs, rows, strict=True):
        with mode:
            fake = None if tensor is None else fake_tensor(tensor)
        values[placeholder] = _Value(fake=fake, kind=kind, name=name)
    tensor_rows = [row for row in rows if row[2] is not None]
    check_apart([rows[argument] for _, argument in changed], tensor_rows)
    builder = _ProgramBuilder(
        key=key,
        source=source,
        mode=mode,
        lower=lower,
        changing=frozenset([rows[argument][1] for _, argument in changed if rows[argument][0] == WEIGHT]),
        live=frozenset(live),
        merged=MergedProgram(key=key, input_places={name: int(name) for name in _inputs(values)}),
    )
    new = [(block.inputs[argument], block.outputs[position]) for position, argument in changed]
    results = [
        output
        for output, spec in zip(block.outputs, program.graph_signature.output_specs, strict=True)
        if spec.kind == OutputKind.USER_OUTPUT
    ]
    fixed: list[Layout] = list(layouts or [None] * len(results))
    written = _written_early(replace(block, outputs=tuple(results)), new)
    builder.straight_parts(block, values, written)
    remaining = [pair for pair in new if all(pair not in pairs for pairs in written.values())]
    outputs = builder.last_part(block, values, results, fixed, remaining)
    return builder.lowered(_inputs(values), outputs)


def _written_early(block: Block, new: Sequence[Pair]) -> dict[int, list[Pair]]:
    """Returns the pairs that each straight part can write, by the part's position.  The part must compute the new value, and no
    later part may need the new or the old value.  A cache is then written in place.  Otherwise the last part would copy all of
    it."""
    producers = {node.name: number for number, part in enumerate(block.parts) if isinstance(part, Straight) for node in part.nodes}
    needed = needed_after(block)
    pairs: dict[int, list[Pair]] = {}
    for target, value in new:
        number = producers.get(str(value), len(needed) - 1)
        written_later = {other_value for other_target, other_value in new if other_target != target}
        if number < len(needed) - 1 and not {target, value} & (needed[number] | written_later):
            pairs.setdefault(number, []).append((target, value))
    return pairs


def _inputs(values: Values) -> dict[str, torch.Tensor]:
    return {value.name: value.fake for value in values.values() if value.kind == INPUT and value.fake is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class _LoweredPart:
    """A lowered straight part.  `names`: the kinds and names of its arguments.  `numbers`: results that are numbers, by
    position."""

    lowered: Lowered
    names: tuple[tuple[str, str], ...]
    numbers: dict[int, Any]

    def over(self, names: Sequence[tuple[str, str]]) -> Lowered:
        """Returns the same part with other weights, for arguments of these kinds and names."""
        new_names = dict(zip(self.names, names, strict=True))
        buffers = [
            replace(buffer, name=new_names.get((buffer.kind, buffer.name), (buffer.kind, buffer.name))[1])
            for buffer in self.lowered.buffers
        ]
        return replace(self.lowered, buffers=tuple(buffers))


@dataclass(kw_only=True, slots=True)
class _ProgramBuilder:
    """Builds the lowered program.  `changing`: the weights that it writes to.  `live`: weights that may change between calls.
    `conditionals`, `named`: the number of conditionals and of names in use.  `parts`: the lowered parts, by `form`."""

    key: IntKey
    source: torch.fx.GraphModule
    mode: FakeTensorMode
    lower: LowerStraight
    changing: frozenset[str]
    live: frozenset[str]
    merged: MergedProgram
    conditionals: int = 0
    named: int = 0
    parts: dict[Hashable, _LoweredPart] = field(default_factory=dict)

    def straight_parts(self, block: Block, values: Values, written: Mapping[int, Sequence[Pair]] = MappingProxyType({})) -> None:
        """Lowers all parts of a block except the last.  `written`: the pairs that a part writes, by the part's position."""
        for number, part in enumerate(block.parts[:-1]):
            new = written.get(number, ())
            match part:
                case Straight(outputs=part_outputs):
                    outputs = [output for output in part_outputs if output not in [value for _, value in new]]
                    if outputs or new:
                        output_values = self.straight(block, part, values, outputs, [DENSE] * len(outputs), new)
                        values.update(zip(outputs, output_values, strict=True))
                case Branch() | Switch():
                    self.branch(part, values)
                case Loop():
                    self.loop(block, part, values)

    def last_part(
        self,
        block: Block,
        values: Values,
        outputs: Sequence[Operand],
        layouts: Sequence[Layout],
        new: Sequence[Pair] = (),
        targets: Callable[[Lowered], Sequence[Pointer]] = lambda lowered: (),
    ) -> list[_Value]:
        part = block.parts[-1]
        assert isinstance(part, Straight)
        return self.straight(block, part, values, outputs, layouts, new, targets)

    def straight(
        self,
        block: Block,
        part: Straight,
        values: Values,
        outputs: Sequence[Operand],
        layouts: Sequence[Layout],
        new: Sequence[Pair] = (),
        targets: Callable[[Lowered], Sequence[Pointer]] = lambda lowered: (),
    ) -> list[_Value]:
        """Lowers a part that returns `outputs` and writes the pairs `new`.  Returns the outputs' values.  `targets` returns the
        addresses for the outputs, or () to leave them in the part's buffers."""
        module = straight_module(block, part, [*outputs, *[value for _, value in new]], [name for name, _ in new])
        taken_values = [values[name] for name in taken(module)]
        tensors = [(name, value) for name, value in zip(taken(module), taken_values, strict=True) if value.fake is not None]
        names: list[tuple[str, str]] = []
        crossing: list[str] = []
        for _, value in tensors:
            names.append((WEIGHT, value.name) if value.kind == WEIGHT else (INPUT, str(len(crossing))))
            crossing += [] if value.kind == WEIGHT else [value.name]
        places = [name for name, _ in tensors]
        written = [places.index(name) for name, _ in new]
        arguments = [value.number if value.fake is None else value.fake for value in taken_values]
        part_form = form(module, self._forms(taken(module), taken_values)), tuple(layouts), tuple(written)
        lowered_part = self.parts.get(part_form)
        if lowered_part is None:
            retraced, numbers = retrace_straight(module, self.source, arguments, names, self.mode, layouts, written)
            results = retraced.graph.graph.output_node().args[0]
            kept = [layout for number, layout in enumerate(layouts) if number not in numbers]
            fixed = [None if layout is None else result.meta["val"].stride() for layout, result in zip(kept, results, strict=True)]
            lowered_part = _LoweredPart(lowered=self.lower(retraced, fixed), names=tuple(names), numbers=numbers)
            if not any(constant.sources for constant in lowered_part.lowered.constants):  # folded weights belong to one layer
                self.parts[part_form] = lowered_part
        lowered, numbers = lowered_part.over(names), lowered_part.numbers
        self.named += 1
        output_names = [f"v{self.named}.{number}" for number in range(len(outputs)) if number not in numbers]
        region = LoweredRegion(name=f"p{self.named}", inputs=tuple(crossing), outputs=tuple(output_names), lowered=lowered)
        targeted = targets(lowered)
        self.merged.add(region, lowered, targeted)
        for name, output in zip(output_names, lowered.outputs, strict=True) if DENSE in layouts and not targeted else ():
            self._keep(name, lowered.buffers[output.pointer.buffer])
        results_of = iter(output_names)
        return [
            _Value(number=numbers[number]) if number in numbers else self._value(next(results_of)) for number in range(len(outputs))
        ]

    def _forms(self, names: Sequence[str], arguments: Sequence[_Value]) -> dict[str, Hashable]:
        """The properties of a part's arguments that affect lowering.  Of a weight, its position among the part's weights and
        whether it may change, but not its name."""
        weights: dict[str, int] = {}
        forms: dict[str, Hashable] = {}
        for name, value in zip(names, arguments, strict=True):
            if value.fake is None:
                forms[name] = type(value.number), value.number
            else:
                fake, weight = value.fake, value.kind == WEIGHT
                place = weights.setdefault(value.name, len(weights)) if weight else -1
                may_change = weight and (value.name in self.changing, value.name in self.live)
                forms[name] = place, may_change, fake.dtype, tuple(fake.shape), fake.stride()
        return forms

    def _keep(self, name: str, buffer: Buffer) -> None:
        """Copies a value in memory that a later part may write to: an input of the part, such as a loop-carried value, or state.
        Inductor assumes that the tensors of a part do not share memory."""
        if buffer.kind == INPUT or (buffer.kind == WEIGHT and buffer.name in self.changing):
            view = self.merged.views[name]
            target = self.merged.temporary(dense_bytes(view))
            self.merged.events.append(Copy(source=view.pointer, target=target, nbytes=dense_bytes(view)))
            self.merged.views[name] = replace(view, pointer=target)

    def branch(self, part: Branch | Switch, values: Values) -> None:
        if isinstance(part, Switch):
            kind, byte, operands = "switch", part.choice, part.operands
        else:
            kind, byte, operands = "if", part.predicate, (part.operands, part.operands)
        number = self._set_condition(values[byte])
        start = len(self.merged.events)
        self.merged.events.append(Begin(conditional=number, type=kind))
        places: list[Pointer] = []

        def allocated(lowered: Lowered) -> Sequence[Pointer]:
            places.extend([self.merged.temporary(dense_bytes(output), start) for output in lowered.outputs])
            return places

        first, *others = zip(part.bodies, operands, strict=True)
        body_values = self._body(*first, values, [DENSE] * len(part.outputs), allocated)
        strides = [None if value.fake is None else value.fake.stride() for value in body_values]
        for body, body_operands in others:
            self.merged.events.append(NextBody(conditional=number))
            other = self._body(body, body_operands, values, strides, lambda lowered: places)
            for one, two in zip(body_values, other, strict=True):
                if one.fake is None or two.fake is None or (one.fake.shape, one.fake.dtype) != (two.fake.shape, two.fake.dtype):
                    raise BuildError("lowering-broken", f"int_key {self.key}: the branches of {part.name} give different tensors")
        self.merged.events.append(End(conditional=number))
        values.update(zip(part.outputs, body_values, strict=True))

    def _body(
        self,
        block: Block,
        operands: Sequence[Operand],
        values: Values,
        layouts: Sequence[Layout],
        targets: Callable[[Lowered], Sequence[Pointer]],
    ) -> list[_Value]:
        block_values = dict(zip(block.inputs, self._operands(operands, values), strict=True))
        self.straight_parts(block, block_values)
        return self.last_part(block, block_values, block.outputs, layouts, (), targets)

    def loop(self, block: Block, part: Loop, values: Values) -> None:
        """Lowers a loop.  Loop-carried values are copied to separate buffers, except values that were computed only for the
        loop."""
        carried = [
            values[name] if isinstance(name, str) and self._is_last_use(block, part, name, values) else self._carried(part, first)
            for name, first in zip(part.carried, self._operands(part.carried, values), strict=True)
        ]
        arguments = [*carried, *self._operands(part.operands, values)]
        block_values = dict(zip(part.condition.inputs, arguments, strict=True))
        self.straight_parts(part.condition, block_values)
        (condition,) = self.last_part(part.condition, block_values, part.condition.outputs, [DENSE])
        number = self._set_condition(condition)
        self.merged.events.append(Begin(conditional=number, type="while"))
        block_values = dict(zip(part.body.inputs, arguments, strict=True))
        *new, condition_output = part.body.outputs
        pairs = [(place, value) for place, value in zip(part.body.inputs, new, strict=False) if place != value]
        written = _written_early(replace(part.body, outputs=(condition_output,)), pairs)
        self.straight_parts(part.body, block_values, written)
        remaining = [pair for pair in pairs if all(pair not in early for early in written.values())]
        (condition,) = self.last_part(part.body, block_values, [condition_output], [DENSE], remaining)
        self._set_condition(condition, number)
        self.merged.events.append(End(conditional=number))
        values.update(zip(part.outputs, carried, strict=True))

    def _is_last_use(self, block: Block, part: Loop, name: str, values: Values) -> bool:
        """Whether a straight part of this block computed the value, only the loop reads it, and no other value shares its memory.
        The loop may then write to this memory."""
        producers = [node for part in block.parts if isinstance(part, Straight) for node in part.nodes if node.name == name]
        if not producers or len(producers[0].users) != 1 or (*part.carried, *part.operands).count(name) != 1:
            return False
        buffer = self.merged.views[values[name].name].pointer.buffer
        others = [self.merged.views.get(value.name) for other, value in values.items() if other != name]
        unshared = not any(other is not None and other.pointer.buffer == buffer for other in others)
        return unshared and self.merged.buffers[buffer].kind == TEMPORARY

    def _carried(self, part: Loop, first: _Value) -> _Value:
        if first.fake is None:
            raise BuildError("lowering-broken", f"int_key {self.key}: {part.name} passes on a number, expected a tensor")
        source = self._pointer(first)
        view = BufferView(
            pointer=source,
            dtype=str(first.fake.dtype).removeprefix("torch."),
            shape=tuple(first.fake.shape),
            strides=first.fake.stride(),
        )
        target = self.merged.temporary(dense_bytes(view))
        self.merged.events.append(Copy(source=source, target=target, nbytes=dense_bytes(view)))
        self.named += 1
        name = f"v{self.named}"
        self.merged.views[name] = BufferView(pointer=target, dtype=view.dtype, shape=view.shape, strides=view.strides)
        return self._value(name)

    def _set_condition(self, value: _Value, number: int | None = None) -> int:
        if number is None:
            number, self.conditionals = self.conditionals, self.conditionals + 1
        self.merged.events.append(SetCondition(conditional=number, byte=self._pointer(value)))
        return number

    def _operands(self, names: Sequence[Operand], values: Mapping[str, _Value]) -> list[_Value]:
        return [values[name] if isinstance(name, str) else _Value(number=name) for name in names]

    def _value(self, name: str) -> _Value:
        view = self.merged.views[name]
        with self.mode:
            fake = torch.empty_strided(view.shape, view.strides, dtype=getattr(torch, view.dtype), device=DEVICE)
        return _Value(fake=fake, name=name)

    def _pointer(self, value: _Value) -> Pointer:
        if value.kind == TEMPORARY:
            return self.merged.views[value.name].pointer
        assert value.fake is not None
        return self.merged.argument_pointer(value.kind, value.name, value.fake.element_size() * math.prod(value.fake.shape))

    def lowered(self, inputs: Mapping[str, torch.Tensor], outputs: Sequence[_Value]) -> Lowered:
        """Returns the program.  `inputs`: the call's inputs by their numbers, as text."""
        views = []
        for number in range(len(inputs)):
            fake = inputs[str(number)]
            nbytes = fake.element_size() * math.prod(fake.shape)
            place = self.merged.argument_pointer(INPUT, str(number), nbytes)
            dtype = str(fake.dtype).removeprefix("torch.")
            views.append(BufferView(pointer=place, dtype=dtype, shape=tuple(fake.shape), strides=fake.stride()))
        return self.merged.joined(views, [self.merged.views[output.name] for output in outputs])
